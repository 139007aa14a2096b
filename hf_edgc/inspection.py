"""``hf-edgc inspect``: what a checkpoint holds of EDGC, without a model or a process group."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from safetensors import SafetensorError
from torch import Tensor

from hf_edgc.checkpoint import read_file, shared_files, worker_file
from hf_edgc.clm.errors import UsageError
from hf_edgc.config import EDGCConfig
from hf_edgc.controller import Controller
from hf_edgc.layout import Matrix


@dataclass(frozen=True)
class SavedMatrix:
    """State of one compressed parameter.

    ``rank`` is that of its factor, 0 before the first compressed step; ``error_norms`` has the 2-norm of each
    worker's error, in worker order, and is empty without error feedback.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    error_norms: tuple[float, ...]


@dataclass(frozen=True)
class SavedState:
    """State of one model. ``header`` is as ``hf_edgc.checkpoint`` wrote it; ``rank`` is the next step's."""

    file: str
    header: dict[str, Any]
    phase: str
    rank: int
    matrices: tuple[SavedMatrix, ...]


def inspect_checkpoint(folder: Path) -> list[SavedState]:
    """Read the states in ``folder``, one for each model.

    Raises:
        UsageError: the folder is missing or holds no state, or a file is missing or damaged.
    """
    files = shared_files(folder)
    if not files:
        kind = "does not exist" if not folder.exists() else "is no folder"
        what = "holds no EDGC state (no edgc_*_shared.safetensors)" if folder.is_dir() else kind
        raise UsageError(f"{folder} {what}: give a checkpoint-N folder of Trainer's, or one that save_state wrote.")
    try:
        return [_saved_state(file) for file in files]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"The EDGC state in {folder} can't be read: {error}") from error


def _saved_state(file: Path) -> SavedState:
    tensors, header = read_file(file)
    errors = [read_file(worker_file(file, header["step"], worker))[0] for worker in range(header["workers"])]
    names: list[str] = header["controller"]["matrices"]
    config = EDGCConfig.from_dict(header["config"])
    # The controller knows the phase; for that it needs the matrices' names, their shapes may be any.
    controller = Controller(config, [Matrix(name, 1, 1, config.start_rank) for name in names])
    controller.load_state_dict(header["controller"])
    matrices = tuple(_saved_matrix(name, tensors.get(f"q/{name}"), errors) for name in names)
    return SavedState(file.name, header, controller.phase, controller.rank, matrices)


def _saved_matrix(name: str, q: Tensor | None, errors: list[dict[str, Tensor]]) -> SavedMatrix:
    own = [error[name] for error in errors if name in error]
    return SavedMatrix(
        name=name,
        shape=tuple(own[0].shape) if own else (),
        rank=0 if q is None else q.shape[1],  # q (cols, rank)
        error_norms=tuple(float(error.float().norm()) for error in own),
    )


def print_states(states: list[SavedState], console: Console) -> None:
    """Print each state as a line of facts and a table of matrices."""
    for state in states:
        totals = state.header["totals"]
        facts = {
            "step": f"{state.header['step']:,}",
            "phase": state.phase,
            "rank": str(state.rank),
            "mode": state.header["config"]["mode"],
            "workers": str(state.header["workers"]),
            "sent": f"{totals['sent_bytes'] / 1e6:,.1f} MB a worker",
            "dense": f"{totals['dense_bytes'] / 1e6:,.1f} MB",
        }
        if state.header["measured"] is not None:
            measured = state.header["measured"]
            facts["last gradient norm"] = f"{measured['grad_norm']:.4g}"
            facts["last error norm"] = f"{measured['error_norm']:.4g}"
        console.print(f"[bold]{state.file}[/bold]")
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()), soft_wrap=True)
        console.print(_matrix_table(state))


def _matrix_table(state: SavedState) -> Table:
    table = Table(Column("matrix", no_wrap=True), "shape", "rank", "error norm", "largest of a worker")
    for matrix in state.matrices:
        norms = matrix.error_norms
        told = [f"{sum(norms) / len(norms):.4g}", f"{max(norms):.4g}"] if norms else ["none", "none"]
        shape = " x ".join(map(str, matrix.shape)) or "-"
        table.add_row(matrix.name, shape, str(matrix.rank or "-"), *told)
    return table
