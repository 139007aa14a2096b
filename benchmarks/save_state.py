"""Size and time of EDGC's checkpoint files for GPT-2 small (124 M parameters), two workers on this machine.

.venv/bin/python benchmarks/save_state.py

About a minute. Prints one JSON line: file sizes in bytes and seconds to save and to load, beside the seconds that
safetensors takes to save the model itself.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from record import environment

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]  # its worker pool and jobs

from worker_pool import WorkerPool


def measure(directory):
    """One compressed step of GPT-2 small, then save and load."""
    import torch
    from ddp_jobs import edgc_ddp
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    from hf_edgc import EDGCConfig
    from hf_edgc.checkpoint import load_state, save_state

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    tokens = torch.randint(50257, (1, 64))
    with edgc_ddp(model, EDGCConfig()) as (ddp, state):
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        seconds = {}
        for name, action in (
            ("save", lambda: save_state(state, directory)),
            ("load", lambda: load_state(state, directory)),
            (
                "save_model",
                lambda: save_file(dict(model.named_parameters()), f"{directory}/model_{state.exchange.worker}"),
            ),
        ):
            start = time.perf_counter()
            action()
            seconds[f"{name}_s"] = round(time.perf_counter() - start, 2)
        return {"parameters": model.num_parameters(), **seconds}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pool = WorkerPool(2)
    with tempfile.TemporaryDirectory() as folder:
        result = pool.run(measure, 300, directory=folder)[0]
        sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
    pool.close()
    print(json.dumps({**result, "file_bytes": sizes, **environment()}))
