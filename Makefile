# On a machine with Python 3.11 or later and make, each target installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
# The Pythons of test-newest and test-oldest, which have environments of their own.
NEWEST := 3.13
OLDEST := 3.11
PYTHON_NEWEST ?= $(shell .ci/find-python $(NEWEST))
PYTHON_OLDEST ?= $(shell .ci/find-python $(OLDEST))
# Where tests and benches find the published data sets; they are not part of the repository.
export FOLDWISE_DATA ?= $(abspath ../shared/data)

.PHONY: demo test test-newest test-newest-fast test-oldest lint types format docs bench compare-quick studies clean

demo: .venv/installed
	$(BIN)/foldwise demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

# the whole suite on Python 3.13 with the newest of every package, not held by constraints.txt
test-newest: .venv-newest/installed-dev
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile

# what is marked fast, from files that need few packages: PyMC and Bambi are in test-newest only
test-newest-fast: .venv-newest/installed
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m fast $$(grep -rl --include="test_*.py" "mark\.fast" tests)

# the whole suite with the oldest versions that pyproject.toml allows; these warn of what is newer
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile -W ignore::DeprecationWarning -W ignore::FutureWarning

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

bench: .venv/installed-bench
	$(BIN)/python bench/calibration.py
	$(BIN)/python bench/cells.py --seeds 100
	$(BIN)/python bench/growth.py
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

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'foldwise needs Python 3.11 or later, got ' + sys.version)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.venv/installed-bench: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

.venv-newest/installed: pyproject.toml
	test -n "$(PYTHON_NEWEST)" || { echo "no Python $(NEWEST) is found: install it, or say where: make PYTHON_NEWEST=/path/to/python" >&2; exit 1; }
	$(PYTHON_NEWEST) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -e ".[numpyro,sklearn]" polars pytest pytest-xdist
	.venv-newest/bin/python -m pip list --disable-pip-version-check
	touch $@

.venv-newest/installed-dev: .venv-newest/installed
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e ".[dev]"
	.venv-newest/bin/python -m pip list --disable-pip-version-check
	touch $@

.venv-oldest/installed: pyproject.toml .ci/oldest.py
	test -n "$(PYTHON_OLDEST)" || { echo "no Python $(OLDEST) is found: install it, or say where: make PYTHON_OLDEST=/path/to/python" >&2; exit 1; }
	$(PYTHON_OLDEST) -m venv --clear .venv-oldest
	$(PYTHON_OLDEST) .ci/oldest.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary -c .venv-oldest/constraints.txt -e ".[all]" polars pytest pytest-xdist scoringrules
	.venv-oldest/bin/python -m pip list --disable-pip-version-check
	touch $@
