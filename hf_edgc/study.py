"""Gradients of a real training on one process, and what the parts of EDGC say of them; used by the notebooks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_edgc.config import EDGCConfig
from hf_edgc.controller import Controller
from hf_edgc.entropy import measure
from hf_edgc.layout import build_layout
from hf_edgc.measured import Measured
from hf_edgc.rank_model import relative_error

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gradients:
    """Gradient of every parameter with two dimensions or more, seen as a matrix (rows, cols), at one step."""

    step: int
    matrices: dict[str, Tensor]


def record_gradients(
    model: torch.nn.Module, batches: Iterable[Tensor], optimizer: torch.optim.Optimizer, every: int = 1
) -> list[Gradients]:
    """Train a causal language model on ``batches``, each (sequences, tokens), and keep its gradients.

    Args:
        model: takes input_ids and labels and returns a loss; it is trained.
        batches: one for each step.
        optimizer: of the model.
        every: steps between two records; the first step is recorded.
    """
    records = []
    for step, batch in enumerate(batches):
        model(input_ids=batch, labels=batch).loss.backward()
        if step % every == 0:
            grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None and p.dim() >= 2]
            records.append(Gradients(step, {name: grad.detach().flatten(1).clone() for name, grad in grads}))
        optimizer.step()
        optimizer.zero_grad()
    return records


def entropies(records: Sequence[Gradients], name: str, estimator: str, scale: float = 1.0) -> Floats:
    """Entropy, nats, of ``scale`` times the gradient of ``name`` at each record (GDS); shape (records,).

    Raises:
        ValueError: the estimator is unknown.
    """
    tensors = [record.matrices[name] * scale for record in records]
    return measure(tensors, estimator, EDGCConfig().entropy_fraction).numpy().astype(np.float64)


def error_after_rank(gradient: Tensor) -> tuple[Floats, Floats]:
    """Share of the squared norm of ``gradient`` (rows, cols) that a rank r leaves, r = 0 .. min(rows, cols).

    Returns:
        What the best approximation of that rank leaves (Eckart-Young-Mirsky), and what the Marchenko-Pastur law says
        of a matrix with independent entries (CQM); each (min(rows, cols) + 1,).
    """
    squares = torch.linalg.svdvals(gradient.double()).square()
    kept = torch.cat([torch.zeros(1, dtype=torch.float64), squares.cumsum(0)]) / squares.sum()
    rows, cols = gradient.shape
    modelled = [relative_error(rank, rows, cols) for rank in range(len(kept))]
    return (1.0 - kept).clamp(min=0.0).numpy(), np.array(modelled)


def decide_ranks(records: Sequence[Gradients], config: EDGCConfig, learning_rates: Sequence[float]) -> list[int]:
    """Rank at each record if ``config`` had compressed that training (DAC), by entropy and learning rate alone.

    Args:
        records: one for each step.
        config: of mode edgc; ``allocation`` is taken as global, since no errors were measured.
        learning_rates: at each record.
    """
    whole = EDGCConfig.from_dict({**config.to_dict(), "allocation": "global", "entropy_every": 1})
    layout = build_layout(((name, tuple(grad.shape)) for name, grad in records[0].matrices.items()), whole)
    controller = Controller(whole, layout.matrices, len(records))
    ranks = []
    for record, rate in zip(records, learning_rates, strict=True):
        ranks.append(controller.rank)
        grads = [record.matrices[matrix.name] for matrix in layout.matrices]
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        found = measure(grads, whole.entropy_estimator, whole.entropy_fraction).tolist()
        controller.advance(Measured(found, norm, 0.0, rate))
    return ranks
