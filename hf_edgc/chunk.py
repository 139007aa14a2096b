"""Gradients that share their collectives, driven through the rounds of their codecs in lock step."""

from collections.abc import Iterable, Sequence
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
        encoders: Iterable[Rounds],
        plain: Sequence[Tensor],
        measured: Tensor | None = None,
    ) -> None:
        """Start the first round.

        Args:
            exchange: averages.
            codecs: of the gradients to compress.
            encoders: what each of them makes of its gradient; taken one by one as their first messages are.
            plain: tensors of any shape to average as they are.
            measured: float32 numbers, shape (count,), that ride in the first round and may be infinite or NaN.
        """
        self._exchange = exchange
        self._total = max((codec.rounds for codec in codecs), default=1)
        self._starts = [self._total - codec.rounds for codec in codecs]
        self._encoders: list[Rounds] = []
        self._replies: list[list[Tensor]] = [[] for _ in codecs]
        self._round = 0
        self._plain = len(plain)
        self.plain_means: list[Tensor] = []
        self.measured_mean: Tensor | None = None
        self._measured = measured is not None
        self.done = False
        first = [self._first_message(encoder, start) for encoder, start in zip(encoders, self._starts, strict=True)]
        self._send([*plain, measured] if measured is not None else plain, first)

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
            self._send([], [self._next_message(index) for index in range(len(self._encoders))])
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

    def _first_message(self, encoder: Rounds, start: int) -> list[Tensor]:
        self._encoders.append(encoder)
        return next(encoder) if start == 0 else []

    def _next_message(self, index: int) -> list[Tensor]:
        if self._round < self._starts[index]:
            return []
        encoder = self._encoders[index]
        return next(encoder) if self._round == self._starts[index] else encoder.send(self._replies[index])

    def _send(self, plain: Sequence[Tensor], messages: Sequence[Sequence[Tensor]]) -> None:
        self._counts = [len(message) for message in messages]
        self._pending = self._exchange.start([*plain, *(tensor for message in messages for tensor in message)])
