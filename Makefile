PYTHON ?= python3
OUTPUT_DIR ?= runs/default
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup run test check format clean

setup: $(READY)

# torch goes first and pinned: resolved later, another package could pull a CUDA build of several GB.
$(READY): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,dev]"
	touch $@

run: setup
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu_2proc.yaml run_clm_edgc.py \
	    --output_dir $(OUTPUT_DIR)

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
