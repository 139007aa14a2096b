"""Step times by contender and link."""

from typing import Any

from sections import Record, Records, provenance, runs, table

MODEL_NAMES = {"17m": "GPT-2 of 16.8 M parameters", "gpt2": "GPT-2 small, 124 M parameters"}
NOT_COMPRESSED = ("ddp", "allreduce_hook", "noop_hook", "none")
"""Without a break-even rate: they send all or nothing."""


def text(records: Records) -> str | None:
    """For each model: ratios of the step and of backward alone, bytes, break-even rates."""
    models = runs.newest(records)
    if not models:
        return None
    parts = [
        "## Step time\n\n"
        "Two gloo workers with one thread each, one sequence of 64 tokens a worker, AdamW (fused). The contenders take "
        "turns in the same processes, in reversed order in every other round; every step starts at a barrier, and its "
        "time is that of the slower worker. Links are veth pairs under tc's token bucket (burst 1 MB, so that about "
        "1 MB after a pause passes at full speed). A cell is the median over plain DDP's median in the same run "
        "(minimum..maximum over the same median), so below 1 is faster; the row `ddp` has seconds.\n"
    ]
    for model, links in models.items():
        parts.append(f"### {MODEL_NAMES.get(model, model)}\n")
        parts.append("Whole optimizer step: forward, backward with synchronization, optimizer.\n")
        parts.append(_table(links, "step_s"))
        parts.append("Backward with synchronization alone:\n")
        parts.append(_table(links, "backward_s"))
        parts.append(f"![step time over link rate](plots/step_{model}.png)\n")
        parts.append(
            "Where the time goes: `synchronization` is what backward takes beyond that of `noop_hook`; ours tells how "
            f"much of it is waiting for collectives.\n\n![where the time goes](plots/parts_{model}.png)\n"
        )
        parts.append(_auto(links))
        parts.append(_where(links))
    return "\n".join(part for part in parts if part)


def figures(records: Records) -> dict[str, Any]:
    """Step time over link rate, and its parts, for each model."""
    from sections import step_figures  # matplotlib is needed for the figures only

    found = {}
    for model, links in runs.newest(records).items():
        title = MODEL_NAMES.get(model, model)
        found[f"step_{model}.png"] = step_figures.over_rate(links, title)
        found[f"parts_{model}.png"] = step_figures.parts(links, title)
    return found


def _table(links: dict[str, tuple[Record, Record]], part: str) -> str:
    by_link = runs.cells(links)
    header = ["contender", "MB a step", *(runs.rate_text(result["bits_per_s"]) for _, result in links.values())]
    whole_step = part == "step_s"
    rows = []
    for name in runs.contenders(links):
        sent = next(on_link[name]["sent_bytes"] for on_link in by_link.values() if name in on_link)
        row = [f"`{name}`", f"{sent / 1e6:.2f}", *(_cell(on_link, name, part) for on_link in by_link.values())]
        if whole_step:
            row.append("" if name in NOT_COMPRESSED else runs.break_even(links, name))
        rows.append(row)
    return table([*header, "break-even"] if whole_step else header, rows)


def _cell(on_link: runs.Cells, name: str, part: str) -> str:
    if name not in on_link:
        return ""
    times, dense = on_link[name][part], on_link["ddp"][part]["median"]
    if name == "ddp":
        return f"{times['median']:.3f} s ({times['min']:.3f}..{times['max']:.3f})"
    low, middle, high = (times[key] / dense for key in ("min", "median", "max"))
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def _auto(links: dict[str, tuple[Record, Record]]) -> str:
    """What codec=auto found, predicted and decided, beside the same exchanges by themselves."""
    header = [
        "link", "found", "compressed exchange, ms", "measured", "dense exchange, ms", "measured", "break-even",
        "matrices",
    ]  # fmt: skip
    rows = []
    for _, result in links.values():
        cell = result["contenders"].get("auto", {})
        report = cell.get("auto")
        if report is None or "measured_exchange_s" not in cell:
            continue
        times = [report["exchange_s"], cell["measured_exchange_s"], report["dense_exchange_s"]]
        rows.append(
            [
                runs.rate_text(result["bits_per_s"]),
                f"{report['link_mbit_per_s']:,.0f} Mbit/s, {report['link_latency_s'] * 1e3:.2f} ms",
                *(f"{1e3 * seconds:,.1f}" for seconds in (*times, cell["measured_dense_exchange_s"])),
                f"{report['break_even_mbit_per_s']:,.0f} Mbit/s",
                f"{report['compressed_matrices']} of {report['matrices']}",
            ]
        )
    what = "What `auto` found in its trial and predicted, beside the same exchanges measured by themselves:\n\n"
    return what + table(header, rows) if rows else ""


def _where(links: dict[str, tuple[Record, Record]]) -> str:
    by_run: dict[str, list[str]] = {}
    for record, result in links.values():
        steps = result["contenders"]["ddp"]["steps"]
        by_run.setdefault(provenance(record), []).append(
            f"{runs.rate_text(result['bits_per_s'])} ({steps} dense steps)"
        )
    measured = "; ".join(f"{', '.join(names)}: {run}" for run, names in by_run.items())
    sources = {cell["bytes_from"]: name for _, result in links.values() for name, cell in result["contenders"].items()}
    counted = "; ".join(f"{source} (as `{name}`)" for source, name in sources.items())
    return f"Bytes are what one worker hands to collectives, from: {counted}.\n\nMeasured: {measured}.\n"
