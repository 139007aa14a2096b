"""Perplexity through Trainer, the same for every batch size and number of workers.

Trainer's own ``eval_loss`` is another number: a mean over batches, which depends on their size and on the workers. With
a GPT-2 that Trainer alone is given it is also (L - 1) / L too low: L labels of a block are counted although L - 1 are
predicted (``load_model`` names the loss, which repairs that). The perplexity shown is ours.
"""

import numpy as np
import torch
from torch.nn import functional
from transformers import EvalPrediction

from hf_edgc.metrics import token_perplexity

IGNORED_LABEL = -100
"""Label that transformers' losses leave out."""

_LOGITS_AT_ONCE = 2**24
"""Entries that are cast to float32 at a time: 64 MB, or 333 positions of GPT-2's vocabulary of 50257."""


def token_nll(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Sum the losses of each sequence; Trainer's ``preprocess_logits_for_metrics``.

    The token at position i + 1 is predicted from position i. Sums over sequences are exact in float64, so they can be
    added in any order; the logits are cast to float32 piece by piece.

    Args:
        logits: shape (B, L, V), or a tuple that starts with them.
        labels: shape (B, L); -100 is not counted.

    Returns:
        Shape (B, 2): the sum of negative log-likelihoods in nats and the number of tokens, in float64 (float32 on a
        device without it).
    """
    scores = logits[0] if isinstance(logits, tuple) else logits  # (B, L, V)
    dtype = torch.float32 if scores.device.type == "mps" else torch.float64
    result = torch.zeros(len(scores), 2, dtype=dtype, device=scores.device)
    positions = max(1, _LOGITS_AT_ONCE // scores.shape[-1])
    for row, (own_scores, own_labels) in enumerate(zip(scores[:, :-1], labels[:, 1:], strict=True)):
        pieces = zip(own_scores.split(positions), own_labels.split(positions), strict=True)
        for piece, targets in pieces:  # (positions, V), (positions,)
            losses = functional.cross_entropy(piece.float(), targets, ignore_index=IGNORED_LABEL, reduction="none")
            result[row, 0] += losses.to(dtype).sum()
        result[row, 1] = (own_labels != IGNORED_LABEL).sum()
    return result


def compute_metrics(prediction: EvalPrediction) -> dict[str, float | int]:
    """Perplexity of all sequences; Trainer's ``compute_metrics``.

    Args:
        prediction: ``predictions`` of shape (N, 2), gathered from all workers, as ``token_nll`` returns them.

    Returns:
        ``perplexity``, ``nll`` in nats per token, and ``tokens``.
    """
    sums = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return token_perplexity(float(sums[0]), round(float(sums[1])))
