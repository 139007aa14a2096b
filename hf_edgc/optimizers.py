"""What Accelerate does not tell its DDP handler: when optimizers step, and with which learning rate."""

import functools
import weakref
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepListener(Protocol):
    """Someone who wants to know; must be hashable."""

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before ``optimizer`` steps; may raise to stop the training."""
        ...


_listeners: "weakref.WeakSet[StepListener]" = weakref.WeakSet()


def listen(listener: StepListener) -> None:
    """Tell ``listener``, which is held weakly, of every optimizer step from now on."""
    _install()
    _listeners.add(listener)


class LearningRate:
    """Largest learning rate of the optimizer, prepared by an accelerator, that owns given parameters.

    Looked up when first asked for, since models may be prepared before their optimizers; holds all weakly.
    """

    def __init__(self, accelerator: Accelerator, parameter_ids: set[int]) -> None:
        """Read from the optimizer that owns any of ``parameter_ids`` (``id`` of each)."""
        self._accelerator = weakref.ref(accelerator)
        self._parameter_ids = parameter_ids
        self._optimizer: weakref.ref[Any] | None = None

    def __call__(self) -> float | None:
        """The rate now; None if no such optimizer is known."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is None:
            optimizer = self._find()
            if optimizer is None:
                return None
            self._optimizer = weakref.ref(optimizer)
        return max(float(group["lr"]) for group in optimizer.param_groups)

    def _find(self) -> Any | None:
        accelerator = self._accelerator()
        for optimizer in [] if accelerator is None else accelerator._optimizers:
            if any(id(p) in self._parameter_ids for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        return None


@functools.cache
def _install() -> None:
    # Once for the process and never removed: torch may be walking its hooks when the last listener goes.
    register_optimizer_step_pre_hook(_notify)


def _notify(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in list(_listeners):
        listener.before_optimizer_step(optimizer)
