"""From records to what is drawn. Pure functions over arrays."""

import re
from collections.abc import Iterable

import numpy as np

from hf_edgc.report.run import Floats, Run

MOST_POINTS = 400
"""Of a curve; a longer one is drawn as means over steps in a row, which a picture of 900 pixels shows as well."""


def thinned(steps: Floats, values: Floats, points: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Steps and values, each (n,), as at most ``points`` means over neighbours; what is not measured is left out."""
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(steps) <= points:
        return steps, values
    edges = np.linspace(0, len(steps), points + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(steps, edges[:-1]) / counts, np.add.reduceat(values, edges[:-1]) / counts


def window_means(run: Run, key: str) -> list[tuple[float, float, float]]:
    """(first step, last step, mean of ``key``) of each decision window that measured it.

    Windows are counted, as in the controller, from the first step of each stretch in one phase.
    """
    steps, values = run.column("step"), run.column(key)
    width = run.info.window_steps if run.info is not None else max(1, len(steps))
    phases = [record["phase"] for record in run.records]
    windows: list[list[int]] = []
    for index, phase in enumerate(phases):
        if index == 0 or phase != phases[index - 1] or len(windows[-1]) == width:
            windows.append([])
        windows[-1].append(index)
    means = []
    for window in windows:
        inside = values[window]
        if np.isfinite(inside).any():
            means.append((steps[window[0]], steps[window[-1]], float(np.nanmean(inside))))
    return means


def error_over_gradient(run: Run, key: str) -> tuple[Floats, Floats]:
    """Steps and ``key``, a norm of the errors, over the norm of the gradient, each (measured,)."""
    errors, gradients = run.column(key), run.column("grad_norm")
    known = np.isfinite(errors) & (gradients > 0)
    return run.column("step")[known], errors[known] / gradients[known]


def saved_bytes(run: Run) -> Floats:
    """Bytes saved up to and including each step, (records,)."""
    return np.cumsum(run.column("dense_bytes") - run.column("sent_bytes"))


def rank_groups(run: Run, columns: int = MOST_POINTS) -> tuple[list[str], Floats, tuple[float, float]]:
    """Mean rank of each group of matrices, those whose names differ in numbers only.

    Returns:
        Names of the groups, without what all of them begin or end with, and the number of matrices; ranks (groups, at
        most ``columns``) over time; first and last step. No groups where names or ranks are not known.
    """
    ranks = run.ranks()
    names = [matrix["name"] for matrix in run.info.matrices] if run.info is not None else []
    if not names or len(names) != len(ranks):
        return [], np.empty((0, 0)), (0.0, 0.0)
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(index)
    table = np.array([ranks[members].mean(axis=0) for members in groups.values()])
    steps = run.column("step")
    edges = np.linspace(0, len(steps), min(columns, len(steps)) + 1).astype(int)
    table = np.add.reduceat(table, edges[:-1], axis=1) / np.diff(edges)
    counts = [len(members) for members in groups.values()]
    labels = [f"{name} ({count})" if count > 1 else name for name, count in zip(_brief(groups), counts, strict=True)]
    return labels, table, (steps[0], steps[-1])


def _brief(names: Iterable[str]) -> list[str]:
    """Names, in parts between dots, without the first and last parts that all of them share."""
    parts = [name.split(".") for name in names]
    while min(map(len, parts)) > 1 and len({each[0] for each in parts}) == 1:
        parts = [each[1:] for each in parts]
    while min(map(len, parts)) > 1 and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    return [".".join(each) for each in parts]
