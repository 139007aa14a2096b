"""The section on quality of RESULTS.md, and its plots, from the records of bench_quality.

.venv/bin/python benchmarks/quality_results.py   (prints the section; a few seconds)
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "quality"
PLOTS = HERE / "plots"

STATIC = ("static-2", "static-4", "static-8", "static-16")
REMOVED = {
    "edgc-4-global": "one rank for all matrices",
    "edgc-4-flat": "no learning-rate term",
    "edgc-4-no-entropy": "no entropy",
    "edgc-4-no-feedback": "no error feedback (and one rank for all)",
    "edgc-16-warmup": "dense warm-up of 10 %",
    "edgc-4-bfloat16": "factors in bfloat16",
}
"""Setups that differ in one thing from edgc at the same bytes, and what that is."""


@dataclass(frozen=True)
class Group:
    """All records of one size and run length."""

    name: str
    runs: dict[str, dict[int, dict[str, Any]]]
    """By setup, then by seed."""

    def seeds(self, setup: str) -> dict[int, dict[str, Any]]:
        """Records of a setup by seed; none if it was not run."""
        return self.runs.get(setup, {})


def quality_section(records: Path = RECORDS, plots: Path = PLOTS) -> str:
    """Markdown of the section; writes the plots that it shows."""
    groups = read_groups(records)
    if not groups:
        return "## Quality\n\nNo records.\n"
    plots.mkdir(parents=True, exist_ok=True)
    parts = ["## Quality", _method(groups[0])]
    for group in groups:
        parts += [_heading(group), _table(group), _removed_table(group), _finetune_table(group)]
        parts += _plots(group, plots)
    return "\n\n".join(part for part in parts if part) + "\n"


def read_groups(records: Path) -> list[Group]:
    """All records below ``records``, by size."""
    groups = []
    for folder in sorted((path for path in records.glob("*") if path.is_dir()), reverse=True):  # small before large
        runs: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("seed-*.json")):
            record = json.loads(path.read_text())
            runs.setdefault(record["setup"], {})[record["seed"]] = record
        if runs:
            groups.append(Group(folder.name, runs))
    return groups


def static_nll(group: Group, seed: int, sent_share: float) -> float | None:
    """Loss of static compression at a share of the dense bytes: linear in its logarithm between the ranks of the runs.

    Dense training is the last point of the curve; None outside it.
    """
    names = (*STATIC, "dense")
    points = sorted((1 / run["ratio"], run["nll"]) for n in names if (run := group.seeds(n).get(seed)) is not None)
    for (low, low_nll), (high, high_nll) in itertools.pairwise(points):
        if low * (1 - 1e-3) <= sent_share <= high * (1 + 1e-3):
            place = math.log(sent_share / low) / math.log(high / low)
            return low_nll + place * (high_nll - low_nll)
    return None


def to_static(group: Group, setup: str) -> list[float]:
    """Loss minus that of static compression at equal bytes, nats, for each seed that has both."""
    pairs = [(run["nll"], static_nll(group, seed, 1 / run["ratio"])) for seed, run in group.seeds(setup).items()]
    return [nll - static for nll, static in pairs if static is not None]


def between(group: Group, setup: str, other: str) -> list[float]:
    """Loss of ``setup`` minus that of ``other``, nats, for each seed that has both."""
    others = group.seeds(other)
    return [run["nll"] - others[seed]["nll"] for seed, run in group.seeds(setup).items() if seed in others]


def noise_nats(group: Group) -> float | None:
    """Standard deviation over the seeds of a difference to static, pooled over the setups; None with one seed."""
    spreads = [
        (len(d) - 1, variance(d)) for name in group.runs if len(d := to_static(group, name)) > 1 and name not in STATIC
    ]
    degrees = sum(count for count, _ in spreads)
    return math.sqrt(sum(count * value for count, value in spreads) / degrees) if degrees else None


def verdict(group: Group, differences: Sequence[float]) -> str:
    """Whether a mean difference is larger than noise: two standard errors, with the pooled deviation."""
    noise = noise_nats(group)
    if noise is None or not differences:
        return "one seed"
    beyond = abs(fmean(differences)) > 2 * noise / math.sqrt(len(differences))
    return ("lower" if fmean(differences) < 0 else "higher") if beyond else "within noise"


def _method(group: Group) -> str:
    run = next(iter(next(iter(group.runs.values())).values()))
    size = run["size"]
    return (
        f"GPT-2 from scratch on the {run['text']}; {run['workers']} gloo workers, {size['batch']} blocks of "
        f"{size['block']} tokens each a step, AdamW, 7 % warm-up and cosine. Perplexity is over {run['tokens']:,.0f} "
        "validation tokens. Within a seed all runs start from the same weights and read the same batches. Differences "
        "are to static compression of the same seed at equal bytes (its loss is interpolated in the logarithm of the "
        "bytes); they count as larger than noise beyond two standard errors, with the deviation over the seeds pooled "
        "over all setups."
    )


def _heading(group: Group) -> str:
    run = next(iter(next(iter(group.runs.values())).values()))
    noise = noise_nats(group)
    told = "" if noise is None else f"; deviation of a difference between seeds {100 * noise:.2f} %"
    return f"### {run['size']['name']}: {run['parameters'] / 1e6:.2f} M parameters, {run['size']['steps']} steps{told}"


def _table(group: Group) -> str:
    rows = ["| setup | bytes of dense | ratio | perplexity, mean (min to max) | to static | beyond noise? | seeds |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    names = [name for name in group.runs if "finetune" not in name]
    for name in sorted(names, key=lambda n: fmean(run["ratio"] for run in group.seeds(n).values())):
        runs = group.seeds(name).values()
        ratio, differences = fmean(run["ratio"] for run in runs), to_static(group, name)
        own = name in STATIC or name == "dense" or not differences
        told = ["", ""] if own else [_percent(differences), verdict(group, differences)]
        figures = [name, f"{100 / ratio:.2f} %", f"{ratio:.2f}", _perplexities(runs), *told, str(len(runs))]
        rows.append(f"| {' | '.join(figures)} |")
    return "\n".join(rows)


def _removed_table(group: Group) -> str:
    rows = []
    for name, what in REMOVED.items():
        whole = "-".join(name.split("-")[:2])
        if differences := between(group, name, whole):
            rows.append(f"| {what} | {whole} | {_percent(differences)} | {verdict(group, differences)} |")
    head = [
        "One thing changed, at equal bytes:",
        "",
        "| changed | in | perplexity | beyond noise? |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) if rows else ""


def _finetune_table(group: Group) -> str:
    rows = []
    for name in ("finetune-dense", "finetune-static-4", "finetune-edgc-4"):
        if runs := group.seeds(name).values():
            differences = between(group, name, "finetune-static-4") if name == "finetune-edgc-4" else []
            told = f"{_percent(differences)} ({verdict(group, differences)})" if differences else ""
            ratio = fmean(run["ratio"] for run in runs)
            rows.append(f"| {name} | {100 / ratio:.2f} % | {_perplexities(runs)} | {told} | {len(runs)} |")
    head = [
        "Fine-tuning on the second half of the text, from a model trained dense on the first:",
        "",
        "| setup | bytes of dense | perplexity, mean (min to max) | to static | seeds |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) if rows else ""


def _perplexities(runs: Iterable[dict[str, Any]]) -> str:
    values = [run["perplexity"] for run in runs]
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{math.exp(fmean(map(math.log, values))):.2f}{spread}"


def _percent(differences: Sequence[float]) -> str:
    """Differences of losses as those of perplexities, mean (min to max)."""
    mean, *ends = (100 * math.expm1(value) for value in (fmean(differences), min(differences), max(differences)))
    return f"{mean:+.1f} % ({ends[0]:+.1f} to {ends[1]:+.1f})" if len(differences) > 1 else f"{mean:+.1f} %"


def _plots(group: Group, folder: Path) -> list[str]:
    from quality_plots import plot_curves, plot_pareto

    shown = []
    for kind, what, draw in (
        ("pareto", "perplexity against bytes", plot_pareto),
        ("curves", "rank and entropy over time", plot_curves),
    ):
        path = folder / f"quality_{group.name}_{kind}.png"
        if draw(group, path):
            shown.append(f"![{group.name}: {what}](plots/{path.name})")
    rms = [run["prediction_rms"] for runs in group.runs.values() for run in runs.values() if run["prediction_rms"]]
    if rms:
        shown.append(
            f"Predicted against measured error norm, all measured steps of a run: rms of their log {fmean(rms):.3f} "
            f"({min(rms):.3f} to {max(rms):.3f} over {len(rms)} runs)."
        )
    return shown


if __name__ == "__main__":
    print(quality_section())
