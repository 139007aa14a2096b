"""The files of a run, and ``edgc_run.json``: what its step records do not repeat in each line."""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_edgc.hook import EDGCState

RECORD_FILE = "edgc_steps.jsonl"
INFO_FILE = "edgc_run.json"
RESULTS_FILE = "all_results.json"
STATE_FILE = "trainer_state.json"
"""What a run leaves in its output folder: ours, and those that Trainer and its scripts write."""


@dataclass(frozen=True)
class RunInfo:
    """What does not change from step to step.

    ``matrices`` are the compressed parameters in the order of a record's ``ranks``, each with name, rows, cols and
    max_rank; ``dense`` are the others, each with name, elements and reason. ``window_steps`` is what the config means
    for this run's length. ``link`` is what was measured of the link and decided by it, None without codec auto.
    """

    release: str
    workers: int
    window_steps: int
    config: dict[str, Any]
    matrices: list[dict[str, Any]]
    dense: list[dict[str, Any]]
    link: dict[str, Any] | None = None

    @classmethod
    def of(cls, state: "EDGCState", total_steps: int | None) -> "RunInfo":
        """Of a run of ``total_steps`` optimizer steps, as far as it is known now."""
        return cls(
            release=version("hf_edgc"),
            workers=state.exchange.workers,
            window_steps=state.config.window(total_steps),
            config=state.config.to_dict(),
            matrices=[asdict(matrix) for matrix in state.layout.matrices],
            dense=[asdict(tensor) for tensor in state.layout.dense],
            link=state.link_report,
        )

    def write(self, folder: Path) -> None:
        """Write ``edgc_run.json`` into ``folder``, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INFO_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "RunInfo":
        """Read what ``write`` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is damaged or of another release with other fields.
        """
        try:
            return cls(**json.loads((folder / INFO_FILE).read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(f"{folder / INFO_FILE} is not what this release writes: {error}") from error
