"""Kill training with SIGKILL at random steps, resume it, and compare every worker bitwise with a run left alone.

.venv/bin/python benchmarks/kill_resume.py --runs 20 --seed 0

Half of the runs go through Accelerate's save_state, half through Trainer's checkpoints; about 20 s a run on two
cores. Prints one JSON line a run and a last one with the count; the exit code is 1 if any run differed.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from record import environment

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]  # its worker pool and jobs

from resume_jobs import ROUTES, random_kill_step, run_until_killed
from worker_pool import WorkerPool


def main(runs: int, seed: int) -> int:
    """Do ``runs`` runs; returns the number that differed."""
    survivors = WorkerPool(2)
    folder = Path(tempfile.mkdtemp(prefix="kill_resume_"))
    expected, differed = {}, 0
    steps = random.Random(seed)
    try:
        for run in range(runs):
            route = list(ROUTES)[run % len(ROUTES)]
            if route not in expected:
                reference = folder / f"reference_{route}"
                reference.mkdir()
                expected[route] = survivors.run(ROUTES[route], 300, directory=str(reference))
            directory, start = folder / str(run), time.monotonic()
            directory.mkdir()
            kill_step = random_kill_step(steps.random())
            reached = run_until_killed(WorkerPool(2), route, str(directory), kill_step)
            resumed = survivors.run(ROUTES[route], 300, directory=str(directory), resume=True)
            equal = resumed == expected[route]
            differed += not equal
            shutil.rmtree(directory)
            record = {"run": run, "route": route, "killed_at_step": reached, "bitwise_equal": equal}
            print(json.dumps({**record, "seconds": round(time.monotonic() - start, 1)}), flush=True)
    finally:
        survivors.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"runs": runs, "seed": seed, "bitwise_equal": runs - differed, **environment()}))
    return differed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(min(1, main(**vars(parser.parse_args()))))
