# make demo: fresh clone to an open dashboard.   make test: fresh clone to a passed test suite.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FAISS ?= cpu
PORT ?= 8501
DEMO := assets/demo
ARTIFACTS := artifacts/tide-8e

.PHONY: install demo artifacts test test-real check format screenshots clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(FAISS),corpus,evaluate,tensorboard,dev]"
	touch $@

artifacts: install
	$(BIN)/tide-precompute $(DEMO)/tide-8e --base $(DEMO)/base --out $(ARTIFACTS) --reuse $(DEMO)/artifacts

demo: artifacts
	$(BIN)/tide-dashboard $(ARTIFACTS) --port $(PORT)

test: check artifacts
	$(BIN)/python -m pytest

# Opt-in: downloads a real LLaMA checkpoint, trains on it for some minutes (docs/upcycling.md), and downloads GloVe.
test-real: install
	TIDE_REAL=1 $(BIN)/python -m pytest tests/real -s

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

screenshots: artifacts
	$(BIN)/python -m assets.screenshots

clean:
	rm -rf $(VENV) artifacts
