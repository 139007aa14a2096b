"""EDGCState and edgc_hook: DDP's communication hook, named and used as torch names its own pairs."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, which the stubs lack

from hf_edgc import agreement
from hf_edgc.advice import Advisor
from hf_edgc.budget import Costs
from hf_edgc.chunk import Item
from hf_edgc.codecs import Codec, Dense, LowRank
from hf_edgc.collected import Collected
from hf_edgc.config import EDGCConfig
from hf_edgc.controller import Controller
from hf_edgc.exchange import Exchange
from hf_edgc.feedback import ErrorFeedback
from hf_edgc.layout import build_layout
from hf_edgc.logs import get_logger
from hf_edgc.measured import Measured
from hf_edgc.measurement import Measurement
from hf_edgc.parameters import Parameters
from hf_edgc.records import StepRecord, Totals
from hf_edgc.reduction import Reducer, Reduction, chunk_of

PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp="python_reducer" gives communication hooks no buckets. Use optimize_ddp=True '
    '(torch\'s default) or "no_optimization" with EDGC.'
)

FORMAT_VERSION = 2
"""Raised when workers of different releases could no longer train together."""


class EDGCState:
    """Everything EDGC knows about one DDP model on one worker.

    Use it as torch's own states: ``ddp.register_comm_hook(EDGCState(config, ddp.module.named_parameters()),
    edgc_hook)``. The futures of a compressed step's buckets are all set when the last one has come in: that lets a
    step with a non-finite gradient leave all state untouched.

    Attributes:
        layout: which parameters are compressed and why the others are not.
        controller: decides the ranks; its plan changes at step boundaries only.
        totals: sums over the run.
        parameter_bytes: of all parameters that are synchronized.
        dense_gradient_bytes: of the gradients among them that are never compressed.
        last: record of the last synchronization, or None.
        measured: last measured entropies and gradient norm, or None.
        on_record: called with each record on this worker.
        learning_rate: set by whoever knows the optimizer; None leaves the learning rate out of the decisions.
        loss_scale: called once a step; gradients are that many times too large at hook time.
        optimizer_steps: counted by whoever sees them, and compared over the workers in compressed steps.
    """

    def __init__(
        self,
        config: EDGCConfig,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        process_group: dist.ProcessGroup | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Agree with the other workers on a config and a model; every worker of the group must call this.

        Raises:
            RuntimeError: workers disagree about config, model or release.
            ValueError: an option does not fit the run's length.
        """
        self.parameters = parameters = Parameters(named_parameters)
        if parameters.complex_names and config.mode != "none":
            raise NotImplementedError(
                f"EDGC can't compress complex parameters ({', '.join(parameters.complex_names[:3])}): use mode none, "
                "or leave them out of DDP."
            )
        self.config = config
        self.layout = build_layout(parameters.shapes, config)
        self.exchange = Exchange(process_group)
        self.device = parameters.device
        self.parameter_bytes = sum(parameters.gradient_bytes.values())
        self.dense_gradient_bytes = sum(parameters.gradient_bytes[dense.name] for dense in self.layout.dense)
        feedback = ErrorFeedback(
            config.error_feedback,
            getattr(torch, config.error_dtype),
            torch.device("cpu") if config.error_device == "cpu" else None,
        )
        chunks = chunk_of(parameters.gradient_bytes.items(), config.overlap)
        self.reducer = Reducer(self.exchange, feedback, chunks, config.compression_seed)
        self.start_run(total_steps)
        self.on_record: Callable[[StepRecord], None] | None = None
        self.learning_rate: Callable[[], float | None] = lambda: None
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.optimizer_steps = 0
        self._matrix_index = {matrix.name: index for index, matrix in enumerate(self.layout.matrices)}
        self._collected = self._empty()
        self._advisor = Advisor(self.exchange, config, self.layout, parameters) if config.codec == "auto" else None
        self._agree(total_steps)

    @property
    def link_report(self) -> dict[str, Any] | None:
        """What ``codec=auto`` found and decided last (``Advisor.report``); None before, and with another codec."""
        return None if self._advisor is None else self._advisor.report

    def start_run(self, total_steps: int | None) -> None:
        """Begin a run of ``total_steps`` optimizer steps: new controller and totals, same errors and factors.

        Raises:
            ValueError: an option does not fit the run's length.
        """
        if total_steps is not None:
            self.config.check_run_length(total_steps)
        self._total_steps = total_steps
        costs = Costs.for_model(self.config, self.layout.matrices, self.parameter_bytes, self.dense_gradient_bytes)
        self.controller = Controller(self.config, self.layout.matrices, total_steps, costs)
        self.totals = Totals()
        self.last: StepRecord | None = None
        self.measured: Measured | None = None

    def forget(self) -> None:
        """Be as new: no errors, no factors, a run that begins."""
        self.reducer.feedback.errors = {}
        self.reducer.slots = {}
        self.start_run(self._total_steps)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one bucket of the step; its future holds the averaged gradients once all can be known."""
        start = time.perf_counter()
        if bucket.index() == 0:
            # Also drops what a backward that raised had left behind.
            self._collected = self._empty()
            self.config.check_run_length(self._total_steps)  # Trainer tells the length after the wrapping
            if self._advisor is not None:
                self._advisor.before_step(self.controller)
                self._collected.plan = self.controller.plan
            self._collected.start_s = start = time.perf_counter()
        step = self._collected
        step.dense_bytes += bucket.buffer().numel() * bucket.buffer().element_size()
        sparse = bucket.buffer().is_sparse
        measure, compress = self.controller.wants_entropies and not sparse, self._sends_factors and not sparse
        gradients = self.parameters.gradients(bucket) if measure or compress else []
        if measure:
            step.measurement.add(gradients, self.controller.step // self.config.entropy_every, exact_norms=not compress)
        future = self._collect(bucket, gradients) if compress else self.exchange.mean_later(bucket.buffer())
        if bucket.is_last():
            device = bucket.buffer().device
            reduction = step.reduction
            finite, measured = self._finish_dense(device) if reduction is None else self._finish_compressed(reduction)
            step.hook_s += time.perf_counter() - start
            self._advance(finite, measured, start - step.start_s)
        else:
            step.hook_s += time.perf_counter() - start
        return future

    @property
    def _sends_factors(self) -> bool:
        """Whether this step is a compressed one; errors left by the last one make a dense plan one, too."""
        return self._collected.plan.compress or (
            self.controller.phase == "compress" and bool(self.reducer.feedback.errors)
        )

    def _collect(self, bucket: GradBucket, gradients: Sequence[tuple[str, Tensor]]) -> torch.futures.Future[Tensor]:
        step = self._collected
        if step.reduction is None:
            step.reduction = Reduction(self.reducer, self.loss_scale(), self.controller.step)
        for name, grad in gradients:
            codec = self._codec(name)
            if codec is not None and grad.dim() != 2:
                matrix = self.layout.matrices[self._matrix_index[name]]
                grad = grad.view(matrix.rows, matrix.cols)
            step.reduction.put(Item(name, grad, codec))
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        step.futures.append((future, bucket.buffer()))
        return future

    def _codec(self, name: str) -> Codec | None:
        index = self._matrix_index.get(name)
        rank = 0 if index is None else self._collected.plan.ranks[index]
        if rank > 0:
            return LowRank(rank, getattr(torch, self.config.factor_dtype), self.exchange.workers)
        # What compression has left of a matrix that is now sent whole goes along.
        return Dense() if name in self.reducer.feedback.errors else None

    def _finish_compressed(self, reduction: Reduction) -> tuple[bool, Measured | None]:
        step = self._collected
        means = reduction.finish(self._numbers(step.futures[0][1].device))
        if means is None:
            # Not finite somewhere: what plain DDP would have given goes through, so that a scaler sees it.
            for _, buffer in step.futures:
                self.exchange.mean_later(buffer).wait()
        for future, buffer in step.futures:
            future.set_result(buffer)
        return means is not None, self._understood(means, reduction.scale)

    def __deepcopy__(self, memo: dict[int, object]) -> "EDGCState":
        """A copy of a DDP, as averaging its weights makes, synchronizes nothing: it may hold the same state."""
        return self

    def _finish_dense(self, device: torch.device) -> tuple[bool, Measured | None]:
        if not self.controller.wants_entropies:
            return True, None
        (means,) = self.exchange.mean([self._numbers(device)])
        measured = self._understood(means, self.loss_scale())
        return measured is not None, measured

    def _numbers(self, device: torch.device) -> Tensor:
        """What goes along with the gradients: are all workers at the same point, and what was measured."""
        measured = self._collected.measurement.vector(device, self.reducer.feedback.errors, self.learning_rate())
        return torch.cat([agreement.fingerprint(self._point(), device), measured])

    def _understood(self, means: Tensor | None, scale: float) -> Measured | None:
        """Read ``_numbers()`` averaged over the workers.

        Raises:
            RuntimeError: on every worker, if they are at different points.
        """
        if means is None:
            return None
        exchange = self.exchange
        agreement.require_same_point(means[: agreement.SIZE], exchange.workers, exchange.worker, self._point())
        return self._collected.measurement.read(means[agreement.SIZE :], scale)

    def _point(self) -> dict[str, object]:
        plan = self.controller.plan
        return {"synchronization": self.controller.step, "optimizer step": self.optimizer_steps, "ranks": plan.ranks}

    def _advance(self, finite: bool, measured: Measured | None, span_s: float) -> None:
        step, controller, plan = self._collected, self.controller, self.controller.plan
        self.last = StepRecord(
            step=controller.step,
            phase=controller.phase,
            compressed=step.reduction is not None and finite,
            finite=finite,
            rank=plan.rank,
            ranks=plan.ranks,
            entropy=measured.mean_entropy if measured is not None else None,
            grad_norm=measured.grad_norm if measured is not None else None,
            error_norm=measured.error_norm if measured is not None else None,
            predicted_error_norm=controller.predicted_error_norm if measured is not None else None,
            learning_rate=self.learning_rate(),
            sent_bytes=self.exchange.sent_bytes - step.sent_bytes,
            dense_bytes=step.dense_bytes,
            hook_s=step.hook_s,
            wait_s=self.exchange.wait_s - step.wait_s,
        )
        if self._advisor is not None:
            self._advisor.after_step(self.last, span_s)
        alarm = controller.advance(measured, self.last.sent_bytes)
        if alarm:
            self.reducer.feedback.errors = {}
            if self.exchange.worker == 0:
                get_logger().warning("step %d: %s", self.last.step, alarm)
        self.totals.add(self.last)
        self.measured = measured if measured is not None else self.measured
        self._collected = self._empty()
        if self.on_record is not None:
            try:
                self.on_record(self.last)
            except OSError as error:  # a full disk must not leave the other workers waiting
                get_logger().warning("records end at step %d: %s", self.last.step, error)
                self.on_record = None

    def _empty(self) -> Collected:
        measurement = Measurement(self.config, self._matrix_index)
        return Collected(measurement, self.controller.plan, self.exchange.sent_bytes, self.exchange.wait_s)

    def _agree(self, total_steps: int | None) -> None:
        """Compare release, config, model and run length over the workers: a difference must not become a hang."""
        parts = {
            "hf_edgc release": FORMAT_VERSION,
            "EDGCConfig": self.config.digest(),
            "model parameters": self.layout.digest() ^ self.parameters.digest(),
            "total_steps": -1 if total_steps is None else total_steps,
        }
        agreement.require_same(list(parts), self.exchange.gather_ints(list(parts.values()), self.device))


def edgc_hook(state: EDGCState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook of EDGC: ``ddp.register_comm_hook(state, edgc_hook)``.

    Args:
        state: what EDGC knows of this model; one for each DDP.
        bucket: flat gradients of some parameters, in the order DDP made them ready.

    Returns:
        Future of the bucket's averaged gradients, shape (elements,). In a compressed step the futures of all
        buckets are set when the last bucket comes in.
    """
    if not isinstance(bucket, GradBucket):
        raise NotImplementedError(PYTHON_REDUCER)
    return state.reduce(bucket)
