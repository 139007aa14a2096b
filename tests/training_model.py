"""A training in numbers: errors that follow the recursion of error feedback, learning rates that follow a schedule."""

import math
import random

from hf_edgc.allocation import elements
from hf_edgc.budget import Costs
from hf_edgc.layout import Matrix
from hf_edgc.measured import Measured

GPT2 = [
    Matrix(f"{layer}.{name}", rows, cols, rows * cols // (2 * (rows + cols)))
    for layer in range(4)
    for name, rows, cols in (
        ("attn", 128, 384), ("proj", 128, 128), ("fc", 128, 512), ("out", 512, 128),
    )
] + [Matrix("wte", 2048, 128, 60)]  # fmt: skip
DENSE_REST = 4 * 8000
COSTS = Costs(4 * sum(m.dense_elements for m in GPT2) + DENSE_REST, DENSE_REST + 260)

SCHEDULES = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "cosine to a tenth": lambda x: 0.1 + 0.45 * (1 + math.cos(math.pi * x)),
    "warm-up, cosine": lambda x: x / 0.1 if x < 0.1 else 0.5 * (1 + math.cos(math.pi * (x - 0.1) / 0.9)),
    "warm-up, linear": lambda x: x / 0.06 if x < 0.06 else (1 - x) / 0.94,
    "inverse sqrt": lambda x: x / 0.05 if x < 0.05 else math.sqrt(0.05 / x),
    "steps": lambda x: 1.0 if x < 0.5 else 0.1 if x < 0.75 else 0.01,
    "one cycle": lambda x: x / 0.3 if x < 0.3 else 0.5 * (1 + math.cos(math.pi * (x - 0.3) / 0.7)),
    "cosine restarts": lambda x: 0.5 * (1 + math.cos(math.pi * ((3 * x) % 1.0))),
    "exponential": lambda x: math.exp(-5 * x),
    "rising": lambda x: 0.1 + x,
}
"""Learning rate over its peak at each share of the run."""


class Training:
    """One worker's norms, by matrix; ``decay[i]`` is how fast the share that a step leaves falls with the rank."""

    def __init__(self, matrices=GPT2, seed=0, noise=0.1):
        self.matrices, self.random, self.noise = matrices, random.Random(seed), noise
        self.scales = [math.exp(self.random.gauss(0, 1)) for _ in matrices]
        self.decays = [0.08 * math.exp(self.random.gauss(0, 0.7)) for _ in matrices]
        self.squares = [0.0] * len(matrices)

    def step(self, ranks):
        """Gradient and error norms before the step, which is then done."""
        grads = [scale * math.exp(self.random.gauss(0, self.noise)) for scale in self.scales]
        errors = [math.sqrt(square) for square in self.squares]
        for i, rank in enumerate(ranks):
            left = math.exp(-self.decays[i] * rank**0.8)
            self.squares[i] = left * (grads[i] ** 2 + self.squares[i]) if rank else self.squares[i]
        return grads, errors


def drive(controller, training, schedule, first, last, total):
    """Run steps [first, last) of ``total``; returns the sent bytes, (predicted, measured) norms and elements a step."""
    sent, pairs, sizes = 0, [], []
    for step in range(first, last):
        plan, wanted = controller.plan, controller.wants_entropies
        assert all(0 <= rank <= matrix.max_rank for rank, matrix in zip(plan.ranks, training.matrices, strict=True))
        grads, errors = training.step(plan.ranks)
        norm = math.hypot(*errors)
        if wanted and controller.predicted_error_norm is not None:
            pairs.append((controller.predicted_error_norm, norm))
        count = elements(training.matrices, plan.ranks)
        sizes.append(count)
        bytes_now = COSTS.compressed(count) + 70 * wanted if plan.compress else COSTS.dense_bytes
        sent += bytes_now
        rate = 3e-4 * schedule(step / total)
        measured = Measured([-3.0] * len(grads), math.hypot(*grads), norm, rate, grads, errors) if wanted else None
        assert controller.advance(measured, round(bytes_now)) == ""
    return sent, pairs, sizes
