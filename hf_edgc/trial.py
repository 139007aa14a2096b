"""When codec=auto tries out what compression costs and saves, and what it sends meanwhile."""

from typing import Literal

from hf_edgc.config import EDGCConfig
from hf_edgc.progress import Progress

Stage = Literal["off", "dense", "compressed", "over"]

DENSE_STEPS, COMPRESSED_STEPS = 2, 3
"""Of a trial. Dense: DDP rebuilds its buckets after the first step, the second shows how long backward goes on. Then
compressed: the first one allocates the errors, the others show what the codec takes in a real step."""

TRIAL_STEPS = DENSE_STEPS + COMPRESSED_STEPS

WINDOWS_BETWEEN, STEPS_BETWEEN = 5, 200
"""From one trial to the next: so many windows, but at least so many steps, so that trials take little of the run."""


def stage(config: EDGCConfig, progress: Progress) -> Stage:
    """Where a compressing run is; ``progress.trial_step`` is the first step of this trial, or of the next one."""
    position = progress.step - progress.trial_step
    if config.codec != "auto" or position < 0:
        return "off"
    if position < DENSE_STEPS:
        return "dense"
    return "compressed" if position < TRIAL_STEPS else "over"


def masked(config: EDGCConfig, progress: Progress) -> tuple[int, ...]:
    """Rank of each matrix in the current step, 0 where it is sent dense."""
    now = stage(config, progress)
    if now == "dense":
        return (0,) * len(progress.ranks)
    if now == "compressed" or config.codec != "auto" or progress.paying is None:
        return tuple(progress.ranks)
    return tuple(rank if pays else 0 for rank, pays in zip(progress.ranks, progress.paying, strict=True))
