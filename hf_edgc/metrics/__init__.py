"""Quality of a language model, from sums that can be added up over batches and workers."""

import math
from pathlib import Path

PERPLEXITY_PATH = Path(__file__).parent / "perplexity"
"""Folder of the `evaluate` metric: ``evaluate.load(str(PERPLEXITY_PATH))`` works without a network."""


def token_perplexity(nll_sum: float, tokens: int) -> dict[str, float | int]:
    """Perplexity of ``tokens`` predicted tokens.

    Args:
        nll_sum: sum of their negative log-likelihoods, in nats.
        tokens: how many there are.

    Returns:
        ``perplexity``, exp(nll), ``inf`` where that overflows; ``nll``, the mean in nats per token; ``tokens``.

    Raises:
        ValueError: there is no token.
    """
    if tokens <= 0:
        raise ValueError(f"Perplexity needs at least one predicted token, but tokens={tokens}.")
    nll = nll_sum / tokens
    try:
        perplexity = math.exp(nll)
    except OverflowError:
        perplexity = math.inf
    return {"perplexity": perplexity, "nll": nll, "tokens": tokens}
