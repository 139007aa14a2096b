"""When compression is given up for a while."""

import math

from hf_edgc.config import EDGCConfig
from hf_edgc.measured import Measured


def alarm(config: EDGCConfig, measured: Measured, smallest_grad_norm: float, dense_steps: int) -> str:
    """What is wrong with a compressed step, for the log; an empty string if nothing is.

    Args:
        config: has the limits.
        measured: of that step.
        smallest_grad_norm: of all compressed steps so far, this one included.
        dense_steps: how long compression will be given up.
    """
    grad, error = measured.grad_norm, measured.error_norm
    until = f"dense for {dense_steps} steps, then compression is tried again"
    if config.watchdog_error_ratio and error > config.watchdog_error_ratio * grad > 0:
        return f"compression is too strong: the errors have {error / grad:.3g} gradient norms; {until}"
    growth = grad / smallest_grad_norm
    if config.watchdog_grad_growth and math.isfinite(growth) and growth > config.watchdog_grad_growth:
        return f"the run diverges: the gradient norm has grown {growth:.3g} times to {grad:.3g}; {until}"
    return ""
