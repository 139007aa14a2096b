"""The only place that issues collectives: packs, averages, counts bytes and time."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Averages tensors over the workers of one process group.

    Every call must be made from the thread that runs the DDP hook, in the same order on every worker:
    collectives issued from future callbacks pair up wrongly on gloo.

    Attributes:
        workers: how many there are.
        worker: which one this is, from 0.
        first_global_worker: the group's first worker, counted over all; None for the group of all workers.
        sent_bytes: bytes that this worker has handed to collectives.
        wait_s: seconds spent waiting for collectives.
        collectives: number of collectives issued.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Use ``process_group``, or the default group."""
        self.group = process_group if process_group is not None else dist.group.WORLD
        self.workers = dist.get_world_size(self.group)
        self.worker = dist.get_rank(self.group)
        members = dist.get_process_group_ranks(self.group)
        self.first_global_worker = None if len(members) == dist.get_world_size() else members[0]
        self.sent_bytes = 0
        self.wait_s = 0.0
        self.collectives = 0

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means of ``tensors`` over the workers, same shapes and dtypes; the inputs are not changed."""
        return self.start(tensors).wait()

    def start(self, tensors: Sequence[Tensor]) -> "Pending":
        """Start averaging ``tensors``, one collective for each dtype over one flat buffer; the inputs are copied."""
        pending = Pending(self, [tensor.shape for tensor in tensors])
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sizes = [tensors[i].numel() for i in members]
            flat = torch.empty(sum(sizes), dtype=dtype, device=tensors[members[0]].device)
            for i, part in zip(members, torch.split(flat, sizes), strict=True):
                torch.div(tensors[i], self.workers, out=part.view(tensors[i].shape))  # copies and divides in one pass
            pending.parts.append((self._all_reduce(flat), flat, members))
        return pending

    def mean_later(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Start averaging ``buffer`` in place; the future holds it. Same arithmetic as torch's allreduce_hook."""
        buffer.div_(self.workers)  # before the sum, which could overflow in half precision
        future: torch.futures.Future[Tensor] = self._all_reduce(buffer).get_future().then(lambda done: done.value()[0])
        return future

    def gather_ints(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """``values`` (each within int64) of every worker, in worker order."""
        own = torch.tensor(values, dtype=torch.int64, device=device)
        everyone = [torch.empty_like(own) for _ in range(self.workers)]
        self._count(own)
        dist.all_gather(everyone, own, group=self.group)
        return [row.tolist() for row in everyone]

    def _all_reduce(self, flat: Tensor) -> dist.Work:
        self._count(flat)
        work: dist.Work = dist.all_reduce(flat, group=self.group, async_op=True)
        return work

    def _count(self, tensor: Tensor) -> None:
        self.collectives += 1
        self.sent_bytes += tensor.numel() * tensor.element_size()


@dataclass
class Pending:
    """Means that are under way."""

    exchange: Exchange
    shapes: Sequence[torch.Size]
    parts: list[tuple[dist.Work, Tensor, list[int]]] = field(default_factory=list)
    """The collectives: work, flat buffer, and which of the tensors it holds."""

    def wait(self) -> list[Tensor]:
        """The means, in the order and the shapes of what was sent; views of the flat buffers.

        Raises:
            RuntimeError: another worker has stopped or hangs.
        """
        exchange, start = self.exchange, time.perf_counter()
        results: list[Tensor | None] = [None] * len(self.shapes)
        for work, flat, members in self.parts:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"EDGC could not exchange gradients on worker {exchange.worker} of {exchange.workers}: another "
                    "worker has stopped, hangs, or is doing something else. Its own message says why; resume from "
                    f"the last checkpoint. The backend says: {error}"
                ) from error
            parts = torch.split(flat, [self.shapes[i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                results[i] = part.view(self.shapes[i])
        exchange.wait_s += time.perf_counter() - start
        return [result for result in results if result is not None]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no entry is infinite or NaN; one host sync. Equal on all workers for averaged tensors."""
    # The sum of absolute values of finite entries may overflow, the extremes can't.
    extremes = [torch.stack(tensor.aminmax()).float() for tensor in tensors if tensor.numel()]
    return all(math.isfinite(value) for value in torch.cat(extremes).tolist()) if extremes else True
