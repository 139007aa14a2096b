"""What a step's synchronization costs, dense or compressed, and from where on compression pays. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_edgc.allocation import capped
from hf_edgc.layout import Matrix


@dataclass(frozen=True)
class Link:
    """What an all-reduce takes between the workers.

    ``bytes_per_s`` counts the bytes that one worker hands over, whatever the algorithm sends of them;
    ``burst_bytes`` pass at once after a pause, as traffic shapers let them.
    """

    latency_s: float
    bytes_per_s: float
    burst_bytes: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Time to all-reduce ``size_bytes`` at once, after a pause."""
        return self.latency_s + max(0.0, size_bytes - self.burst_bytes) / self.bytes_per_s


@dataclass(frozen=True)
class CodecCost:
    """Time to compress, decompress and keep the error of one matrix, linear in its rank."""

    fixed_s: float
    per_rank_s: float

    def seconds(self, rank: int) -> float:
        """Time at ``rank``; rank 0, dense, takes none."""
        return self.fixed_s + self.per_rank_s * rank if rank > 0 else 0.0


@dataclass(frozen=True)
class CostModel:
    """Predicts what a step waits for its synchronization.

    Differs from the max_rank search of arXiv 2511.10333 (DAC) in that the part of an exchange that backward hides
    is taken off, dense or compressed, and in that each matrix is looked at on its own.

    Attributes:
        link: of the workers.
        matrices: that can be compressed.
        dense_bytes: of each matrix' gradient.
        rest_bytes: of all gradients that are never compressed.
        costs: of each matrix.
        factor_bytes: of one entry of a factor.
        hidden_s: how long backward goes on after its first gradients are ready.
        slowdown: how many times longer the codec takes in a training step than ``costs`` say.
    """

    link: Link
    matrices: Sequence[Matrix]
    dense_bytes: Sequence[int]
    rest_bytes: int
    costs: Sequence[CodecCost]
    factor_bytes: int
    hidden_s: float = 0.0
    slowdown: float = 1.0

    def in_training(self, slowdown: float, hidden_s: float) -> "CostModel":
        """The same, with what real steps have shown."""
        return replace(self, slowdown=slowdown, hidden_s=hidden_s)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return self.rest_bytes + sum(self.dense_bytes)

    def dense_s(self) -> float:
        """Time that a dense step waits: what of one all-reduce of everything backward does not hide."""
        return max(self.link.latency_s, self.link.seconds(self.gradient_bytes) - self.hidden_s)

    def compressed_s(self, ranks: Sequence[int]) -> float:
        """Time that a step waits at ``ranks`` (0: dense): codec and both rounds, less what backward hides of the first.

        With nothing compressed it is that of a dense step.
        """
        if not any(ranks):
            return self.dense_s()
        first_s, second_s = self.rounds_s(ranks)
        return self.codec_s(ranks) + max(self.link.latency_s, first_s - self.hidden_s) + second_s

    def codec_s(self, ranks: Sequence[int]) -> float:
        """Time that a step computes at ``ranks`` beyond a dense one."""
        return self.slowdown * sum(cost.seconds(rank) for cost, rank in zip(self.costs, ranks, strict=True))

    def rounds_s(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Time of the two rounds at ``ranks``, by themselves; a burst that the link lets pass is there once a step."""
        first, second = self.exchanged_bytes(ranks)
        first_s = self.link.seconds(first)
        return first_s, max(self.link.latency_s, self.link.seconds(first + second) - first_s)

    def exchanged_bytes(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Bytes of the first round (P, and all that is dense) and of the second (Q)."""
        pairs = list(zip(self.matrices, ranks, strict=True))
        dense = sum(size for size, rank in zip(self.dense_bytes, ranks, strict=True) if rank == 0)
        first = self.rest_bytes + dense + sum(matrix.rows * rank * self.factor_bytes for matrix, rank in pairs)
        return first, sum(matrix.cols * rank * self.factor_bytes for matrix, rank in pairs)

    def paying(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """``ranks``, with 0 for each matrix that is cheaper dense; all 0 if compression costs more than it saves."""
        chosen = []
        for matrix, size, cost, rank in zip(self.matrices, self.dense_bytes, self.costs, ranks, strict=True):
            saved_bytes = size - rank * matrix.elements_per_rank * self.factor_bytes
            pays = saved_bytes / self.link.bytes_per_s > self.slowdown * cost.seconds(rank)
            chosen.append(rank if pays else 0)
        return tuple(chosen) if self.compressed_s(chosen) < self.dense_s() else (0,) * len(chosen)

    def at_rank(self, rank: int) -> tuple[int, ...]:
        """``rank`` for each matrix, or as much of it as the matrix can have."""
        return tuple(capped(self.matrices, rank))

    def break_even_rank(self) -> int:
        """Largest rank at which compressing every matrix takes no longer than dense (DAC's max_rank); 0: none."""
        low, high = 0, max((matrix.max_rank for matrix in self.matrices), default=0)
        while low < high:  # the time rises with the rank
            middle = (low + high + 1) // 2
            if self.compressed_s(self.at_rank(middle)) <= self.dense_s():
                low = middle
            else:
                high = middle - 1
        return low

    def break_even_bytes_per_s(self, ranks: Sequence[int]) -> float:
        """Bandwidth below which ``ranks`` (not all 0) take less time than dense, by bisection; 0 if nowhere."""
        low, high = 1e3, 1e12
        for _ in range(100):
            middle = (low * high) ** 0.5
            other = replace(self, link=replace(self.link, bytes_per_s=middle))
            low, high = (middle, high) if other.compressed_s(ranks) < other.dense_s() else (low, middle)
        return low if low > 1.001e3 else 0.0
