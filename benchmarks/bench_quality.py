"""Perplexity against bytes: the same training, with what is compressed and how as the only difference.

.venv/bin/python benchmarks/bench_quality.py --sizes small large --seeds 0 1 2 --minutes 60

Every setup of ``quality_setups.py`` starts from the same weights and reads the same batches of the same text (the
standard library). Two real gloo workers train, one thread each: stronger than a simulation of workers in one process,
which would have to be shown to be exact. They stay for all runs. Each run writes one JSON file below
benchmarks/records/quality/; runs whose file is there are skipped, so it can be stopped at any time and started again.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]  # the package, and the tests' worker pool

from quality_jobs import prepare_text, train
from quality_setups import ORDER, SETUPS, SIZES, Size
from record import environment
from worker_pool import WorkerPool

RECORDS = HERE / "records" / "quality"
CACHE = Path(tempfile.gettempdir()) / "hf_edgc_quality"
TIMEOUT_S = 3600.0
"""Of a run and of a collective; long, so that the workers may be stopped for a while and let go on."""


class Bench:
    """Runs setups on one pair of workers and keeps their records."""

    def __init__(self, records: Path) -> None:
        """Start the workers."""
        self.records = records
        self.pool = WorkerPool(2, TIMEOUT_S)

    def path(self, size: Size, seed: int, name: str) -> Path:
        """The file of a run."""
        return self.records / f"{size.name}-{size.steps}" / f"seed-{seed}_{name}.json"

    def run(self, size: Size, seed: int, name: str) -> dict[str, Any]:
        """Record of a run, which is done first if it has none."""
        path, setup = self.path(size, seed, name), SETUPS[name]
        if path.exists():
            record: dict[str, Any] = json.loads(path.read_text())
            return record
        options = dict(setup.options)
        if setup.budget_of is not None:
            options["target_compression_ratio"] = self.run(size, seed, setup.budget_of)["ratio"]
        text = prepare_text(size, CACHE)
        shared = {"size": size, "seed": seed, "cache": str(CACHE)}
        base = f"{size.name}-{size.steps}-{seed}-base.pt" if setup.finetune else None
        if base is not None and not (CACHE / base).exists():
            plain = {"options": {"mode": "none"}, "torch_hook": None}
            self.pool.run(train, TIMEOUT_S, **shared, **plain, phase="base", save=base)
        results = self.pool.run(
            train, TIMEOUT_S, **shared, options=options, torch_hook=setup.torch_hook,
            phase="finetune" if setup.finetune else "scratch", save=base,
        )  # fmt: skip
        record = {
            "kind": "quality",
            "setup": name,
            "size": asdict(size),
            "seed": seed,
            "options": options,
            **_joined(results),
            **text,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**record, **environment()}) + "\n")
        return record


def _joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The first worker's figures, with the validation of both."""
    nll = sum(result["nll_sum"] for result in results) / sum(result["tokens"] for result in results)
    joined = {key: value for key, value in results[0].items() if key not in ("nll_sum", "tokens")}
    return {
        **joined,
        "nll": nll,
        "perplexity": math.exp(nll),
        "tokens": sum(r["tokens"] for r in results),
        "workers": 2,
    }


def main(
    sizes: list[str], seeds: list[int], configs: list[str], steps: int | None, minutes: float, records: Path = RECORDS
) -> None:
    """Do all runs that have no record, seed by seed, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    bench = Bench(records)
    try:
        for seed in seeds:
            for size in [SIZES[name] for name in sizes]:
                chosen = replace(size, steps=steps) if steps is not None else size
                for name in configs:
                    if time.monotonic() > deadline:
                        print("time is over; start again to go on", flush=True)
                        return
                    if not bench.path(chosen, seed, name).exists():
                        told = bench.run(chosen, seed, name)
                        print(
                            f"{size.name} seed {seed} {name}: perplexity {told['perplexity']:.2f}, ratio "
                            f"{told['ratio']:.2f}, {told['seconds']} s",
                            flush=True,
                        )
    finally:
        bench.pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--configs", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--steps", type=int, default=None, help="instead of the size's own")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many")
    main(**vars(parser.parse_args()))
