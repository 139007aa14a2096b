"""What has come in of the current step, bucket by bucket."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_edgc.controller import Plan
from hf_edgc.measurement import Measurement
from hf_edgc.reduction import Reduction


@dataclass
class Collected:
    """One step so far; ``sent_bytes`` and ``wait_s`` hold the exchange's counts at its start."""

    measurement: Measurement
    plan: Plan
    sent_bytes: int
    wait_s: float
    start_s: float = 0.0
    """When the first bucket came in."""
    hook_s: float = 0.0
    dense_bytes: int = 0
    reduction: Reduction | None = None
    """The compressed step, once its first bucket is in."""
    futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = field(default_factory=list)
