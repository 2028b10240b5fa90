# The two commands of the README: `make demo` and `make test`. Both make .venv first, from requirements.lock.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS := .test-results
INSTALLED := $(VENV)/.installed
# Tests start some thousand short Python processes: without compiled modules each would compile Headway again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all mutants test-gpu lint bench bench-state bench-agent chaos clean

demo: $(INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

# Two test processes per core, many tests wait for processes of their own; more than sixteen gain nothing. In the order
# of the folders: by number of tests, the longest files, which have few, would come last.
TESTERS ?= $(shell $(PYTHON) -c 'import os; print(min(16, 2 * os.cpu_count()))')
test: $(INSTALLED)
	@$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder --cpu-record=$(RESULTS)/test.json

# Everything that runs without a GPU, however long it takes; what has passed on the same sources is not run again.
test-all: $(INSTALLED)
	@$(BIN)/python tests/run_all.py --testers $(TESTERS) $(PACKAGE)

# Ten and more one-line bugs, one after the other: does the default suite catch each?
mutants: $(INSTALLED)
	@$(BIN)/python tests/mutants.py

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest -m gpu

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tests/check_budget.py $(RESULTS)/test.json

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/loader.py
	@$(BIN)/python benchmarks/events.py
	@$(BIN)/python benchmarks/plan/accuracy.py

bench-state: $(INSTALLED)
	@$(BIN)/python benchmarks/state.py

bench-agent: $(INSTALLED)
	@$(BIN)/python benchmarks/watching.py

# Every fault there is, in pretraining and in reinforcement learning, then two hundred of them in a row: an hour on two
# cores.
chaos: $(INSTALLED) data/python-stdlib data/chaos-rl
	@$(BIN)/headway chaos recipes/chaos.toml
	@$(BIN)/headway chaos recipes/chaos-rl.toml
	@$(BIN)/headway chaos recipes/chaos.toml --random 200

data/python-stdlib:
	@$(BIN)/headway data build $@ "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/*.py" --vocab-size 2048

data/chaos-rl:
	@$(BIN)/python examples/countdown.py data/chaos-rl.jsonl --count 200 --model data/chaos-rl-model
	@$(BIN)/headway data build $@ data/chaos-rl.jsonl --chat data/chaos-rl-model --prompts

# Reinstalls only when the lock or the package's own description changes. First the lock, of which nothing has
# to be resolved, then what a platform needs on top of it. Modules are compiled on all cores, where pip takes one, but
# for those that few ever import; a few are of newer Pythons and stay as they are.
RARE := /tests?/|/site-packages/(transformers/models|moto|diffusers|sklearn|scipy|torch/(testing|onnx)|pip|pygments|networkx|setuptools|ray/(air|dashboard|data|llm|rllib|serve|train|tune))/
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Headway needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	@$(BIN)/python -m compileall -q -j 0 -x '$(RARE)' $(VENV)/lib >/dev/null || true
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(RESULTS) runs data .pytest_cache .mypy_cache .ruff_cache
