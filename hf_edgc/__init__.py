"""Entropy-driven dynamic gradient compression (EDGC, arXiv 2511.10333) for Accelerate and Trainer."""

import importlib
from typing import TYPE_CHECKING, Any

from hf_edgc.config import EDGCConfig
from hf_edgc.hook import EDGCState, edgc_hook

if TYPE_CHECKING:
    from hf_edgc.callback import EDGCCallback
    from hf_edgc.plugin import EDGCPlugin

__version__ = "0.1.0"

__all__ = ["EDGCCallback", "EDGCConfig", "EDGCPlugin", "EDGCState", "edgc_hook"]

_LAZY = {"EDGCCallback": "hf_edgc.callback", "EDGCPlugin": "hf_edgc.plugin"}
"""Loaded when asked for: importing Trainer and Accelerate takes seconds that a user of the bare hook need not wait."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
