"""What a run leaves behind: a JSON file for programs, a table for people."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_edgc.run_info import RESULTS_FILE


@dataclass(frozen=True)
class Facts:
    """What the metrics do not say about a run."""

    source: str
    """The text."""
    parameters: int
    vocabulary: int
    workers: int
    steps: int
    """Optimizer steps; 0 without training."""
    tokens_per_step: int
    output_dir: Path


def write_results(metrics: dict[str, Any], output_dir: Path) -> Path:
    """Write all figures of a run to ``all_results.json``; those of an earlier run there are replaced.

    Returns:
        The file. An overflown perplexity is written as ``Infinity``, as Python's json reads it.
    """
    path = output_dir / RESULTS_FILE
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metrics, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    return path


def print_summary(metrics: dict[str, Any], facts: Facts) -> None:
    """Print the table that ends a run to stdout."""
    Console(highlight=False).print(fact_table("EDGC run", summary_rows(metrics, facts)))


def fact_table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def summary_rows(metrics: dict[str, Any], facts: Facts) -> list[tuple[str, str]]:
    """Names and values of the table; what was not measured is left out."""
    rows = [
        ("text", facts.source),
        ("model", f"{facts.parameters / 1e6:.2f} M parameters, vocabulary {facts.vocabulary:,}"),
        ("workers", str(facts.workers)),
    ]
    if facts.steps:
        rows += [
            ("steps", f"{facts.steps:,} ({facts.steps * facts.tokens_per_step:,} tokens)"),
            (
                "run time",
                f"{metrics['train_runtime']:.1f} s ({metrics['train_loss']:.3f} mean training loss)",
            ),
        ]
    if facts.steps and metrics["edgc_dense_bytes"]:  # one worker exchanges nothing
        rows += [
            ("sent", f"{_megabytes(metrics['edgc_sent_bytes'])} per worker"),
            ("dense", f"{_megabytes(metrics['edgc_dense_bytes'])} without compression"),
            ("compression ratio", f"{metrics['edgc_compression_ratio']:.2f}"),
            ("final matrix rank", f"{metrics['edgc_final_rank']:.3g}" if metrics["edgc_final_rank"] else "none, dense"),
            ("in the hook", f"{metrics['edgc_hook_s']:.1f} s"),
        ]
    if "perplexity" in metrics:
        nll, tokens = metrics["eval_nll"], metrics["eval_tokens"]
        rows.append(("perplexity", f"{metrics['perplexity']:.2f} ({nll:.4f} nats a token, {tokens:,} tokens)"))
    rows.append(("written to", str(facts.output_dir)))
    return rows


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
