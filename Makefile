# The two commands of the README: `make demo` and `make test`. Both make .venv first, from requirements.lock.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow test-gpu lint bench bench-state bench-agent chaos clean

demo: $(INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

# Four processes on two cores: many tests wait for processes of their own. In the order of the folders: by number of
# tests, the longest files, which have few, would come last.
test: $(INSTALLED)
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED)
	@$(BIN)/python -m pytest -m slow

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest -m gpu

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/loader.py
	@$(BIN)/python benchmarks/events.py
	@$(BIN)/python benchmarks/plan/accuracy.py

bench-state: $(INSTALLED)
	@$(BIN)/python benchmarks/state.py

bench-agent: $(INSTALLED)
	@$(BIN)/python benchmarks/watching.py

# Every fault there is, then two hundred of them in a row: half an hour on two cores.
chaos: $(INSTALLED) data/python-stdlib
	@$(BIN)/headway chaos recipes/chaos.toml
	@$(BIN)/headway chaos recipes/chaos.toml --random 200

data/python-stdlib:
	@$(BIN)/headway data build $@ "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/*.py" --vocab-size 2048

# Reinstalls only when the lock or the package's own description changes. First the lock, of which nothing has
# to be resolved, then what a platform needs on top of it. Modules are compiled on all cores, where pip takes one, but
# for those that few ever import; a few are of newer Pythons and stay as they are.
RARE := /tests?/|/site-packages/(transformers/models|moto|torch/(testing|onnx)|pip|pygments|networkx|setuptools|ray/(air|dashboard|data|llm|rllib|serve|train|tune))/
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
	rm -rf $(VENV) runs data .pytest_cache .mypy_cache .ruff_cache
