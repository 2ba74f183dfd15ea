# make serve   install and serve the bundled models on 127.0.0.1:8000
# make test    install and run every test (JOBS of the quick ones at once)
# make release  an SBOM and the licences of what is installed, in build/      make audit   known faults
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
TOOLS := .venv/release/bin
AUDIT := .venv/release/.ready

.PHONY: serve test quick lint format clean release audit

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

release: $(READY) $(AUDIT)
	mkdir -p build
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(BIN)/python
	$(TOOLS)/pip-licenses --python $(BIN)/python --format=markdown --with-urls --output-file build/licences.md

audit: $(AUDIT)
	$(TOOLS)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

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

# In an environment of their own: their dependencies are not Hedgerow's.
$(AUDIT): Makefile
	$(PYTHON) -m venv .venv/release
	$(TOOLS)/pip install -q --disable-pip-version-check cyclonedx-bom==7.5.0 pip-licenses==5.5.5 pip-audit==2.10.1
	touch $@
