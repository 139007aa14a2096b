"""Error feedback, once for every codec: what compression dropped is added to the next gradient."""

import torch
from torch import Tensor

from hf_edgc.codecs import Approximation, Whole

BLOCK_ELEMENTS = 2**17
"""Two float32 blocks of this size, of the gradient and of the error, are 1 MiB: they fit a core's second cache."""


class ErrorFeedback:
    """Errors of one worker by parameter name, in unscaled units (loss scale divided out).

    Source: EDGC (arXiv 2511.10333, DAC) as in PowerSGD, algorithm 2. The errors are never reset or decayed.

    Args:
        enabled: False lets all errors go.
        dtype: type in which errors are kept between steps; bfloat16 halves their memory.
        device: where they are kept between steps; None: beside the gradient.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        """See the class."""
        self.enabled = enabled
        self.dtype = dtype
        self.device = device
        self.errors: dict[str, Tensor] = {}

    def compensated(self, name: str, grad: Tensor, scale: float) -> Tensor:
        """Matrix to compress, ``grad / scale + error`` (rows, cols) in float32.

        A float32 ``grad`` is changed in place, so that no further memory of its size is needed.
        """
        matrix = grad.float()
        if scale != 1.0:
            matrix = matrix.div_(scale) if matrix is grad else matrix / scale
        error = self.errors.get(name)
        return matrix if error is None else matrix.add_(error.to(matrix.device))

    def withdraw(self, name: str, matrix: Tensor, grad: Tensor, scale: float) -> None:
        """Undo ``compensated`` in ``grad``, up to rounding, and keep the error as it was."""
        if matrix is grad:
            error = self.errors.get(name)
            if error is not None:
                grad.sub_(error.to(grad.device))
            if scale != 1.0:
                grad.mul_(scale)

    def keep(self, name: str, matrix: Tensor, local: Approximation, mean: Approximation | None = None) -> None:
        """Remember ``matrix - local`` (rows, cols), what was not sent; then overwrite ``matrix`` with ``mean``, if any.

        By blocks of rows that stay in the cache of a core, since all this takes its time from memory; so no other
        memory of the size of the matrix is needed, whatever the type of the error.
        """
        nothing_left = isinstance(local, Whole) and local.matrix is matrix
        if nothing_left:
            self.errors.pop(name, None)
        if nothing_left or not self.enabled:
            if mean is not None:
                mean.write(matrix)
            return
        if name not in self.errors:
            self.errors[name] = torch.empty(matrix.shape, dtype=self.dtype, device=self.device or matrix.device)
        error = self.errors[name]
        in_place = error.dtype == matrix.dtype and error.device == matrix.device
        count, cols = matrix.shape
        step = count if matrix.device.type != "cpu" else max(1, BLOCK_ELEMENTS // cols)
        for start in range(0, count, step):
            stop = min(count, start + step)
            block, left = matrix[start:stop], error[start:stop]
            sent = local.rows(start, stop).write(left if in_place else torch.empty_like(block))
            torch.sub(block, sent, out=sent)
            if not in_place:
                left.copy_(sent)
            if mean is not None:
                mean.rows(start, stop).write(block)
