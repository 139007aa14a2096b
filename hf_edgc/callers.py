"""Finds the object on whose behalf we are called, where Accelerate and Trainer pass us everything but themselves."""

import sys
from typing import Any, TypeVar

T = TypeVar("T")


def calling_instance(kind: type[T]) -> T | None:
    """The innermost ``self`` of type ``kind`` among the callers, or None.

    ``TrainerCallback`` events and ``DistributedDataParallelKwargs.register_comm_hook`` get no reference to the
    trainer or the accelerator. A contract test guards this against other versions of both.
    """
    found = _calling_frame(kind, None)
    return None if found is None else found["self"]


def calling_argument(kind: type, name: str) -> Any:
    """Value of the local variable ``name`` in the innermost calling method of a ``kind`` that has one, or None."""
    found = _calling_frame(kind, name)
    return None if found is None else found[name]


def _calling_frame(kind: type, name: str | None) -> dict[str, Any] | None:
    frame = sys._getframe(2)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind) and (name is None or name in frame.f_locals):
            return frame.f_locals
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
