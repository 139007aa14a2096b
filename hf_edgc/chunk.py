"""Gradients that share their collectives, driven through the rounds of their codecs in lock step."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_edgc.codecs import Codec, Decoded, Rounds
from hf_edgc.exchange import Exchange, all_finite


@dataclass(frozen=True)
class Item:
    """A gradient: ``grad``, a view into its bucket, receives the result.

    ``grad`` is (rows, cols) where there is a ``codec``; without one it is averaged as it is, in any shape.
    """

    name: str
    grad: Tensor
    codec: Codec | None


class Chunk:
    """The rounds of several gradients; each round is one exchange, under way until ``advance`` waits for it.

    A codec with fewer rounds starts later, so that all results are due after the last round.

    Attributes:
        plain_means: means of what was sent as it is, once the first round is over.
        measured_mean: mean of the measured numbers, if there were any.
        done: whether all rounds are over.
    """

    def __init__(
        self,
        exchange: Exchange,
        codecs: Sequence[Codec],
        encoders: Sequence[Rounds],
        plain: Sequence[Tensor],
        measured: Tensor | None = None,
    ) -> None:
        """Start the first round.

        Args:
            exchange: averages.
            codecs: of the gradients to compress.
            encoders: what each of them made of its gradient.
            plain: tensors of any shape to average as they are.
            measured: float32 numbers, shape (count,), that ride in the first round and may be infinite or NaN.
        """
        self._exchange = exchange
        self._total = max((codec.rounds for codec in codecs), default=1)
        self._starts = [self._total - codec.rounds for codec in codecs]
        self._encoders = encoders
        self._replies: list[list[Tensor]] = [[] for _ in encoders]
        self._round = 0
        self._plain = len(plain)
        self.plain_means: list[Tensor] = []
        self.measured_mean: Tensor | None = None
        self._measured = measured is not None
        self.done = False
        self._send(plain if measured is None else [*plain, measured])

    def advance(self) -> bool:
        """Wait for the round under way and start the next one. False, on every worker, if a mean is not finite."""
        means = self.wait()
        if self._round == 0 and self._measured:
            self.measured_mean = means.pop(self._plain)
        if not all_finite(means):
            return False
        if self._round == 0:
            self.plain_means, means = means[: self._plain], means[self._plain :]
        remaining = iter(means)
        self._replies = [[next(remaining) for _ in range(count)] for count in self._counts]
        self._round += 1
        self.done = self._round == self._total
        if not self.done:
            self._send([])
        return True

    def wait(self) -> list[Tensor]:
        """Means of the round under way."""
        return self._pending.wait()

    def result(self, index: int) -> Decoded:
        """What encoder ``index`` decoded from its last reply."""
        try:
            self._encoders[index].send(self._replies[index])
        except StopIteration as stop:
            decoded: Decoded = stop.value
            return decoded
        raise RuntimeError("a codec yielded more often than its `rounds` says")

    def _send(self, plain: Sequence[Tensor]) -> None:
        number = self._round
        messages: list[list[Tensor]] = []
        for encoder, start, reply in zip(self._encoders, self._starts, self._replies, strict=True):
            message = [] if number < start else next(encoder) if number == start else encoder.send(reply)
            messages.append(message)
        self._counts = [len(message) for message in messages]
        self._pending = self._exchange.start([*plain, *(tensor for message in messages for tensor in message)])
