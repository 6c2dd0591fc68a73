# Needs make and Python 3.11 or newer; everything else goes into .venv (see fsdp_sim/setup.py).
.DEFAULT_GOAL := help
.PHONY: help setup dev lock demo check test test-all mutation matrix lab notebooks html site slides nbgrader assignments lint bench chaos gpu-day clean

TORCH ?= auto
PORT ?= 8888
COURSE ?= course
JOBS ?= 2
ARGS ?=
# What another project put there must not shadow what is in .venv.
unexport PYTHONPATH PYTHONHOME
# Compiled files make every start of a rank faster.
unexport PYTHONDONTWRITEBYTECODE

# The python3 you have if it will do (it is the one whose torch would be kept), else another one beside it, or uv's.
PYTHONS = $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 $(UVS))
UVS = $(shell uv python find '>=3.11,<3.15' 2>/dev/null)
WILL_DO = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
IN_VENV = PATH="$(CURDIR)/.venv/bin:$$PATH"

help:
	@echo 'make demo        train on 4 ranks, predict the same step, write demo.html'
	@echo 'make check       before a commit: lint, the quick tests, one notebook'
	@echo 'make test        run the tests and every notebook          ARGS="-k name" passes options to pytest; JOBS=0: one by one'
	@echo 'make test-all    everything: besides, both editions, damage, chaos'
	@echo 'make lab         open JupyterLab at the first notebook    PORT=8889 takes another port'
	@echo 'make notebooks   rebuild the notebooks from their masters'
	@echo 'make site        the web edition, into build/site: needs npm          ARGS=--no-live: all but what runs in the page'
	@echo 'make html        the course as pages to read, into build/html'
	@echo 'make slides      chapters and plans as slides with speaker notes, into build/slides    ARGS="05_overlap --pdf"'
	@echo 'make assignments nbgrader in a .venv of its own, and a course of assignments    COURSE=folder  NAMES="05_overlap"'
	@echo 'make lint        ruff and mypy'
	@echo 'make compiled    a wheel, into build/compiled, in which the engine simulates faster: needs a C compiler'
	@echo 'make bench       run the benchmarks'
	@echo 'make mutation    change the code in ways that tests must notice, one by one, and run those tests'
	@echo 'make matrix      try versions of torch and Python, each in an environment of its own    ARGS="--torch 2.14.1"'
	@echo 'make gpu-day     an hour on the GPUs of this machine: checks, labs, recordings, one file of them    ARGS=--list'
	@echo 'make chaos       kill a training 100 times at random and count what was lost'
	@echo 'make setup       only make .venv, which the others do when it is missing or out of date'
	@echo 'make dev         what developing needs besides: test, lint, notebooks, html and slides do it when it is missing'
	@echo 'make lock        pin the packages of pyproject.toml anew, by their hashes'
	@echo 'make clean       remove what the others made, .venv too'
	@echo
	@echo 'TORCH=keep|cpu|cuda chooses the build of torch: by default a usable one is kept, else CUDA where there is a'
	@echo 'driver, else CPU. PYTHON=/path/to/python3 chooses the Python.'

# With no Python that will do, setup.py is run all the same: it says what is wrong with the one there is.
setup:
	@python=; for p in $(PYTHONS); do "$$p" -c '$(WILL_DO)' 2>/dev/null && python=$$p && break; done; \
	python=$${python:-$$(command -v $(firstword $(PYTHONS)))}; \
	if [ -z "$$python" ]; then echo 'set-up failed: there is no $(firstword $(PYTHONS)): install Python 3.11 or newer' \
	    '(Debian, Ubuntu: sudo apt install python3 python3-venv) or name one, as in make PYTHON=/path/to/python3.11.' >&2; \
	    exit 1; fi; \
	"$$python" fsdp_sim/setup.py --torch '$(TORCH)' $(SETUP_ARGS)

# What the targets below that are for developers need besides, once.
dev: setup
	@.venv/bin/python fsdp_sim/setup.py --dev

demo: setup
	@$(IN_VENV) fsdp-sim demo

# Tests and notebooks in one call, so that no core waits; conftest.py says what belongs to which, and what begins first.
# Of files, one worker takes the whole: they share ranks, servers and kernels.
PYTEST = python -m pytest --nbval --nbval-current-env --nbval-sanitize-with notebooks/masters/nbval.cfg \
    --nbval-cell-timeout=300 -n $(JOBS) --dist loadfile \
    --no-loadscope-reorder
check: lint
	@$(IN_VENV) $(PYTEST) tests notebooks -m "not (slow or tail)" $(ARGS)

test: dev
	@$(IN_VENV) $(PYTEST) tests notebooks -m "not tail" $(ARGS)

# All of it happens even when something fails, so that one call shows everything.
test-all: dev nbgrader
	@status=0; export $(IN_VENV); $(PYTEST) tests notebooks --hypothesis-profile=many $(ARGS) || status=1; \
	python -m tests.faults.chaos --kills 40 || status=1; exit $$status

mutation: dev
	@$(IN_VENV) python -m tests.mutation $(ARGS)

# Needs room and minutes: an environment for each version, under build/matrix.
matrix: dev
	@$(IN_VENV) python -m tests.matrix $(ARGS)

lab: SETUP_ARGS = --port '$(PORT)'
lab: setup
	@$(IN_VENV) fsdp-sim lab notebooks --port '$(PORT)'

notebooks: dev
	@.venv/bin/python -m notebooks.masters.build

html: dev
	@.venv/bin/python -m web.pages build/html

site: dev
	@.venv/bin/python -m web.build $(ARGS)

slides: dev
	@.venv/bin/python -m notebooks.masters.slides $(ARGS)

nbgrader: setup
	@.venv/bin/python fsdp_sim/setup.py --nbgrader

assignments: dev nbgrader
	@.venv/bin/python -m notebooks.masters.assignments '$(COURSE)' $(NAMES)

lint: dev
	@status=0; .venv/bin/ruff check || status=1; .venv/bin/ruff format --check || status=1; \
	.venv/bin/mypy || status=1; exit $$status

# A wheel, and not files beside the sources, which a change of these would leave behind.
compiled: dev
	@FSDP_SIM_COMPILED=1 .venv/bin/python -m pip wheel -q --no-deps --no-build-isolation --disable-pip-version-check \
	    -w build/compiled . && ls build/compiled/*.whl

bench: dev
	@for script in tests/bench/bench_*.py; do echo "== $$script"; \
	  $(IN_VENV) python -m tests.bench.$$(basename $$script .py) || exit 1; done

chaos: dev
	@$(IN_VENV) python -m tests.faults.chaos $(ARGS)

gpu-day: dev
	@$(IN_VENV) python -m labs.gpu_day $(ARGS)

# Pins anew what pyproject.toml asks for; what is pinned already stays, but for UPGRADE="--upgrade-package numpy".
PIN = .venv/bin/uv pip compile -q --universal --generate-hashes --no-annotate --custom-compile-command 'make lock' \
    --no-emit-package torch $(UPGRADE)
lock: setup
	@$(PIN) pyproject.toml --extra course --group setup -o requirements.lock
	@$(PIN) pyproject.toml --extra dev -c requirements.lock -o requirements-dev.lock \
	    $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' requirements.lock)
	@$(PIN) --group nbgrader -c requirements.lock -c requirements-dev.lock -o notebooks/instructor/nbgrader.lock

clean:
	rm -rf .venv .venv-nbgrader build out demo.html notebooks/*.trace.json.gz *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
