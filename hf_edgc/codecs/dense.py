"""The codec ``none``: the gradient itself is averaged."""

from dataclasses import dataclass

from torch import Tensor

from hf_edgc.codecs.base import Decoded, Rounds, Slot, Whole


@dataclass(frozen=True)
class Dense:
    """Sends the whole gradient; drops nothing."""

    @property
    def rounds(self) -> int:
        """The gradient itself."""
        return 1

    def wire_bytes(self, rows: int, cols: int, grad_itemsize: int) -> int:
        """Bytes of the full gradient."""
        return rows * cols * grad_itemsize

    def encode(self, matrix: Tensor, slot: Slot, seed: int) -> Rounds:
        """One round: ``matrix`` (rows, cols)."""
        (mean,) = yield [matrix]
        return Decoded(mean=Whole(mean.view(matrix.shape)), local=Whole(matrix), slot=slot)
