PYTHON ?= python3
OUTPUT_DIR ?= runs/default
# More options for the main job, as in: make run RUN_OPTIONS="--mode none"
RUN_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup run test check browser bench quality results kill soak faults showcase blocks format clean

setup: $(READY)

# torch goes first and pinned: resolved later, another package could pull a CUDA build of several GB.
$(READY): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,dev]"
	touch $@

# A GPT-2 of 1.07 M parameters: 4 layers of 12 * 128^2, 2048 * 128 for the vocabulary, 128 * 128 positions.
# 1400 steps of 2 workers * 4 sequences * 128 tokens: 1.4 M tokens.
run: setup
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch --config_file accelerate_configs/cpu_2proc.yaml run_clm_edgc.py \
	    --output_dir $(OUTPUT_DIR) --use_cpu true \
	    --config_overrides n_embd=128,n_head=4,n_layer=4,n_positions=128,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0 \
	    --tokenizer_vocab_size 2048 --per_device_train_batch_size 4 --max_steps 1400 --learning_rate 4e-3 \
	    --warmup_steps 100 --lr_scheduler_type cosine --max_rank 16 --logging_steps 100 \
	    --eval_strategy steps --eval_steps 0.25 --save_strategy no $(RUN_OPTIONS)

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The run report in a real browser; screenshots at desktop and phone width go to runs/browser.
browser: setup
	command -v chromium > /dev/null || (apt-get update && apt-get install -y --no-install-recommends chromium)
	EDGC_SCREENSHOTS=runs/browser $(BIN)/python -m pytest -n 0 tests/test_browser.py

# Links other than loopback need root, ip and tc (Debian: iproute2). About 30 minutes.
bench: setup
	$(BIN)/python benchmarks/bench_step.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_codec.py
	$(BIN)/python benchmarks/bench_step.py --memory
	$(BIN)/python benchmarks/results.py

# Hours; goes on where it was stopped. Ends with the tables.
quality: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_quality.py --sizes small --seeds 0 1 2
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_quality.py --sizes large --seeds 0 1 \
	    --configs dense edgc-10x edgc-5x static-16
	$(BIN)/python benchmarks/results.py

results: setup
	$(BIN)/python benchmarks/results.py

kill: setup
	$(BIN)/python benchmarks/kill_resume.py --runs 20

soak: setup
	$(BIN)/python benchmarks/soak.py --runs 200

faults: setup
	$(BIN)/python tests/faults/table.py --write

# The run that README shows, anew: its table, pictures and figures. About 8 minutes; nothing else should run beside it.
showcase: setup
	mkdir -p runs
	$(MAKE) --silent run OUTPUT_DIR=runs/default > runs/default.log
	$(MAKE) --silent run OUTPUT_DIR=runs/dense RUN_OPTIONS="--mode none" > runs/dense.log
	for run in default dense; do sed -n '/^EDGC run/,$$s/ *$$//p' runs/$$run.log > docs/run/$$run.txt; done
	$(BIN)/hf-edgc report runs/default runs/dense --output_dir runs
	cd runs/edgc_comparison && cp perplexity.png step_bytes.png rank_map.png ../../docs/run/
	$(BIN)/python tests/readme_blocks.py --write

blocks: setup
	$(BIN)/python tests/readme_blocks.py --write

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
