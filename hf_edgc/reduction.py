"""One compressed step over all buckets: starts exchanges while backward goes on, changes state only at the end."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_edgc.chunk import Chunk, Item
from hf_edgc.codecs import Codec, Decoded, Rounds, Slot, Whole
from hf_edgc.exchange import Exchange
from hf_edgc.feedback import ErrorFeedback

CHUNK_BYTES = 2**25
"""Gradient bytes whose factors are exchanged together: as for DDP's buckets, fewer bytes overlap more of the exchange
with backward, more bytes pay less latency. 32 MiB of gradients have 1 to 4 MB of factors."""


def chunk_of(sizes: Iterable[tuple[str, int]], overlap: bool) -> dict[str, int]:
    """Number of each parameter's chunk, from names and gradient bytes in the order of the model.

    By the model and not by DDP's buckets, which differ between a run and its continuation: where a number lies in a
    buffer decides in which order gloo and NCCL add it up. Backward ends with the first parameters, so they get the
    last numbers. Without ``overlap`` there is one chunk.
    """
    chunks: dict[str, int] = {}
    number, filled = 0, 0
    for name, size in reversed(list(sizes)):
        if overlap and filled > 0 and filled + size > CHUNK_BYTES:
            number, filled = number + 1, 0
        chunks[name] = number
        filled += size
    return chunks


@dataclass
class Reducer:
    """What averaging compressed gradients needs and remembers: the errors, and the slots by parameter name.

    Attributes:
        chunks: number of each parameter's chunk.
        largest_step_bytes: most bytes handed to the collectives in one step.
    """

    exchange: Exchange
    feedback: ErrorFeedback
    chunks: Mapping[str, int]
    seed: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    largest_step_bytes: int = 0


class Reduction:
    """The transaction of one compressed step: ``put`` every gradient once, then ``finish``.

    A chunk's first exchange starts as soon as all its gradients are there. Errors and slots change in ``finish``, after
    the last exchange, and only if everything exchanged was finite.
    """

    def __init__(self, reducer: Reducer, scale: float, step: int) -> None:
        """Begin optimizer step ``step`` (for the seeds) with gradients of loss scale ``scale``."""
        self._reducer = reducer
        self.scale = scale
        self._step = step
        self._missing = Counter(reducer.chunks.values())
        self._items: defaultdict[int, list[Item]] = defaultdict(list)
        self._matrices: dict[str, Tensor] = {}
        self._chunks: dict[int, Chunk] = {}
        self._last = max(self._missing, default=0)
        self._bytes_before = reducer.exchange.sent_bytes

    def put(self, item: Item) -> None:
        """Take a gradient; it must stay in place until ``finish``, which overwrites it."""
        number = self._reducer.chunks[item.name]
        self._items[number].append(item)
        self._missing[number] -= 1
        if self._missing[number] == 0 and number != self._last:  # the measured numbers ride in the last one
            self._start(number)

    def finish(self, measured: Tensor) -> Tensor | None:
        """Average everything: all gradients become the decoded means, in the (loss-scaled) units they came in.

        If anything exchanged is not finite, errors and slots stay as they were, the gradients are as before up to
        rounding, and None is returned, on every worker alike. A matrix whose gradient is zero on all workers (a
        parameter not used in this step) gets zeros and keeps its error.

        Args:
            measured: float32 numbers, shape (count,), to average on the way; may hold infinities and NaN.

        Returns:
            ``measured`` averaged over the workers, or None.
        """
        # Besides the last one there is a chunk left if a sparse gradient, which goes another way, is part of it.
        for number in sorted({*self._items, self._last} - self._chunks.keys()):
            self._start(number, measured if number == self._last else None)
        chunks = self._chunks.values()
        finite = True
        with torch.autocast(measured.device.type, enabled=False):  # it would round the products
            while finite and not all(chunk.done for chunk in chunks):
                finite = all([chunk.advance() for chunk in chunks if not chunk.done])
            if not finite:
                self._withdraw()
                return None
            for number, chunk in self._chunks.items():
                self._commit_chunk(self._items[number], chunk)
        sent_bytes = self._reducer.exchange.sent_bytes - self._bytes_before
        self._reducer.largest_step_bytes = max(self._reducer.largest_step_bytes, sent_bytes)
        return self._chunks[self._last].measured_mean

    def _start(self, number: int, measured: Tensor | None = None) -> None:
        reducer = self._reducer
        # By name, whatever the order in which gradients came in: it differs between a run and its continuation.
        items = self._items[number] = sorted(self._items[number], key=lambda item: item.name)
        coded = [(item, item.codec) for item in items if item.codec is not None]
        plain = [item.grad for item in items if item.codec is None]
        if coded:
            # A parameter without gradient on this worker takes part: its error may be due, others may use it.
            plain.insert(0, torch.stack([_any(item.grad) for item, _ in coded]).float())
        with torch.autocast(items[0].grad.device.type if items else "cpu", enabled=False):
            encoders = (self._encoder(item, codec) for item, codec in coded)
            self._chunks[number] = Chunk(reducer.exchange, [codec for _, codec in coded], encoders, plain, measured)

    def _encoder(self, item: Item, codec: Codec) -> Rounds:
        reducer = self._reducer
        matrix = self._matrices[item.name] = reducer.feedback.compensated(item.name, item.grad, self.scale)
        seed = zlib.crc32(f"{reducer.seed}/{item.name}/{self._step}".encode())
        return codec.encode(matrix, reducer.slots.get(item.name, {}), seed)

    def _withdraw(self) -> None:
        for number, chunk in self._chunks.items():
            if not chunk.done:
                chunk.wait()
            for item in self._items[number]:
                if item.codec is not None:
                    self._reducer.feedback.withdraw(item.name, self._matrices[item.name], item.grad, self.scale)

    def _commit_chunk(self, items: Sequence[Item], chunk: Chunk) -> None:
        means = iter(chunk.plain_means)
        coded = [item for item in items if item.codec is not None]
        used = next(means).tolist() if coded else []
        for item in items:
            if item.codec is None:
                item.grad.copy_(next(means))
        for index, item in enumerate(coded):
            if used[index]:
                self._commit(item, self._matrices[item.name], chunk.result(index))
            else:
                item.grad.zero_()

    def _commit(self, item: Item, matrix: Tensor, decoded: Decoded) -> None:
        feedback, scale = self._reducer.feedback, self.scale
        self._reducer.slots[item.name] = decoded.slot
        if matrix is item.grad and scale == 1.0:
            feedback.keep(item.name, matrix, decoded.local, decoded.mean)
            return
        # The gradient's type may round or overflow where the decoded mean does not; what it can't hold is kept.
        limits = torch.finfo(item.grad.dtype)
        mean = decoded.mean.write(torch.empty_like(matrix))
        result = (mean * scale).clamp(limits.min, limits.max).to(item.grad.dtype)
        local = decoded.local.write(torch.empty_like(matrix)).sub_(mean).add_(result.float() / scale)
        feedback.keep(item.name, matrix, Whole(local))
        item.grad.copy_(result)


def _any(grad: Tensor) -> Tensor:
    """Whether an entry of ``grad`` (rows, cols) is not zero, shape ()."""
    if grad.device.type != "cpu":
        return grad.any()
    # On the CPU `any` of all costs more than the products do; nearly always the first row has the answer.
    return torch.tensor(bool(grad[:1].any()) or bool(grad.any()))
