# make train   set up, then train the default model (minutes on a CPU)
# make test    set up, then ruff and the fast tests (under 8 minutes on two cores)
# make test-all    every test, the slow ones too (faults, kills, whole runs)
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup train test test-all lint clean

setup: $(READY)

# One environment for everything; made again only when the dependencies change.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

train: $(READY)
	$(BIN)/python train.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/python -m pytest -m 'not slow'

test-all: lint
	$(BIN)/python -m pytest

clean:
	rm -rf .venv build *.egg-info
