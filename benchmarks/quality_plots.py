"""Plots of the records of bench_quality."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib
from matplotlib import pyplot

if TYPE_CHECKING:
    from quality_results import Group

matplotlib.use("Agg")
LINES = {"static": "tab:gray", "edgc": "tab:blue"}


def plot_pareto(group: "Group", path: Path) -> bool:
    """Perplexity against the share of dense bytes; bars from the lowest to the highest seed."""
    figure, axes = pyplot.subplots(figsize=(7.5, 5))
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, runs in group.runs.items():
        if "finetune" in name:
            continue
        values = [run["perplexity"] for run in runs.values()]
        share, mean = 100 / fmean(run["ratio"] for run in runs.values()), fmean(values)
        kind, _, rest = name.partition("-")
        in_line = kind in LINES and rest.isdigit()
        color = LINES.get(kind, "tab:red") if in_line else "tab:orange"
        bars = [[mean - min(values)], [max(values) - mean]]
        axes.errorbar([share], [mean], yerr=bars, fmt="o" if in_line else "s", color=color, capsize=3, markersize=4)
        if in_line:
            lines.setdefault(kind, []).append((share, mean))
        else:
            axes.annotate(name, (share, mean), textcoords="offset points", xytext=(5, 4), fontsize=7)
    for kind, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), color=LINES[kind], label=kind)
    axes.set(xscale="log", xlabel="sent bytes, % of dense", ylabel="validation perplexity", title=group.name)
    if lines:
        axes.legend()
    return _save(figure, path)


def plot_curves(group: "Group", path: Path) -> bool:
    """Mean rank, ranks of the matrices, entropy, and predicted and measured error of one run each."""
    run = next(iter(group.seeds("edgc-4").values()), None)
    if run is None:
        return False
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True)
    (means, ranks), (entropies, errors) = grid
    for name in ("edgc-4", "edgc-4-global", "edgc-4-flat", "edgc-free", "paper"):
        for other in list(group.seeds(name).values())[:1]:
            steps = [point["step"] for point in other["curve"]]
            means.plot(steps, [point["rank"] for point in other["curve"]], label=name)
    curve = run["curve"]
    steps = [point["step"] for point in curve]
    for index, matrix in enumerate(run["matrices"]):
        bold = "wte" in matrix or "wpe" in matrix
        label = matrix.removeprefix("transformer.").removesuffix(".weight") if bold else None
        ranks.plot(steps, [point["ranks"][index] for point in curve], lw=2 if bold else 0.7, label=label)
    entropies.plot(steps, [point["entropy"] for point in curve], color="tab:green")
    errors.plot(steps, [point["error_norm"] for point in curve], label="measured")
    predicted = [(point["step"], point["predicted_error_norm"]) for point in curve if point["predicted_error_norm"]]
    if predicted:
        errors.plot(*zip(*predicted, strict=True), "--", label="predicted")
    for axes, label in (
        (means, "mean rank"), (ranks, "rank of each matrix (edgc-4)"), (entropies, "entropy, nats (edgc-4)"),
        (errors, "error norm (edgc-4)"),
    ):  # fmt: skip
        axes.set(ylabel=label)
        if axes is not entropies:
            axes.legend(fontsize=8)
    for axes in grid[1]:
        axes.set(xlabel="step")
    return _save(figure, path)


def _save(figure: "pyplot.Figure", path: Path) -> bool:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
