"""Error feedback, once for every codec: what compression dropped is added to the next gradient."""

import torch
from torch import Tensor


class ErrorFeedback:
    """Errors of one worker by parameter name, float32, in unscaled units (loss scale divided out).

    Source: EDGC (arXiv 2511.10333, DAC) as in PowerSGD, algorithm 2. The errors are never reset or decayed.
    """

    def __init__(self, enabled: bool = True) -> None:
        """Keep errors, or (``enabled=False``) let them go."""
        self.enabled = enabled
        self.errors: dict[str, Tensor] = {}

    def compensated(self, name: str, grad: Tensor, scale: float) -> Tensor:
        """Matrix to compress, ``grad / scale + error`` (rows, cols) in float32.

        A float32 ``grad`` is changed in place, so that no further memory of its size is needed.
        """
        matrix = grad.float()
        if scale != 1.0:
            matrix = matrix.div_(scale) if matrix is grad else matrix / scale
        error = self.errors.get(name)
        return matrix if error is None else matrix.add_(error)

    def withdraw(self, name: str, matrix: Tensor, grad: Tensor, scale: float) -> None:
        """Undo ``compensated`` in ``grad``, up to rounding, and keep the error as it was."""
        if matrix is grad:
            error = self.errors.get(name)
            if error is not None:
                grad.sub_(error)
            if scale != 1.0:
                grad.mul_(scale)

    def keep(self, name: str, matrix: Tensor, local: Tensor) -> None:
        """Remember ``matrix - local`` (rows, cols), what was not sent of ``matrix``."""
        if not self.enabled:
            return
        error = self.errors.get(name)
        if error is None:
            self.errors[name] = matrix - local
        else:
            torch.sub(matrix, local, out=error)
