"""The pictures of a report. Each takes the runs and returns a figure, or None where no run measured what it shows.

Figures are drawn without pyplot: no window, no backend and no global state of the caller is touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from hf_edgc.report.run import Floats, Run
from hf_edgc.report.series import MOST_POINTS, error_over_gradient, rank_groups, saved_bytes, thinned, window_means

SIZE_INCHES = (5.0, 3.0)
DOTS_PER_INCH = 192
"""960 x 576 pixels: sharp at 600 CSS pixels on a fine screen; 10 points are 10 CSS pixels at a phone's 358."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind readers tell apart."""

DENSE_COLOR = "#888888"


@dataclass(frozen=True)
class Picture:
    """One picture: file name without ending, title, what it shows, how to draw it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Sequence[Run]], Figure | None]


def loss(runs: Sequence[Run]) -> Figure | None:
    """Training loss, and the evaluation's as dots."""
    figure, axes = _axes("loss, nats a token")
    for run, color in _coloured(runs):
        axes.plot(*thinned(*run.logged("loss")), color=color, label=run.name)
        steps, values = run.logged("eval_nll", "eval_loss")
        axes.plot(steps, values, "o", color=color, markersize=5)
    return _finished(figure, axes, runs)


def perplexity(runs: Sequence[Run]) -> Figure | None:
    """Of the evaluations; exp(loss) where only that is known."""
    figure, axes = _axes("perplexity")
    for run, color in _coloured(runs):
        steps, values = run.logged("eval_perplexity")
        if not len(steps):
            steps, losses = run.logged("eval_loss")
            values = np.exp(np.minimum(losses, 700.0))  # beyond that float64 ends
        axes.plot(steps, values, "o-", color=color, markersize=5, label=run.name)
    _make_log(axes)
    return _finished(figure, axes, runs)


def entropy(runs: Sequence[Run]) -> Figure | None:
    """What each measurement said, and the mean of each decision window."""
    figure, axes = _axes("entropy, nats")
    for run, color in _coloured(runs):
        axes.plot(*thinned(run.column("step"), run.column("entropy")), color=color, alpha=0.35, linewidth=1)
        means = window_means(run, "entropy")
        steps = [step for first, last, _ in means for step in (first, last)]
        values = [mean for _, _, mean in means for _ in range(2)]
        axes.plot(steps, values, color=color, linewidth=2, label=run.name)
    return _finished(figure, axes, runs)


def rank(runs: Sequence[Run]) -> Figure | None:
    """Mean rank of the matrices; 0 is a step that was sent dense."""
    figure, axes = _axes("mean matrix rank")
    for run, color in _coloured(runs):
        ranks = run.ranks()
        if len(ranks):
            axes.step(run.column("step"), ranks.mean(axis=0), where="post", color=color, label=run.name)
    axes.set_ylim(bottom=0)
    return _finished(figure, axes, runs)


def rank_map(runs: Sequence[Run]) -> Figure | None:
    """Rank of each group of matrices over time, a panel for each run."""
    tables = [(run, *rank_groups(run)) for run in runs]
    tables = [each for each in tables if each[1]]
    if not tables:
        return None
    heights = [0.9 + 0.22 * len(labels) for _, labels, _, _ in tables]
    figure = Figure(figsize=(SIZE_INCHES[0], sum(heights)), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    highest = max(float(table.max()) for _, _, table, _ in tables)
    for axes, (run, labels, table, (first, last)) in zip(panels, tables, strict=True):
        extent = (first - 0.5, last + 0.5, len(labels) - 0.5, -0.5)
        image = axes.imshow(table, aspect="auto", interpolation="nearest", vmin=0, vmax=highest, extent=extent)
        axes.set_yticks(range(len(labels)), [_short(label) for label in labels], fontsize=8)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if len(tables) > 1:
            axes.set_title(run.name, fontsize=9)
    figure.colorbar(image, ax=list(panels), label="rank")
    return figure


def step_bytes(runs: Sequence[Run]) -> Figure | None:
    """What one worker sent in each step, and what it would have sent dense."""
    figure, axes = _axes("MB a step and worker")
    for run, color in _coloured(runs):
        steps = run.column("step")
        dense = thinned(steps, run.column("dense_bytes") / 1e6)
        axes.plot(*dense, "--", color=DENSE_COLOR, linewidth=1, label="plain DDP" if color == COLORS[0] else None)
        axes.plot(*thinned(steps, run.column("sent_bytes") / 1e6), color=color, label=run.name)
    _make_log(axes)
    return _finished(figure, axes, runs)


def saved(runs: Sequence[Run]) -> Figure | None:
    """Bytes not sent so far."""
    return _over_steps("MB saved a worker", runs, lambda run: (run.column("step"), saved_bytes(run) / 1e6))


def error(runs: Sequence[Run]) -> Figure | None:
    """Norm of what error feedback holds, measured and predicted, over the norm of the gradient."""
    return _over_steps(
        "error norm / gradient norm",
        runs,
        lambda run: error_over_gradient(run, "error_norm"),
        lambda run: error_over_gradient(run, "predicted_error_norm"),
    )


def hook_time(runs: Sequence[Run]) -> Figure | None:
    """Time in the hook in each step, and how much of it was spent waiting for other workers."""
    return _over_steps(
        "ms in the hook a step",
        runs,
        lambda run: (run.column("step"), run.column("hook_s") * 1e3),
        lambda run: (run.column("step"), run.column("wait_s") * 1e3),
        points=100,
    )


PICTURES = (
    Picture("loss", "Loss", "Line: training. Dots: evaluation.", loss),
    Picture("perplexity", "Perplexity", "Of each evaluation; exp(loss) where a run knows only its loss.", perplexity),
    Picture("entropy", "Entropy", "Thin: each measurement. Thick: mean of each decision window.", entropy),
    Picture("rank", "Rank", "Mean over the matrices; 0 where a step was sent dense.", rank),
    Picture(
        "rank_map",
        "Rank of each tensor",
        "One row for each part of the model, the mean over its layers (how many).",
        rank_map,
    ),
    Picture("step_bytes", "Bytes a step", "Sent by one worker, against plain DDP (dashed).", step_bytes),
    Picture("saved", "Bytes saved", "Summed over the run, for one worker.", saved),
    Picture(
        "error",
        "Error over gradient",
        "What error feedback holds, in gradient norms. Dotted: as the last rank decision predicted it.",
        error,
    ),
    Picture(
        "hook_time",
        "Time in the hook",
        "Dotted: the part spent waiting for the exchange. A dense step exchanges outside the hook.",
        hook_time,
    ),
)


def _coloured(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, COLORS[index % len(COLORS)]) for index, run in enumerate(runs)]


def _over_steps(
    y_label: str, runs: Sequence[Run], *series: Callable[[Run], tuple[Floats, Floats]], points: int = MOST_POINTS
) -> Figure | None:
    """Curves of each run: steps and values of the first of ``series`` solid, of the second, if any, dotted."""
    figure, axes = _axes(y_label)
    for run, color in _coloured(runs):
        for of, style, label in zip(series, ("-", ":"), (run.name, None), strict=False):
            axes.plot(*thinned(*of(run), points), style, color=color, label=label)
    return _finished(figure, axes, runs)


def _axes(y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return figure, axes


def _make_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_PlainNumbers(labelOnlyBase=False))
    axes.yaxis.set_minor_formatter(_PlainNumbers(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def _finished(figure: Figure, axes: Axes, runs: Sequence[Run]) -> Figure | None:
    """The figure with its legend, or None if nothing was drawn."""
    if not any(len(line.get_xdata()) for line in axes.lines):  # type: ignore[arg-type]
        return None
    drawn = [line for line in axes.lines if len(line.get_xdata()) and not str(line.get_label()).startswith("_")]  # type: ignore[arg-type]
    if len(drawn) > 1 or len(runs) > 1:
        axes.legend(handles=drawn, fontsize=9)
    return figure


class _PlainNumbers(LogFormatter):
    """600 and 0.6 where matplotlib writes 6 x 10^2 and 6e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _short(label: str, most: int = 30) -> str:
    return label if len(label) <= most else "..." + label[3 - most :]
