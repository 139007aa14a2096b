"""Many short multi-bucket trainings at random sizes, ranks and options, with random delays before collectives.

.venv/bin/python benchmarks/soak.py --runs 200 --seed 0

About 1 s a run on two cores. A failure prints the seed; --runs 1 --seed N replays it. The last line is a JSON record.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from record import environment

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]  # its worker pool and jobs

from soak_jobs import passed, plan_of, soak_run
from worker_pool import WorkerPool


def main(runs: int, seed: int) -> int:
    """Do the runs of ``seed``, ``seed + 1``, ...; returns how many failed."""
    pool, failed, start = WorkerPool(2), [], time.monotonic()
    for number in range(seed, seed + runs):
        try:
            good = passed(pool.run(soak_run, 60, seed=number))
        except (AssertionError, TimeoutError, EOFError) as error:
            print(error, file=sys.stderr)
            good, pool = False, WorkerPool(2)
        if not good:
            failed.append(number)
            print(f"failed: --runs 1 --seed {number}: {json.dumps(plan_of(number))}", flush=True)
    pool.close()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"runs": runs, "seed": seed, "failed_seeds": failed, "seconds": seconds, **environment()}))
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(min(1, main(**vars(parser.parse_args()))))
