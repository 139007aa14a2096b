"""The tables of a report, as rows of strings."""

from collections.abc import Sequence
from typing import Any

from hf_edgc.config import EDGCConfig
from hf_edgc.report.run import Run

MISSING = "-"

Rows = list[tuple[str, list[str]]]
"""A name, and one value for each run."""


def results(runs: Sequence[Run]) -> Rows:
    """The figures of each run; rows that no run has are left out."""
    columns = [_results(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, MISSING) for column in columns]) for name in names]


def link(runs: Sequence[Run]) -> Rows:
    """What was measured of the link and decided by it; no rows if no run did."""
    columns = [dict(run.info.link or {}) if run.info is not None else {} for run in runs]
    return [
        (title, [_with_unit(column[key], unit, factor) if key in column else MISSING for column in columns])
        for key, (title, unit, factor) in LINK.items()
        if any(key in column for column in columns)
    ]


def configuration(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    """Every option of each run, and whether any run has it differ from its default."""
    configs = [run.info.config if run.info is not None else {} for run in runs]
    defaults = EDGCConfig().to_dict()
    names = list(dict.fromkeys(name for config in configs for name in config))
    return [
        (
            name,
            [shown(config.get(name)) if name in config else MISSING for config in configs],
            any(name in config and config[name] != defaults.get(name) for config in configs),
        )
        for name in names
    ]


def shown(value: Any) -> str:
    """A value as a reader wants it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return str(value)


LINK = {
    "step": ("decided before step", "", 1.0),
    "link_mbit_per_s": ("link", "Mbit/s", 1.0),
    "link_latency_s": ("link, latency", "ms", 1e3),
    "link_burst_bytes": ("link, passes at once after a pause", "MB", 1e-6),
    "hidden_s": ("backward after its first gradients", "ms", 1e3),
    "dense_bytes": ("dense, sent in a step", "MB", 1e-6),
    "dense_exchange_s": ("dense, exchange by itself", "ms", 1e3),
    "dense_s": ("dense, a step waits", "ms", 1e3),
    "round_bytes": ("compressed, sent in a step's rounds", "MB", 1e-6),
    "exchange_s": ("compressed, exchange by itself", "ms", 1e3),
    "codec_s": ("compressed, computing", "ms", 1e3),
    "compressed_s": ("compressed, a step waits", "ms", 1e3),
    "break_even_mbit_per_s": ("compression pays below", "Mbit/s", 1.0),
    "break_even_rank": ("largest rank that pays", "", 1.0),
    "max_rank": ("max_rank set by it", "", 1.0),
    "matrices": ("matrices to choose from", "", 1.0),
    "compressed_matrices": ("of them compressed", "", 1.0),
}
"""What ``EDGCState.link_report`` holds, in a reader's order: title, unit, factor to it."""


def _with_unit(value: Any, unit: str, factor: float) -> str:
    if not unit or value is None:
        return shown(value)
    values = value if isinstance(value, list | tuple) else [value]
    return f"{', '.join(shown(each * factor) for each in values)} {unit}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value >= 1e6 else f"{value / 1e6:.3g} MB"


def _results(run: Run) -> dict[str, str]:
    rows: dict[str, str] = {}
    if run.info is not None:
        rows |= {
            "mode": str(run.info.config.get("mode", MISSING)),
            "workers": shown(run.info.workers),
            "compressed matrices": shown(len(run.info.matrices)),
            "tensors sent dense": shown(len(run.info.dense)),
        }
    if run.records:
        sent, dense = run.column("sent_bytes").sum(), run.column("dense_bytes").sum()
        rows |= {
            "synchronized steps": shown(len(run.records)),
            "of them compressed": shown(sum(bool(record["compressed"]) for record in run.records)),
            "of them with an overflow": shown(sum(not record["finite"] for record in run.records)),
            "sent by a worker": _megabytes(sent),
            "dense": _megabytes(dense),
            "compression ratio": f"{dense / sent:.2f}" if sent else MISSING,
            "in the hook": f"{run.column('hook_s').sum():,.1f} s",
            "of it waiting": f"{run.column('wait_s').sum():,.1f} s",
        }
    _, perplexities = run.logged("eval_perplexity")
    found = run.results.get("perplexity", perplexities[-1] if len(perplexities) else None)
    if found is not None:
        rows["perplexity"] = f"{found:,.2f}"
    runtime = run.results.get("train_runtime", next(iter(run.logged("train_runtime")[1][-1:]), None))
    if runtime is not None:
        rows["training took"] = f"{runtime:,.1f} s"
    return rows
