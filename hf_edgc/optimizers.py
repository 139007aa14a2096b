"""Tells of every optimizer step in this process, which Accelerate does not tell its DDP handler of."""

import functools
import weakref
from typing import Any, Protocol

import torch
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
    """Largest learning rate of an optimizer's groups, None once the optimizer is gone; holds it weakly."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Read from ``optimizer``."""
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> float | None:
        """The rate now."""
        optimizer = self._optimizer()
        return None if optimizer is None else max(float(group["lr"]) for group in optimizer.param_groups)


@functools.cache
def _install() -> None:
    # Once for the process and never removed: torch may be walking its hooks when the last listener goes.
    register_optimizer_step_pre_hook(_notify)


def _notify(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in list(_listeners):
        listener.before_optimizer_step(optimizer)
