"""Perplexity against bytes, over sizes and seeds."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from sections import Record, Records, provenance, table
from sections.quality_runs import (
    Group,
    between,
    groups,
    noise_nats,
    on_static_curve,
    pooled,
    prediction_rms,
    to_static,
    verdict,
)

CHANGED = {
    "edgc-4-float32": "factors in float32, half the ranks",
    "edgc-4-global": "one rank for all matrices",
    "edgc-4-flat": "no learning-rate term",
    "edgc-4-no-entropy": "no entropy term",
    "edgc-4-no-feedback": "no error feedback (and one rank for all)",
    "edgc-16-warmup": "dense warm-up of 10 %",
}
"""Setups that differ in one thing from edgc at the same bytes, and what that is."""


def text(records: Records) -> str | None:
    """Tables of each size, with the differences that are larger than noise, and the plots."""
    found = groups(records)
    if not found:
        return None
    parts = ["## Quality", _method(found[0])]
    for group in found:
        parts += [_heading(group), _setups(group), _changed(group), _finetuning(group), _prediction(group)]
        parts += [f"![{group.name}: {what}](plots/{file})" for file, what in plots(group).items()]
    newest = max((run for group in found for run in group.all()), key=lambda run: run["date"])
    return "\n\n".join(part for part in parts if part) + f"\n\nNewest run: {provenance(newest)}.\n"


def figures(records: Records) -> dict[str, Any]:
    """For each size perplexity over bytes, and rank and entropy over time."""
    from sections.quality_figures import curves, pareto

    drawn: dict[str, Any] = {}
    for group in groups(records):
        draw = {"pareto": pareto, "curves": curves}
        drawn |= {file: draw[file.rsplit("_", 1)[1].removesuffix(".png")](group) for file in plots(group)}
    return drawn


def plots(group: Group) -> dict[str, str]:
    """What each picture of a size shows, by file name."""
    names = {f"quality_{group.name}_pareto.png": "perplexity over bytes"}
    if group.curves_of():
        names[f"quality_{group.name}_curves.png"] = "rank, entropy and error over time"
    return names


def _method(group: Group) -> str:
    run = group.any()
    size = run["size"]
    return (
        f"GPT-2 from scratch on the {run['text']}; {run['workers']} gloo workers, {size['batch']} blocks of "
        f"{size['block']} tokens each a step, AdamW, 7 % warm-up and cosine. Perplexity is over {run['tokens']:,.0f} "
        "validation tokens. Within a seed all runs start from the same weights and read the same batches. "
        "`static-4` is PowerSGD at rank 4, `edgc-4` the default of mode edgc with the bytes of `static-4` for the "
        "whole run as its target, `edgc-10x` with a tenth of the dense bytes. Differences are to static compression "
        "with float32 factors of the same seed at equal bytes (its loss is interpolated in the logarithm of the "
        "bytes); they count as larger than noise beyond two standard errors, with the deviation over the seeds pooled "
        "over all setups."
    )


def _heading(group: Group) -> str:
    size, noise = group.any()["size"], noise_nats(group)
    told = "" if noise is None else f"; a difference deviates by {100 * noise:.1f} % between seeds"
    return f"### {group.name}: {group.any()['parameters'] / 1e6:.2f} M parameters, {size['steps']} steps{told}"


def _setups(group: Group) -> str:
    header = [
        "setup", "bytes of dense", "ratio", "perplexity, mean (min to max)", "over dense", "to static", "than static",
        "seeds",
    ]  # fmt: skip
    names = [name for name in group.runs if "finetune" not in name]
    rows = []
    for name in sorted(names, key=lambda name: fmean(run["ratio"] for run in group.seeds(name).values())):
        runs = group.seeds(name).values()
        ratio, differences = fmean(run["ratio"] for run in runs), to_static(group, name)
        own = on_static_curve(name) or not differences
        told = ["", ""] if own else [_percent(differences), verdict(group, differences)]
        dense = between(group, name, "dense") if name != "dense" else []
        over = _percent(dense) if dense else ""
        rows.append(
            [f"`{name}`", f"{100 / ratio:.2f} %", f"{ratio:.2f}", _perplexities(runs), over, *told, str(len(runs))]
        )
    return table(header, rows).rstrip()


def _changed(group: Group) -> str:
    rows = []
    for name, what in CHANGED.items():
        whole = "-".join(name.split("-")[:2])
        if differences := between(group, name, whole):
            rows.append([what, f"`{whole}`", _percent(differences), verdict(group, differences)])
    header = ["changed", "in", "perplexity", "than with the default"]
    return "One thing changed, at equal bytes:\n\n" + table(header, rows).rstrip() if rows else ""


def _finetuning(group: Group) -> str:
    rows = []
    for name in ("finetune-dense", "finetune-static-4", "finetune-edgc-4"):
        if runs := group.seeds(name).values():
            differences = between(group, name, "finetune-static-4") if name == "finetune-edgc-4" else []
            told = f"{_percent(differences)}, {verdict(group, differences)}" if differences else ""
            ratio = fmean(run["ratio"] for run in runs)
            rows.append([f"`{name}`", f"{100 / ratio:.2f} %", _perplexities(runs), told, str(len(runs))])
    header = ["setup", "bytes of dense", "perplexity, mean (min to max)", "to static", "seeds"]
    what = "Fine-tuning on the second half of the text, from a model trained dense on the first:\n\n"
    return what + table(header, rows).rstrip() if rows else ""


def _prediction(group: Group) -> str:
    rms = prediction_rms(group)
    if not rms:
        return ""
    return (
        "Predicted against measured error norm, at all measured steps after a decision: the logarithm of their ratio "
        f"has an rms of {pooled(rms):.3f} over all runs of the default ({min(rms):.3f} to "
        f"{max(rms):.3f} in each of the {len(rms)})."
    )


def _perplexities(runs: Iterable[Record]) -> str:
    values = [run["perplexity"] for run in runs]
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{geometric_mean(values):.1f}{spread}"


def _percent(differences: Sequence[float]) -> str:
    """Differences of losses as those of perplexities, mean (min to max)."""
    mean, *ends = (100 * math.expm1(value) for value in (fmean(differences), min(differences), max(differences)))
    return f"{mean:+.1f} % ({ends[0]:+.1f} to {ends[1]:+.1f})" if len(differences) > 1 else f"{mean:+.1f} %"
