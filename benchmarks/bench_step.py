"""Time of a training step with torch's hooks and ours, side by side, on links of several rates.

sudo .venv/bin/python benchmarks/bench_step.py
sudo .venv/bin/python benchmarks/bench_step.py --models 17m --links loopback 200mbit --rounds 1 --steps 3
.venv/bin/python benchmarks/bench_step.py --memory

About 20 minutes for everything on two cores; root is needed for links other than loopback. Two gloo workers, one in
each of two network namespaces. For each model and link all contenders take turns in the same pair of processes. Writes
one JSON record, also after each model and link, so that a run that is stopped has not been in vain. ``--memory``
measures peak resident sizes instead, each contender in processes of its own.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, MEMORY_CONTENDERS, STEP_CONTENDERS
from link import Link, LinkRefusedError, bits_per_second
from record import environment, record_path
from step_worker import MODELS, PARTS

LINKS = ["loopback", "10gbit", "1gbit", "200mbit", "100mbit"]
ROUNDS = {"17m": 2, "gpt2": 1}
SECONDS = {"17m": 2.0, "gpt2": 6.0}
"""Timed seconds of a turn, at least one step. A dense step of GPT-2 small takes 498 MB * 8 / 100 Mbit/s = 40 s."""
OURS = ("hook_s", "wait_s", "measure_s", "controller_s")
MEMORY_STEPS = 4


def run_pair(task: str, rate: str | None, **job: Any) -> dict[str, Any]:
    """Run ``step_worker.py`` on both hosts of a link; returns what worker 0 found.

    Raises:
        RuntimeError: a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder, Link(rate) as link:
        job = {**job, "rate": rate, "output": f"{folder}/result.json"}
        root = Path(__file__).parents[1]
        for host in (0, 1):
            command = [sys.executable, str(Path(__file__).with_name("step_worker.py")), task, json.dumps(job)]
            link.start(host, command, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"})
        if any(codes := link.wait()):
            raise RuntimeError(f"the workers ended with exit codes {codes}")
        result: dict[str, Any] = json.loads(Path(job["output"]).read_text(encoding="utf-8"))
        return result


def summarized(turns: list[dict[str, Any]], contender: str) -> dict[str, Any]:
    """All times of one contender on one link, and their minimum, median and maximum."""
    rows = [row for turn in turns for row in turn["rows"]]
    final = {key: value for key, value in turns[-1]["final"].items() if value is not None}
    result: dict[str, Any] = {"steps": len(rows), "bytes_from": CONTENDERS[contender].bytes_from, **final}
    for part in (*PARTS, *(key for key in OURS if key in rows[0])):
        values = [round(row[part], 6) for row in rows]
        result[part] = spread(values)
    result["sent_bytes"] = statistics.median([row["sent_bytes"] for row in rows])
    return result


def spread(values: list[float]) -> dict[str, Any]:
    """All values with minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "all": values}


def with_ratios(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds to each contender its medians over those of ``ddp`` in the same run."""
    dense = cells.get("ddp")
    for cell in cells.values():
        if dense is not None:
            cell["ratio_to_ddp"] = {part: cell[part]["median"] / dense[part]["median"] for part in PARTS}
    return cells


def bench_steps(arguments: argparse.Namespace, names: list[str], path: Path) -> None:
    """Every model on every link; the record is written anew after each."""
    results = []
    for model in arguments.models:
        for name in arguments.links:
            found = run_pair(
                "run",
                None if name == "loopback" else name,
                model=model,
                contenders=names,
                rounds=arguments.rounds or ROUNDS[model],
                steps=arguments.steps,
                seconds=SECONDS[model],
            )
            cells = with_ratios({each: summarized(turns, each) for each, turns in found["turns"].items()})
            rate = None if name == "loopback" else bits_per_second(name)
            results.append({"model": model, "link": name, "bits_per_s": rate, "contenders": cells})
            skipped = {each: CONTENDERS[each].missing for each in arguments.contenders if each not in names}
            write(path, {"kind": "step", **environment(), "skipped": skipped, "results": results})


def bench_memory(models: list[str], path: Path) -> None:
    """Peak resident size with and without our hook."""
    results = []
    for model in models:
        sizes = {}
        for name in MEMORY_CONTENDERS:
            job = {"model": model, "contenders": [name], "rounds": 1, "steps": MEMORY_STEPS, "seconds": math.inf}
            sizes[name] = run_pair("memory", None, **job)
            print(f"{model}: {name}: {sizes[name]['peak_rss_bytes'] / 1e6:.0f} MB", flush=True)
        for size in sizes.values():
            beyond = size["peak_rss_bytes"] - sizes["ddp"]["peak_rss_bytes"]
            size["beyond_ddp_over_gradient_bytes"] = beyond / size["gradient_bytes"]
        results.append({"model": model, "contenders": sizes})
    write(path, {"kind": "memory", **environment(), "results": results})


def write(path: Path, record: dict[str, Any]) -> None:
    """One record, a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Read the arguments and measure; returns 2 if the links can't be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--links", nargs="+", default=LINKS, help="loopback, or rates as 200mbit")
    parser.add_argument("--contenders", nargs="+", choices=STEP_CONTENDERS, default=list(STEP_CONTENDERS))
    parser.add_argument("--rounds", type=int, help="turns of each contender; default: 2 (17m), 1 (gpt2)")
    parser.add_argument("--steps", type=int, default=20, help="most timed steps in a turn")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of times")
    parser.add_argument("--output", type=Path, help="default: a new file in benchmarks/records/")
    arguments = parser.parse_args()
    path = arguments.output or record_path("memory" if arguments.memory else "step")
    try:
        if arguments.memory:
            bench_memory(arguments.models, path)
        else:
            for name in arguments.contenders:
                if CONTENDERS[name].missing:
                    print(f"{name}: left out, {CONTENDERS[name].missing}", flush=True)
            names = [name for name in arguments.contenders if not CONTENDERS[name].missing]
            bench_steps(arguments, names, path)
    except LinkRefusedError as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
