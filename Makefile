# On a machine with Python 3.11 or later and make, each target installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Where tests and benches find the published data sets; they are not part of the repository.
export FOLDWISE_DATA ?= $(abspath ../shared/data)

.PHONY: demo test lint types format docs bench compare-quick studies clean

demo: .venv/installed
	$(BIN)/foldwise demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

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
	rm -rf .venv build dist

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
