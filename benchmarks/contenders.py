"""Who is compared: each contender gives a DDP its communication hook and tells what it sent."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hf_edgc import EDGCConfig, EDGCState, agreement, edgc_hook
from hf_edgc.codecs import LowRank
from hf_edgc.controller import Controller
from hf_edgc.measurement import Measurement
from hf_edgc.trial import TRIAL_STEPS

HUGE_MB = 100_000
"""As bucket_cap_mb: one bucket. torch's powerSGD_hook pairs its collectives up wrongly on gloo with more."""
DENSE_STEPS = 2
"""torch refuses to start PowerSGD with error feedback before the buckets are rebuilt, after the first step."""
TOTAL_STEPS = 1000
"""Length of the run that our controller is told: a window is 5 % of it, 50 steps."""


@dataclass
class Probe:
    """Read after each step: what the contender says of itself."""

    step: Callable[[], dict[str, Any]]
    """``sent_bytes``, and for ours ``hook_s``, ``wait_s``, ``measure_s`` and ``controller_s``, of the last step."""
    final: Callable[[], dict[str, Any]] = dict
    state: EDGCState | None = None
    """What to put into the record once, at the end."""


@dataclass(frozen=True)
class Contender:
    """``attach`` registers the hook; ``bytes_from`` says where the number of bytes comes from."""

    attach: Callable[[DistributedDataParallel], Probe]
    bytes_from: str
    bucket_cap_mb: float | None = None
    warm_up_steps: int = 2
    """Untimed steps: buckets are rebuilt after the first, errors and optimizer state are there after the second."""
    slow_start: bool = False
    """Whether the link has its rate from the first step on, since the contender measures it then."""
    check: Callable[["Probe"], dict[str, Any]] = lambda probe: {}
    """Measured after the timed steps and put into the record."""
    missing: str | None = None
    """Why it can't be run."""


def gradient_bytes(ddp: DistributedDataParallel) -> int:
    """Of all parameters that DDP synchronizes."""
    return sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)


def _peer(hook: Callable[..., Any] | None, share: float, bytes_from: str) -> Contender:
    def attach(ddp: DistributedDataParallel) -> Probe:
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        sent = int(gradient_bytes(ddp) * share)
        return Probe(lambda: {"sent_bytes": sent})

    return Contender(attach, bytes_from)


def _power_sgd(rank: int) -> Contender:
    def attach(ddp: DistributedDataParallel) -> Probe:
        state = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=DENSE_STEPS,
            use_error_feedback=True,
            warm_start=True,
        )
        seen = [0]

        def hook(state: PowerSGDState, bucket: dist.GradBucket) -> Any:
            assert bucket.index() == 0 and bucket.is_last(), "powerSGD_hook works on gloo with one bucket only"
            return powerSGD_hook(state, bucket)

        def step() -> dict[str, Any]:
            elements = state.total_numel_after_compression - seen[0]
            seen[0] = state.total_numel_after_compression
            return {"sent_bytes": 4 * elements}  # float32

        hook.__annotations__ = powerSGD_hook.__annotations__
        ddp.register_comm_hook(state, hook)
        return Probe(step)

    return Contender(attach, "PowerSGDState's own count of elements", HUGE_MB, DENSE_STEPS + 1)


def _ours(slow_start: bool = False, **options: Any) -> Contender:
    known = {spec.name for spec in fields(EDGCConfig)}
    unknown = sorted(set(options) - known)
    missing = f"this EDGCConfig has no option {', '.join(unknown)}" if unknown else None

    def attach(ddp: DistributedDataParallel) -> Probe:
        state = EDGCState(EDGCConfig(**options), ddp.module.named_parameters(), total_steps=TOTAL_STEPS)
        ddp.register_comm_hook(state, edgc_hook)
        clocks = _Clocks(state)
        final = lambda: {"auto": state.link_report, **clocks.summary(), **_formula(state)}  # noqa: E731
        return Probe(clocks.step, final, state)

    warm_up_steps = TRIAL_STEPS + 1 if slow_start else 2
    check = measured_exchange if slow_start else lambda probe: {}
    return Contender(
        attach, "state.exchange.sent_bytes", None, warm_up_steps, slow_start=slow_start, check=check, missing=missing
    )


def measured_exchange(probe: Probe) -> dict[str, Any]:
    """What codec=auto predicted, done: its two rounds and one dense all-reduce, by themselves."""
    state = probe.state
    report = None if state is None else state.link_report
    if state is None or report is None:
        return {}

    def seconds(sizes: list[int], repeats: int) -> float:
        buffers = [torch.zeros(size // 4) for size in sizes]
        times = []
        for _ in range(repeats):
            time.sleep(0.1)  # between two steps a shaper's burst comes back
            dist.barrier()
            start = time.perf_counter()
            for buffer in buffers:
                state.exchange.mean_later(buffer).wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return {
        "measured_exchange_s": seconds(report["round_bytes"], 5),
        "measured_dense_exchange_s": seconds([report["dense_bytes"]], 1 if report["dense_exchange_s"] > 1 else 3),
    }


@dataclass
class _Clocks:
    """Reads one EDGCState's counters step by step."""

    state: EDGCState
    _before: dict[str, float] = field(default_factory=dict)
    _measured_s: list[float] = field(default_factory=list)
    _controller_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        time_methods()
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {
            "sent_bytes": self.state.exchange.sent_bytes,
            "wait_s": self.state.exchange.wait_s,
            "hook_s": self.state.totals.hook_s,
            **SPENT_S,
        }

    def step(self) -> dict[str, Any]:
        now = self._now()
        spent = {key: now[key] - self._before[key] for key in now}
        self._before = now
        if self.state.last is not None and self.state.last.grad_norm is not None:
            self._measured_s.append(spent["measure_s"])
        self._controller_s.append(spent["controller_s"])
        return {**spent, "sent_bytes": int(spent["sent_bytes"])}

    def summary(self) -> dict[str, Any]:
        median = statistics.median
        return {
            "measured_step_s": median(self._measured_s) if self._measured_s else None,
            "measured_steps": len(self._measured_s),
            "entropy_every": self.state.config.entropy_every,
            "controller_step_s": median(self._controller_s),
        }


def _formula(state: EDGCState) -> dict[str, int]:
    """Bytes of the last step by formula: r (rows + cols) for each matrix, the dense gradients, and control numbers."""
    dtype = getattr(torch, state.config.factor_dtype)
    last = state.last
    if last is None or not last.compressed:
        return {}
    matrices = sum(
        LowRank(rank, dtype).wire_bytes(matrix.rows, matrix.cols, 4) if rank else 4 * matrix.dense_elements
        for rank, matrix in zip(last.ranks, state.layout.matrices, strict=True)
    )
    # One flag a matrix (has anybody a gradient for it?), the fingerprint, and in a measured step the numbers.
    control = 4 * (len(state.layout.matrices) + agreement.SIZE)
    measured = 4 * (3 * len(state.layout.matrices) + 3) if last.grad_norm is not None else 0
    return {
        "factor_bytes": matrices,
        "dense_part_bytes": state.dense_gradient_bytes,
        "control_bytes": control + measured,
        "last_sent_bytes": last.sent_bytes,
    }


SPENT_S = {"measure_s": 0.0, "controller_s": 0.0}
"""Seconds in measuring entropies and in the controller, on this worker, since ``time_methods``."""


@functools.cache
def time_methods() -> None:
    """From now on add the time of ``Measurement`` and ``Controller.advance`` to ``SPENT_S``."""
    for owner, name, key in (
        (Measurement, "add", "measure_s"),
        (Measurement, "vector", "measure_s"),
        (Controller, "advance", "controller_s"),
    ):
        setattr(owner, name, _timed(getattr(owner, name), key))


def _timed(method: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            SPENT_S[key] += time.perf_counter() - start

    return timed


CONTENDERS: dict[str, Contender] = {
    "ddp": _peer(None, 1.0, "the gradients' size"),
    "allreduce_hook": _peer(allreduce_hook, 1.0, "the gradients' size"),
    "noop_hook": _peer(noop_hook, 0.0, "none: the ceiling"),
    "fp16_compress_hook": _peer(fp16_compress_hook, 0.5, "half the gradients' size"),
    "powerSGD_hook 8": _power_sgd(8),
    "powerSGD_hook 32": _power_sgd(32),
    "static 8": _ours(mode="static", rank=8, factor_dtype="float32"),
    "static 32": _ours(mode="static", rank=32, factor_dtype="float32"),
    "static 32 bf16": _ours(mode="static", rank=32, factor_dtype="bfloat16"),
    "edgc": _ours(factor_dtype="float32"),
    "none": _ours(mode="none"),
    "auto": _ours(codec="auto", slow_start=True, factor_dtype="float32"),
    "static 32 no overlap": _ours(mode="static", rank=32, overlap=False, factor_dtype="float32"),
    # For --memory only: errors of 2 bytes.
    "static 32 bf16 errors": _ours(mode="static", rank=32, error_dtype="bfloat16", factor_dtype="float32"),
}
"""Every contender by name; ours send float32 factors, as their peers do, unless they say bf16."""
MEMORY_CONTENDERS = ("ddp", "static 32", "static 32 bf16 errors")
STEP_CONTENDERS = tuple(name for name in CONTENDERS if name != "static 32 bf16 errors")
