"""EDGC's state on disk: one file for each worker's errors, one shared file for everything else.

All files are safetensors with a JSON header entry; nothing is unpickled. Each is written under a temporary name,
flushed and renamed, and the shared file, which names the step of the others, comes last: a kill at any moment
leaves the state saved before usable.
"""

import json
import os
import socket
import zlib
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_edgc.codecs import Slot
from hf_edgc.controller import Controller
from hf_edgc.hook import FORMAT_VERSION, EDGCState
from hf_edgc.logs import get_logger, is_main_process
from hf_edgc.measured import Measured
from hf_edgc.records import Totals

_SHARED = "_shared.safetensors"
"""Ends the name of a shared file."""


class StateError(RuntimeError):
    """There is no usable state, and ``require_state`` is set."""


def save_state(state: EDGCState, directory: str | Path, model_index: int = 0) -> None:
    """Write the state of one model into ``directory``; every worker must call this.

    Raises:
        RuntimeError: on every worker, if any of them could not write.
    """
    folder, step = Path(directory), state.controller.step
    worker = state.exchange.worker
    shared = _shared_file(state, folder, model_index)
    own = worker_file(shared, step, worker)
    header = {"step": step, "workers": state.exchange.workers, "worker": worker}
    problem = _try_write(own, state.reducer.feedback.errors, header)
    _raise_together(state, problem, f"could not write {own.name}")
    # The first worker on each host writes: on a shared disk they write the same, on local disks each has its own.
    if worker == _first_on_host(state):
        problem = _try_write(shared, _shared_tensors(state), {**header, **_shared_numbers(state)})
    _raise_together(state, problem, "could not write the shared file")
    for stale in folder.glob(own.name.replace(f"_step_{step}_", "_step_*_")):
        if stale != own:
            stale.unlink(missing_ok=True)


def load_state(state: EDGCState, directory: str | Path, model_index: int = 0) -> bool:
    """Go on from what ``save_state`` wrote; every worker must call this. All of them load, or none.

    With another number of workers, W' instead of W, each gets E' = (1 / W') sum_i E_i: the sum of the errors over
    the workers is the same, so every gradient that was dropped weighs as much as those the new workers will send.

    Returns:
        Whether the state was restored. If not, it is fresh, and a warning says why.

    Raises:
        StateError: the state is not usable and ``require_state`` is set; on every worker.
    """
    folder, problem, found = Path(directory), "", None
    try:
        shared = _shared_file(state, folder, model_index)
        tensors, header = read_file(shared)
        found = _fit(state, tensors, header, _read_errors(shared, header, state))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        problem = f"{type(error).__name__}: {error}"
    failed = _failed_workers(state, problem)
    # On disks of their own, hosts may hold states of different steps.
    checksums = {row[0] for row in state.exchange.gather_ints([0 if found is None else found.checksum], state.device)}
    if failed or found is None or len(checksums) > 1:
        reason = problem or (f"worker {failed[0]} could not read its part" if failed else "it differs between hosts")
        if state.config.require_state:
            raise StateError(f"No usable EDGC state in {folder} ({reason}), and require_state is set.")
        if problem or is_main_process():
            get_logger().warning("No usable EDGC state in %s (%s): going on with a fresh one.", folder, reason)
        state.forget()
        return False
    state.controller, state.totals, state.measured = found.controller, found.totals, found.measured
    state.reducer.feedback.errors, state.reducer.slots = found.errors, found.slots
    if is_main_process():
        for note in found.notes:
            get_logger().warning("Resuming from %s: %s", folder, note)
    return True


@dataclass(frozen=True)
class _Found:
    """What was read, made to fit the model and options at hand; ``notes`` says what did not fit."""

    controller: Controller
    totals: Totals
    measured: Measured | None
    errors: dict[str, Tensor]
    slots: dict[str, Slot]
    notes: list[str]
    checksum: int
    """Of the shared file."""


def _shared_tensors(state: EDGCState) -> dict[str, Tensor]:
    """The codecs' slots, as ``key/parameter``."""
    slots = state.reducer.slots.items()
    return {f"{key}/{name}": tensor for name, slot in slots for key, tensor in slot.items()}


def _shared_numbers(state: EDGCState) -> dict[str, Any]:
    return {
        "config": state.config.to_dict(),
        "controller": state.controller.state_dict(),
        "totals": asdict(state.totals),
        "measured": None if state.measured is None else asdict(state.measured),
    }


def _fit(
    state: EDGCState, tensors: Mapping[str, Tensor], header: Mapping[str, Any], errors: Mapping[str, Tensor]
) -> _Found:
    """Check and convert everything; ``state`` is not changed."""
    notes = []
    options, saved = state.config.to_dict(), header["config"]
    changed = [f"{k} {saved.get(k)} -> {options[k]}" for k in options if saved.get(k) != options[k]]
    same_config = not changed
    if changed:
        told = ", ".join(changed)
        notes.append(f"EDGC options differ ({told}); errors and factors are kept, ranks start as the options say")
    controller = copy(state.controller)
    controller.load_state_dict(header["controller"], same_config)
    shapes = {matrix.name: (matrix.rows, matrix.cols) for matrix in state.layout.matrices}
    names = {full: full.split("/", 1)[1] for full in tensors}
    dropped = {name for name, error in errors.items() if shapes.get(name) != tuple(error.shape)}
    dropped |= {name for full, name in names.items() if shapes.get(name, (0, 0))[1] != tensors[full].shape[0]}
    if dropped:
        gone = ", ".join(sorted(dropped))
        notes.append(f"changed, gone or now dense, so their errors and factors are dropped: {gone}")
    feedback = state.reducer.feedback
    kept = {name: error for name, error in errors.items() if name not in dropped and feedback.enabled}
    place = feedback.device or state.device
    slots: dict[str, dict[str, Tensor]] = {}
    for full, name in names.items():
        if name not in dropped:
            slots.setdefault(name, {})[full.split("/", 1)[0]] = tensors[full].to(state.device)
    return _Found(
        controller=controller,
        totals=Totals(**header["totals"]),
        measured=None if header["measured"] is None else Measured(**header["measured"]),
        errors={name: error.to(place, feedback.dtype, copy=True) for name, error in kept.items()},
        slots=dict(slots),
        notes=notes,
        checksum=_checksum(tensors, header),
    )


def _read_errors(shared: Path, header: Mapping[str, Any], state: EDGCState) -> dict[str, Tensor]:
    step, saved = int(header["step"]), int(header["workers"])
    workers, worker = state.exchange.workers, state.exchange.worker
    if saved == workers:
        return read_file(worker_file(shared, step, worker))[0]
    total: dict[str, Tensor] = {}
    for other in range(saved):
        for name, error in read_file(worker_file(shared, step, other))[0].items():
            total[name] = total[name] + error.float() if name in total else error.float()
    return {name: error / workers for name, error in total.items()}


def shared_files(folder: Path) -> list[Path]:
    """The file of each state in ``folder`` that holds what is the same on all workers."""
    return sorted(folder.glob(f"edgc_*{_SHARED}"))


def worker_file(shared: Path, step: int, worker: int) -> Path:
    """The file of one worker that belongs to a shared one."""
    return shared.with_name(f"{shared.name.removesuffix(_SHARED)}_step_{step}_worker_{worker}.safetensors")


def _shared_file(state: EDGCState, folder: Path, index: int) -> Path:
    return folder / f"edgc_{index}{_group(state)}{_SHARED}"


def _group(state: EDGCState) -> str:
    """Tells process groups apart that save into one folder; empty for the group of all workers."""
    first = state.exchange.first_global_worker
    return "" if first is None else f"_group_{first}"


def _first_on_host(state: EDGCState) -> int:
    """The first worker of our group on this worker's host."""
    host = zlib.crc32(socket.gethostname().encode())
    return [row[0] for row in state.exchange.gather_ints([host], state.device)].index(host)


def _try_write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Write atomically; the reason why that failed, or an empty string."""
    on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    plain = {"format": FORMAT_VERSION, **header}
    full = {**plain, "crc32": _checksum(on_host, plain)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(on_host, temporary, {"edgc": json.dumps(full)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of one file that ``save_state`` wrote.

    Raises:
        OSError, SafetensorError: the file is missing or damaged.
        ValueError: it is not ours, of another format, or its contents changed after writing.
    """
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("edgc")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if text is None:
        raise ValueError(f"{path.name} was not written by hf_edgc")
    header: dict[str, Any] = json.loads(text)
    if header.get("format") != FORMAT_VERSION:
        raise ValueError(f"{path.name} has format {header.get('format')}, this release reads {FORMAT_VERSION}")
    if header.pop("crc32", None) != _checksum(tensors, header):
        raise ValueError(f"{path.name} is damaged: its checksum does not match")
    return tensors, header


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> int:
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1).view(torch.uint8) if tensors[name].numel() else torch.empty(0)
        value = zlib.crc32(flat.numpy().data, zlib.crc32(name.encode(), value))
    return value


def _failed_workers(state: EDGCState, problem: str) -> list[int]:
    rows = state.exchange.gather_ints([bool(problem)], state.device)
    return [worker for worker, row in enumerate(rows) if row[0]]


def _raise_together(state: EDGCState, problem: str, what: str) -> None:
    failed = _failed_workers(state, problem)
    if failed:
        raise RuntimeError(f"EDGC state: {what} on worker {failed[0]}{': ' + problem if problem else ''}")
