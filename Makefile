# On a machine with Python 3.11 or later and make, each target installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Where tests and benches find the published data sets; they are not part of the repository.
export FOLDWISE_DATA ?= $(abspath ../shared/data)

# Python for the newest versions of everything.
NEWEST ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python) $(shell command -v python3.13))
# Tests that take a minute or two, of what depends most on other packages.
FAST := tests/support tests/folds tests/scores/test_sums.py tests/scores/test_bridge.py tests/scores/test_diagnostics.py \
	tests/models/test_model.py tests/results/test_files.py tests/results/test_sealing.py tests/test_surroundings.py

.PHONY: print-newest test-newest fast-newest test-oldest demo test lint types format docs bench compare-quick studies clean

demo: .venv/installed
	$(BIN)/foldwise demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

# the whole suite with the newest Python, JAX and ArviZ that install; weekly
test-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile

print-newest:
	@echo $(NEWEST)

fast-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile $(FAST)

# the oldest versions that pyproject.toml allows
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile $(FAST)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: .venv/installed-dev
	$(BIN)/python bench/calibration.py
	$(BIN)/python bench/trust.py
	$(BIN)/python bench/trust.py --healthy
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/scores.py
	$(BIN)/python bench/family.py
	$(BIN)/python bench/adapters.py
	$(BIN)/python bench/wells.py
	$(BIN)/python bench/compare.py

# fails where a ratio to other samplers is less than half of its target; two minutes
compare-quick: .venv/installed-dev
	$(BIN)/python bench/compare.py --quick

# needs FOLDWISE_DATA, the folder of the data sets; FIGURES=folder writes figures there
studies: .venv/installed-dev
	$(BIN)/python bench/studies.py $(if $(FIGURES),--figures $(FIGURES))

clean:
	rm -rf .venv .venv-newest .venv-oldest build dist

.venv-newest/installed: pyproject.toml
	test -n "$(NEWEST)" || { echo "Python 3.13 was not found: make test-newest NEWEST=/path/to/python"; exit 1; }
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e ".[dev]"
	touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e . \
		cloudpickle pytest pytest-xdist
	touch $@

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'foldwise needs Python 3.11 or later, got ' + sys.version)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@
