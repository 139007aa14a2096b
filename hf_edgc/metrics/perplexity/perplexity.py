"""Token-weighted perplexity as an `evaluate` metric."""

import datasets
import evaluate
import numpy as np
import numpy.typing as npt

from hf_edgc.metrics import token_perplexity

_DESCRIPTION = """\
Perplexity of a language model, exp(sum of token losses / number of tokens). Every token counts the same, however the
text was cut into sequences, batches or shares of workers.
"""

_INPUTS = """\
Args:
    nll: for each sequence or batch the sum of its negative log-likelihoods, in nats.
    tokens: for each the number of predicted tokens.
Returns:
    perplexity: exp(nll), inf where that overflows.
    nll: mean negative log-likelihood, in nats per token.
    tokens: number of predicted tokens.
"""


class Perplexity(evaluate.Metric):  # type: ignore[misc]  # untyped base
    """Add up sums of losses and counts of tokens; see the inputs description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"nll": datasets.Value("float64"), "tokens": datasets.Value("int64")}),
        )

    def _compute(self, nll: npt.ArrayLike, tokens: npt.ArrayLike) -> dict[str, float | int]:
        return token_perplexity(
            float(np.sum(np.asarray(nll, dtype=np.float64))), int(np.sum(np.asarray(tokens, dtype=np.int64)))
        )
