# make serve   install and serve the bundled models on 127.0.0.1:8000
# make test    install and run every test (JOBS of the quick ones at once)
# make quick   the quick suite      make lint   style, types, import arrows
#
# TORCH_INDEX: the index torch comes from. Empty takes pip's own; on Linux without a GPU, name
# PyTorch's CPU index to spare gigabytes of CUDA packages.
PYTHON ?= python3
TORCH_INDEX ?=
SERVE ?=
JOBS ?= 2

BIN := .venv/bin
SERVED := .venv/.served
READY := .venv/.ready

.PHONY: serve test quick lint format clean

serve: $(SERVED)
	$(BIN)/hedgerow serve $(SERVE)

test: quick
	$(BIN)/pytest -m slow

quick: $(READY)
	$(BIN)/pytest -m "not slow" -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv

.venv/bin/pip:
	$(PYTHON) -m venv .venv

$(SERVED): pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(READY): $(SERVED)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .[dev,train,load]
	touch $@
