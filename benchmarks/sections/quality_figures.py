"""Plots of the runs of bench_quality."""

from statistics import fmean, geometric_mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sections import Record
from sections.quality_runs import Group

LINES = {
    "static": ("0.45", "static, float32"),
    "bfloat16": ("tab:brown", "static, bfloat16"),
    "edgc": ("tab:red", "edgc (default)"),
}
"""Colour and name of each line."""


def pareto(group: Group) -> Figure:
    """Perplexity against the share of dense bytes; bars from the lowest to the highest seed."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, runs in group.runs.items():
        if "finetune" in name:
            continue
        values = [run["perplexity"] for run in runs.values()]
        share, mean = 100 / fmean(run["ratio"] for run in runs.values()), geometric_mean(values)
        kind = _line(group, name)
        colour = LINES[kind][0] if kind else "tab:blue"
        bars = [[mean - min(values)], [max(values) - mean]]
        axes.errorbar([share], [mean], yerr=bars, fmt="o" if kind else "s", color=colour, capsize=2.5, markersize=4.5)
        if kind:
            lines.setdefault(kind, []).append((share, mean))
        else:
            axes.annotate(name, (share, mean), textcoords="offset points", xytext=(5, 3), fontsize=7, color="0.25")
    for kind, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), color=LINES[kind][0], label=LINES[kind][1])
    axes.set(xscale="log", xlabel="sent bytes, % of dense", ylabel="validation perplexity", title=group.name)
    axes.margins(x=0.08)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def curves(group: Group) -> Figure:
    """Mean ranks of some setups; ranks of the matrices, entropy, predicted and measured error of one."""
    shown = group.curves_of()
    run = next(iter(group.seeds(shown).values())) if shown else group.any()
    figure = Figure(figsize=(10, 7), layout="constrained")
    (means, ranks), (entropies, errors) = figure.subplots(2, 2, sharex=True)
    for name in (shown, "edgc-4-global", "edgc-4-flat", "edgc-4-no-entropy", "paper"):
        if name in group.runs:
            other = next(iter(group.seeds(name).values()))["curve"]
            means.plot(
                [point["step"] for point in other], [point["rank"] for point in other], label=name, linewidth=1.2
            )
    _matrices(ranks, run)
    steps = [point["step"] for point in run["curve"]]
    entropies.plot(steps, [point["entropy"] for point in run["curve"]], color="tab:green")
    errors.plot(steps, [point["error_norm"] for point in run["curve"]], label="measured")
    predicted = [(p["step"], p["predicted_error_norm"]) for p in run["curve"] if p["predicted_error_norm"]]
    if predicted:
        errors.plot(*zip(*predicted, strict=True), "--", label="predicted")
    for axes, label in (
        (means, "mean rank"), (ranks, f"rank of each matrix ({shown})"), (entropies, f"entropy, nats ({shown})"),
        (errors, f"error norm ({shown})"),
    ):  # fmt: skip
        axes.set(ylabel=label)
        axes.grid(alpha=0.25)
        if axes is not entropies:
            axes.legend(fontsize=8, frameon=False)
    for axes in (entropies, errors):
        axes.set(xlabel="step")
    return figure


def _line(group: Group, name: str) -> str | None:
    """The line that a setup is a point of, if any."""
    kind, _, rest = name.partition("-")
    if group.is_default(name):
        return "edgc"
    if kind == "static":
        return "static" if rest.isdigit() else "bfloat16"
    return None


def _matrices(axes: Axes, run: Record) -> None:
    colours = {"wte": "black", "wpe": "0.6", "c_attn": "tab:blue", "attn.c_proj": "tab:cyan", "c_fc": "tab:orange"}
    labelled = set()
    for index, name in enumerate(run["matrices"]):
        kind = next((kind for kind in colours if kind in name), "mlp.c_proj")
        points = [(point["step"], point["ranks"][index]) for point in run["curve"]]
        label = None if kind in labelled else kind
        labelled.add(kind)
        axes.plot(*zip(*points, strict=True), color=colours.get(kind, "tab:red"), linewidth=1, label=label)
