"""Runs as they stand on disk, made by the code that writes them, for tests of what reads them."""

import json
import math

from hf_edgc.config import EDGCConfig
from hf_edgc.records import RecordWriter, StepRecord
from hf_edgc.run_info import RECORD_FILE, RunInfo

LINK = {
    "round_bytes": [300_000, 200_000], "dense_bytes": 5_000_000,
    "step": 6, "link_mbit_per_s": 93.8, "link_latency_s": 0.002, "link_burst_bytes": 0.0, "hidden_s": 0.01,
    "codec_s": 0.005, "exchange_s": 0.03, "dense_exchange_s": 0.41, "dense_s": 0.4, "compressed_s": 0.03,
    "break_even_mbit_per_s": 900.0, "break_even_rank": 8, "max_rank": None, "matrices": 7, "compressed_matrices": 7,
}  # fmt: skip
"""As ``EDGCState.link_report``; ``test_trainer_reports_what_auto_decided`` compares the names."""

PARTS = ("attn.c_attn.weight", "mlp.c_fc.weight")
NAMES = ["wte.weight", *(f"h.{layer}.{part}" for layer in range(3) for part in PARTS)]


def record(step, **changes):
    """A step that sent 100 of 1000 bytes; every tenth one is measured."""
    measured = step % 10 == 0
    values = {
        "step": step, "phase": "compress", "compressed": True, "finite": True, "rank": 8.0,
        "ranks": tuple(range(1, len(NAMES) + 1)), "entropy": -5.0 - step if measured else None,
        "grad_norm": 2.0 if measured else None, "error_norm": 1.0 + step if measured else None,
        "predicted_error_norm": math.nan, "learning_rate": 1e-3, "sent_bytes": 100, "dense_bytes": 1000,
        "hook_s": 0.02, "wait_s": 0.01,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


def write_run(folder, steps=40, link=None, log=True, records=None, **options):
    """A finished run of ``steps`` steps in ``folder``; returns the folder."""
    config = EDGCConfig(**options)
    matrices = [{"name": name, "rows": 8, "cols": 8, "max_rank": 8} for name in NAMES]
    dense = [{"name": "ln.bias", "elements": 8, "reason": "fewer than two dimensions"}]
    RunInfo("0.1.0", 2, config.window(steps), config.to_dict(), matrices, dense, link).write(folder)
    writer = RecordWriter(folder / RECORD_FILE)
    for each in records if records is not None else map(record, range(steps)):
        writer.write(each)
    writer.close()
    if log:
        history = [{"step": step, "loss": 7 - step / steps} for step in range(10, steps + 1, 10)]
        history += [{"step": steps, "eval_loss": 6.0, "eval_perplexity": 410.0}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        (folder / "all_results.json").write_text(json.dumps({"perplexity": 410.0, "train_runtime": 12.0}))
    return folder
