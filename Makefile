# `make install` builds .venv, and so do other targets first; a second run reuses it. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLUSTER_STAMP := $(VENV)/.installed-cluster
DOCS_STAMP := $(VENV)/.installed-docs
REAL_MODELS ?= $(VENV)/real-models
REAL_NAMES ?= smollm2
REAL_STAMP := $(VENV)/.installed-real
# Gemma's terms are to be accepted first, so only REAL_NAMES="smollm2 gemma3" runs its tests.
REAL_SELECT := $(if $(findstring gemma3,$(REAL_NAMES)),,-k 'not gemma3')
# Comparisons with llama.cpp and with indic-nlp-library, which are skipped where these are not installed.
REFERENCE_TESTS := tests/models/test_llama_cpp.py tests/text/test_gguf_pre_tokenizers.py tests/text/test_translation_text.py
SMOLLM2 := $(REAL_MODELS)/smollm2-135m-instruct.q4_1.gguf
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Tests that share a GPU run in this many processes; those marked `gpu_alone` follow, one at a time.
GPU_WORKERS ?= 8
GPU_PYTEST := $(BIN)/python -m pytest $$(grep -rl 'mark\.gpu' tests --include='test_*.py')
GPU_SHARED := -n $(GPU_WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: help install demo test test-fast test-gpu test-gpu-fast test-cluster test-real lint docs tables repeat clean
help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(STAMP)  ## Build .venv with Meltcore, its extras and the tools of tests.

demo: $(STAMP)  ## Serve the bundled models as one fleet, open every route, load it with 10 to 10,000 connections, report.
	@# Without the language model the demo runs too, and says that it is missing.
	-$(BIN)/python scripts/real_models.py fetch $(REAL_MODELS) smollm2
	$(BIN)/meltcore demo $$(test -f $(SMOLLM2) && echo --chat-model $(SMOLLM2))

test: $(STAMP)  ## Run every test (about 16 minutes on two cores).
	$(PYTEST)

test-fast: $(STAMP)  ## Run the tests that are not marked slow (2 to 3 minutes on two cores).
	$(PYTEST) -m 'not slow'

test-gpu: $(STAMP)  ## Run every test that needs a GPU, on one GPU.
	$(GPU_PYTEST) $(GPU_SHARED) -m 'gpu and not gpu_alone' --durations 20; shared=$$?; \
	$(GPU_PYTEST) -n 0 -m gpu_alone --durations 20 && exit $$shared

test-gpu-fast: $(STAMP)  ## Run the tests that may share a GPU and are not slow.
	$(GPU_PYTEST) $(GPU_SHARED) -m 'gpu and not gpu_alone and not slow'

test-cluster: $(CLUSTER_STAMP)  ## Run the tests that need Ray, which this installs (about 12 minutes).
	@# One after another: each starts a cluster. -rs names what is skipped, as where network namespaces are not permitted.
	$(BIN)/python -m pytest -rs -m ray tests/fleet/ray_cluster

test-real: $(REAL_STAMP)  ## Fetch language models with real weights and compare them with transformers (about 15 minutes).
	$(BIN)/python scripts/real_models.py fetch $(REAL_MODELS) $(REAL_NAMES)
	REQUIRE_REAL=1 REAL_MODELS=$(REAL_MODELS) $(BIN)/python -m pytest -n 0 -rs tests/real -m 'not gpu' $(REAL_SELECT)
	REQUIRE_REAL=1 $(BIN)/python -m pytest -n 0 -rs $(REFERENCE_TESTS)

lint: $(STAMP)  ## Check format, lint rules and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(DOCS_STAMP)  ## Build the documentation into site/, strict; offline after the first run.
	$(BIN)/python scripts/performance_tables.py --check
	$(BIN)/python scripts/cli_reference.py --check
	$(BIN)/python scripts/fleet_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	$(BIN)/python scripts/check_site.py site

tables: $(STAMP)  ## Write the tables of the docs from benchmarks/results/, and draw its pictures.
	$(BIN)/python scripts/performance_tables.py
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/python scripts/fleet_reference.py
	$(BIN)/python scripts/plan_picture.py
	$(BIN)/python scripts/replica_picture.py
	$(BIN)/python scripts/report_picture.py

repeat: $(STAMP)  ## Run the command behind committed rows again: make repeat ROW=README, or ROW=client_cost/cpu.
	$(BIN)/python benchmarks/repeat.py $(ROW)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "meltcore needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# Dependency groups need pip 25.1 or later.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt --group test --group lint -e '.[audio,av,clients,engine,otel,swagger,translate]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	touch $@

$(CLUSTER_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cluster]'
	touch $@

$(REAL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group real
	@# Its requirements are sphinx-argparse, sphinx-rtd-theme and morfessor too, which its sentences do not need.
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps indic-nlp-library
	touch $@

clean:  ## Remove the virtual environment and the built documentation.
	rm -rf $(VENV) site
