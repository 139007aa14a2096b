"""What is told about each step: the record, the sums over a run, the JSONL file."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class StepRecord:
    """What happened in one synchronization; the keys of a line of ``edgc_steps.jsonl``.

    ``ranks`` has the matrix rank of each matrix in layout order (0: sent dense) and ``rank`` their mean, weighted by
    the bytes that a rank costs; ``entropy`` (mean over the matrices, nats), ``grad_norm`` (2-norm of a worker's
    gradient before compression) and ``error_norm`` (of its errors before the step) are averaged over the workers, None
    if not measured. ``predicted_error_norm`` is what the model of the last rank decision says of ``error_norm``.
    Bytes are those that one worker handed to collectives; ``hook_s`` counts the seconds spent inside the hook,
    ``wait_s`` those of them in blocking collectives.
    """

    step: int
    phase: str
    compressed: bool
    finite: bool
    rank: float
    ranks: tuple[int, ...]
    entropy: float | None
    grad_norm: float | None
    error_norm: float | None
    predicted_error_norm: float | None
    learning_rate: float | None
    sent_bytes: int
    dense_bytes: int
    hook_s: float
    wait_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become None, which JSON lacks."""
        values = {**asdict(self), "ranks": list(self.ranks)}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass
class Totals:
    """Sums over all synchronizations of a run."""

    steps: int = 0
    compressed_steps: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    hook_s: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Count one synchronization."""
        self.steps += 1
        self.compressed_steps += record.compressed
        self.sent_bytes += record.sent_bytes
        self.dense_bytes += record.dense_bytes
        self.hook_s += record.hook_s

    @property
    def compression_ratio(self) -> float:
        """Dense bytes over sent bytes; larger is stronger."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


class RecordWriter:
    """Writes records to a JSON-lines file, one a step, readable while the run goes on."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        """Start ``path`` anew, or keep its records of the steps before ``first_step`` and go on after them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _records_before(path, first_step)
        self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)
        self._file.writelines(kept)

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        self._file.write(json.dumps(record.to_dict()) + "\n")

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        self._file.close()


def _records_before(path: Path, step: int) -> list[str]:
    """Whole lines of ``path`` for the steps before ``step``; a run that was killed may have written more."""
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            break  # cut off in the middle
    return kept
