"""One run, as it stands in its output folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_edgc.records import StepRecord
from hf_edgc.run_info import INFO_FILE, RECORD_FILE, RESULTS_FILE, STATE_FILE, RunInfo

Floats = npt.NDArray[np.float64]


class RunError(ValueError):
    """A folder that holds no run, or a damaged one; the message says which file is missing or wrong."""


@dataclass(frozen=True)
class Run:
    """What is known of one run; parts that its folder lacks are empty.

    Attributes:
        name: tells it from the other runs of a report.
        records: one for each synchronization, in order (``hf_edgc.records.StepRecord``).
        info: configuration and layout; None for a run without DDP.
        results: the figures that a script wrote at its end.
        log: Trainer's log history.
        notes: what could not be used, in sentences.
    """

    name: str
    records: Sequence[dict[str, Any]]
    info: RunInfo | None
    results: dict[str, Any]
    log: Sequence[dict[str, Any]]
    notes: tuple[str, ...] = ()

    def column(self, key: str) -> Floats:
        """``key`` of every record, shape (records,); NaN where it was not measured."""
        values = [record.get(key) for record in self.records]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def ranks(self) -> Floats:
        """Rank of each matrix at each record, shape (matrices, records); no rows if the records disagree."""
        rows = [record["ranks"] for record in self.records]
        if len({len(row) for row in rows}) != 1:
            return np.empty((0, len(rows)))
        return np.array(rows, dtype=np.float64).T

    def logged(self, *keys: str) -> tuple[Floats, Floats]:
        """Steps and values, each (entries,), of the first of ``keys`` that the log has."""
        for key in keys:
            entries = [entry for entry in self.log if isinstance(entry.get(key), int | float)]
            if entries:
                pairs = np.array([(entry["step"], entry[key]) for entry in entries], dtype=np.float64)
                return pairs[:, 0], pairs[:, 1]
        return np.empty(0), np.empty(0)


_NOTHING = f"none of {RECORD_FILE}, {STATE_FILE} and {RESULTS_FILE} is there."

_KEYS = {field.name for field in fields(StepRecord)}


def folder_of(path: Path) -> Path:
    """The output folder that ``path``, itself one or a file of records in one, stands for."""
    return path.parent if path.is_file() else path


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run from the folder that Trainer calls output_dir.

    Args:
        path: the folder; or the file of records in it, where that has a name of its own.
        name: what to call the run; default: the folder's name.

    Raises:
        RunError: the folder is missing, holds no run, or a file in it is damaged.
    """
    folder, records_path = folder_of(path), path if path.is_file() else path / RECORD_FILE
    if not folder.is_dir():
        raise RunError(f"{folder} does not exist: give the output_dir of a run.")
    notes: list[str] = []
    records = _records(records_path, notes)
    state = _json(_state_file(folder))
    results = _json(folder / RESULTS_FILE)
    if not records and not state and not results:
        found = " ".join(notes) or (f"{records_path.name} is empty." if records_path.exists() else _NOTHING)
        raise RunError(f"{folder} holds no run: {found}")
    info = None
    if (folder / INFO_FILE).exists():
        try:
            info = RunInfo.read(folder)
        except ValueError as error:
            raise RunError(str(error)) from error
    elif records:
        notes.append(f"{INFO_FILE} is missing, so that configuration and names of the matrices are not known.")
    return Run(name or folder.resolve().name, records, info, results, state.get("log_history", []), tuple(notes))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read several; those whose folders have the same name are called by their paths.

    Raises:
        RunError: as ``read_run``.
    """
    names = [folder_of(path).resolve().name for path in paths]
    return [
        read_run(path, str(path) if names.count(name) > 1 else name) for path, name in zip(paths, names, strict=True)
    ]


def _state_file(folder: Path) -> Path:
    """Trainer's state in ``folder`` or, if training did not end, in its last checkpoint."""
    saved = [path for path in folder.glob(f"checkpoint-*/{STATE_FILE}") if path.parent.name[11:].isdecimal()]
    last = max(saved, key=lambda path: int(path.parent.name[11:]), default=folder / STATE_FILE)
    return folder / STATE_FILE if (folder / STATE_FILE).exists() else last


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}.") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} is damaged: it holds no mapping.")
    return values


def _records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Whole records up to the first line that is none; a run that was killed may have left half a line."""
    records: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not (isinstance(record, dict) and record.keys() >= _KEYS):
            notes.append(f"Line {number} of {path.name} is no record of a step; it and what follows is not used.")
            break
        records.append(record)
    return records
