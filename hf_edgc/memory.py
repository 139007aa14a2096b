"""How much memory EDGC takes on a worker: what to expect before training, and what it really holds."""

from dataclasses import dataclass

import torch

from hf_edgc.agreement import SIZE
from hf_edgc.allocation import capped
from hf_edgc.codecs import LowRank
from hf_edgc.hook import EDGCState


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one worker.

    ``errors`` and ``factors`` are kept between steps; ``buffers`` is all that one step hands to the collectives, most
    of which is held at once; ``parameters`` is there for comparison.
    """

    parameters: int
    errors: int
    factors: int
    buffers: int

    def describe(self, config_note: str = "") -> str:
        """One line with all four in megabytes."""
        parts = {
            "parameters": self.parameters,
            f"errors{config_note}": self.errors,
            "factors": self.factors,
            "exchange buffers": self.buffers,
        }
        return "memory per worker: " + ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in parts.items())


def expected_memory(state: EDGCState) -> MemoryUse:
    """Largest use that the options allow, all matrices at their highest rank."""
    config, layout = state.config, state.layout
    dtype = getattr(torch, config.factor_dtype)
    top = config.start_rank if config.mode == "static" else config.highest_rank
    ranked = list(zip(layout.matrices, capped(layout.matrices, top), strict=True))
    factor_bytes = sum(LowRank(rank, dtype).wire_bytes(matrix.rows, matrix.cols, 4) for matrix, rank in ranked)
    # The fingerprint, a flag for each matrix, in mode edgc its entropy and two norms, and three more numbers.
    numbers = SIZE + (4 * len(ranked) + 3 if config.mode == "edgc" else len(ranked))
    error_bytes = getattr(torch, config.error_dtype).itemsize if config.error_feedback else 0
    return MemoryUse(
        parameters=state.parameter_bytes,
        errors=error_bytes * sum(matrix.dense_elements for matrix, _ in ranked),
        factors=4 * sum(matrix.cols * rank for matrix, rank in ranked),
        buffers=state.dense_gradient_bytes + 4 * numbers + factor_bytes if ranked else 0,
    )


def measured_memory(state: EDGCState) -> MemoryUse:
    """What is held now, and the largest exchange so far."""
    tensors = [tensor for slot in state.reducer.slots.values() for tensor in slot.values()]
    return MemoryUse(
        parameters=state.parameter_bytes,
        errors=sum(error.numel() * error.element_size() for error in state.reducer.feedback.errors.values()),
        factors=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        buffers=state.reducer.largest_step_bytes,
    )
