"""One compressed step over all buckets: drives the codecs round by round, and changes state only at the end."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_edgc.codecs import Codec, Decoded, Rounds, Slot
from hf_edgc.exchange import Exchange, all_finite
from hf_edgc.feedback import ErrorFeedback


@dataclass(frozen=True)
class Item:
    """A gradient to compress: ``grad`` (rows, cols) is a view into its bucket and receives the result."""

    name: str
    grad: Tensor
    codec: Codec


@dataclass
class Reducer:
    """Averages gradients compressed; holds what compression remembers of each parameter, by its name."""

    exchange: Exchange
    feedback: ErrorFeedback
    seed: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)

    def reduce(
        self, items: Sequence[Item], dense: Sequence[Tensor], measured: Tensor, scale: float, step: int
    ) -> Tensor | None:
        """Average ``items`` compressed, ``dense`` and ``measured`` as they are, in as few collectives as rounds.

        The gradients of ``items`` and ``dense`` become the decoded means, in the (loss-scaled) units they came
        in. If anything exchanged is not finite, errors and slots stay as they were, the gradients are as before
        up to rounding, and None is returned, on every worker alike. A matrix whose gradient is zero on all
        workers (a parameter not used in this step) gets zeros and keeps its error.

        Args:
            items: matrices to compress; none if all their gradients are sparse.
            dense: gradients of any shape that are not compressed.
            measured: float32 numbers of any shape to average on the way; may hold infinities.
            scale: loss scale of the gradients.
            step: optimizer step, for the seeds.

        Returns:
            ``measured`` averaged over the workers, or None.
        """
        # A parameter without gradient on this worker still takes part: its error may be due, others may use it.
        used = torch.stack([item.grad.any() for item in items]).float() if items else measured.new_empty(0)
        matrices = [self.feedback.compensated(item.name, item.grad, scale) for item in items]
        encoders = [
            item.codec.encode(matrix, self.slots.get(item.name, {}), self._seed_of(item.name, step))
            for item, matrix in zip(items, matrices, strict=True)
        ]
        rounds = _Rounds(self.exchange, [item.codec.rounds for item in items], encoders)
        with torch.autocast(measured.device.type, enabled=False):  # a backward inside autocast would round the products
            exchanged = rounds.run([used, *dense], measured)
            if exchanged is None:
                for item, matrix in zip(items, matrices, strict=True):
                    self.feedback.withdraw(item.name, matrix, item.grad, scale)
                return None
            (used_anywhere, *dense_means), measured_mean = exchanged
            for grad, mean in zip(dense, dense_means, strict=True):
                grad.copy_(mean)
            for index, is_used in enumerate(used_anywhere.tolist()):
                if is_used:
                    self._commit(items[index], matrices[index], rounds.result(index), scale)
                else:
                    items[index].grad.zero_()
        return measured_mean

    def _commit(self, item: Item, matrix: Tensor, decoded: Decoded, scale: float) -> None:
        result, local = decoded.mean, decoded.local
        if scale != 1.0 or item.grad.dtype != torch.float32:
            # The gradient's type may round or overflow where the decoded mean does not; what it can't hold is kept.
            limits = torch.finfo(item.grad.dtype)
            result = (result * scale).clamp(limits.min, limits.max).to(item.grad.dtype)
            local = local - (decoded.mean - result.float() / scale)
        self.feedback.keep(item.name, matrix, local)  # before the gradient is written: it may be the matrix
        self.slots[item.name] = decoded.slot
        item.grad.copy_(result)

    def _seed_of(self, name: str, step: int) -> int:
        return zlib.crc32(f"{self.seed}/{name}/{step}".encode())


class _Rounds:
    """Encoders in lock step. One with fewer rounds starts later, so that all results are due after the last one."""

    def __init__(self, exchange: Exchange, counts: Sequence[int], encoders: Sequence[Rounds]) -> None:
        self._exchange = exchange
        self._total = max(counts, default=1)
        self._starts = [self._total - count for count in counts]
        self._encoders = encoders
        self._replies: list[list[Tensor]] = [[] for _ in encoders]

    def run(self, plain: Sequence[Tensor], measured: Tensor) -> tuple[list[Tensor], Tensor] | None:
        """All rounds; ``plain`` and ``measured`` ride in the first. None as soon as a mean is not finite."""
        messages = self._messages(0)
        sent = [*plain, *(tensor for message in messages for tensor in message)]
        *means, measured_mean = self._exchange.mean([*sent, measured])
        plain_means, means = means[: len(plain)], means[len(plain) :]
        if not all_finite([*plain_means, *means]):
            return None
        self._deliver(messages, means)
        for number in range(1, self._total):
            messages = self._messages(number)
            means = self._exchange.mean([tensor for message in messages for tensor in message])
            if not all_finite(means):
                return None
            self._deliver(messages, means)
        return plain_means, measured_mean

    def result(self, index: int) -> Decoded:
        """What encoder ``index`` decoded from its last reply."""
        try:
            self._encoders[index].send(self._replies[index])
        except StopIteration as stop:
            decoded: Decoded = stop.value
            return decoded
        raise RuntimeError("a codec yielded more often than its `rounds` says")

    def _messages(self, number: int) -> list[list[Tensor]]:
        messages = []
        for encoder, start, reply in zip(self._encoders, self._starts, self._replies, strict=True):
            messages.append([] if number < start else next(encoder) if number == start else encoder.send(reply))
        return messages

    def _deliver(self, messages: Sequence[Sequence[Tensor]], means: Sequence[Tensor]) -> None:
        remaining = iter(means)
        self._replies = [[next(remaining) for _ in message] for message in messages]
