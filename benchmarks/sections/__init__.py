"""Sections of RESULTS.md, a module each.

A section module has ``text(records) -> str | None``, markdown that starts with its heading, or None without records,
and may have ``figures(records) -> dict[str, Figure]``, by file name in ``plots/``. ``records`` maps a kind (``step``)
to its records, newest first. Text comes from the records alone, so that the same records give the same file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]

SECTIONS = ["targets", "quality", "step", "codec", "memory"]
"""Modules of this package in the order of the document."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def provenance(record: Record) -> str:
    """Where and when a record was made."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"commit {record['commit']}, {record['date']}, {record['machine']}, {versions}"
