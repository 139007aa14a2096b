"""Plots of the step times."""

import matplotlib as mpl
from matplotlib.figure import Figure

from sections import Record, runs

mpl.use("Agg")
Links = dict[str, tuple[Record, Record]]

STYLES = {
    "ddp": ("black", "-", "o"),
    "allreduce_hook": ("0.45", "--", "."),
    "none": ("0.6", ":", "."),
    "noop_hook": ("0.75", "-", "v"),
    "fp16_compress_hook": ("tab:green", "-", "s"),
    "powerSGD_hook 8": ("tab:cyan", "-", "^"),
    "powerSGD_hook 32": ("tab:blue", "-", "^"),
    "static 8": ("gold", "-", "D"),
    "static 32": ("tab:orange", "-", "D"),
    "static 32 bf16": ("tab:brown", "--", "D"),
    "static 32 no overlap": ("tab:pink", ":", "D"),
    "edgc": ("tab:red", "-", "o"),
    "auto": ("tab:purple", "-", "*"),
}
"""Colour, line and marker of each contender, the same in every plot."""
PARTS = {
    "forward": "#4c78a8",
    "backward": "#9ecae9",
    "synchronization, not split": "#bab0ac",
    "compression": "#f58518",
    "waiting for collectives": "#e45756",
    "optimizer": "#54a24b",
}


def over_rate(links: Links, title: str) -> Figure:
    """Median step time over link rate, both in log scale; loopback has a place of its own at the right."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    rates = [result["bits_per_s"] for _, result in links.values()]
    fastest = max((rate for rate in rates if rate), default=1e9)
    places = [rate or 6 * fastest for rate in rates]
    for name in runs.contenders(links):
        points = [
            (x, on[name]["step_s"]) for x, on in zip(places, runs.cells(links).values(), strict=True) if name in on
        ]
        colour, line, marker = STYLES.get(name, ("tab:olive", "-", "x"))
        xs, times = [x for x, _ in points], [time for _, time in points]
        middle = [time["median"] for time in times]
        axes.plot(xs, middle, color=colour, linestyle=line, marker=marker, label=name, linewidth=1.4, markersize=5)
        axes.fill_between(
            xs, [t["min"] for t in times], [t["max"] for t in times], color=colour, alpha=0.08, linewidth=0
        )
    axes.set(
        xscale="log", yscale="log", xlabel="link rate", ylabel="step time, s (median; band: min to max)", title=title
    )
    axes.set_xticks(places, [runs.rate_text(rate) for rate in rates], rotation=20)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5)]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return figure


def parts(links: Links, title: str) -> Figure:
    """Where a step's time goes: a panel for each link, a bar for each contender."""
    figure = Figure(figsize=(3.2 * len(links) + 1.5, 4.6), layout="constrained")
    panels = figure.subplots(1, len(links), squeeze=False)[0]
    names = runs.contenders(links)[::-1]
    for axes, (_, result) in zip(panels, links.values(), strict=True):
        left = [0.0] * len(names)
        splits = [split(result["contenders"], name) for name in names]
        for part, colour in PARTS.items():
            widths = [each.get(part, 0.0) for each in splits]
            axes.barh(range(len(names)), widths, left=left, color=colour, label=part, height=0.75)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names), fontsize=8)
        axes.set(title=runs.rate_text(result["bits_per_s"]), xlabel="s")
        axes.grid(axis="x", alpha=0.25)
    figure.suptitle(title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    return figure


def split(on_link: runs.Cells, name: str) -> dict[str, float]:
    """Medians of the parts of a step, in seconds. Backward alone is that of ``noop_hook``, if it ran."""
    if name not in on_link:
        return {}
    middle = {
        key: value["median"] for key, value in on_link[name].items() if isinstance(value, dict) and "median" in value
    }
    alone = min(on_link.get("noop_hook", on_link[name])["backward_s"]["median"], middle["backward_s"])
    beyond = middle["backward_s"] - alone
    found = {"forward": middle["forward_s"], "backward": alone, "optimizer": middle["optimizer_s"]}
    if middle.get("wait_s", 0.0) == 0.0:  # a peer, or a dense step, whose collectives run beside backward
        return {**found, "synchronization, not split": beyond}
    waiting = min(middle["wait_s"], beyond)
    return {**found, "waiting for collectives": waiting, "compression": beyond - waiting}
