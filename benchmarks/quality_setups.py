"""What bench_quality compares: sizes of models, and setups by name, each with what makes it one comparison."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its training; tokens a step are workers * batch * block."""

    name: str
    width: int
    layers: int
    heads: int
    vocabulary: int
    steps: int
    learning_rate: float
    """Highest one; rises linearly over 7 percent of the steps (100 of 1400 in the Makefile's run), then a cosine."""
    block: int = 128
    batch: int = 4


SIZES = {
    # 4 * 12 * 128^2 + (2048 + 128) * 128: 1.07 M parameters, as in the Makefile's run
    "small": Size("small", 128, 4, 4, 2048, 400, 4e-3),
    # 7 * 12 * 320^2 + (4096 + 128) * 320: 9.95 M parameters; the rate of small times 128 / 320
    "large": Size("large", 320, 7, 5, 4096, 400, 1.6e-3),
}


@dataclass(frozen=True)
class Setup:
    """One way to train: options of EDGCConfig, or a hook of torch's.

    ``budget_of`` names the static setup whose compression ratio becomes the target. ``finetune`` starts from a model
    that was trained without compression on the other half of the text.
    """

    options: dict[str, Any] = field(default_factory=dict)
    budget_of: str | None = None
    torch_hook: str | None = None
    finetune: bool = False


PAPER: dict[str, Any] = {
    "error_model": "paper", "allocation": "global", "entropy_estimator": "gaussian", "warmup_fraction": 0.1,
    "lr_exponent": 0.0, "max_rank": 16,
}  # fmt: skip

SETUPS: dict[str, Setup] = {
    "dense": Setup({"mode": "none"}),
    **{f"static-{rank}": Setup({"mode": "static", "rank": rank}) for rank in (4, 8, 2, 16)},
    **{f"edgc-{rank}": Setup({}, f"static-{rank}") for rank in (4, 8, 2, 16)},
    **{f"edgc-{ratio}x": Setup({"target_compression_ratio": float(ratio)}) for ratio in (20, 10, 5, 3)},
    "paper": Setup(PAPER),
    "edgc-4-global": Setup({"allocation": "global"}, "static-4"),
    "edgc-4-flat": Setup({"lr_exponent": 0.0}, "static-4"),
    "edgc-4-no-entropy": Setup({"entropy_exponent": 0.0}, "static-4"),
    "edgc-4-no-feedback": Setup({"error_feedback": False, "allocation": "global"}, "static-4"),
    "edgc-16-warmup": Setup({"warmup_fraction": 0.1}, "static-16"),
    "edgc-4-bfloat16": Setup({"factor_dtype": "bfloat16"}, "static-4"),
    "static-8-bfloat16": Setup({"mode": "static", "rank": 8, "factor_dtype": "bfloat16"}),
    "edgc-free": Setup({"max_rank": 8}),
    "cast16": Setup({"mode": "none"}, torch_hook="fp16_compress_hook"),
    "finetune-dense": Setup({"mode": "none"}, finetune=True),
    "finetune-static-4": Setup({"mode": "static", "rank": 4}, finetune=True),
    "finetune-edgc-4": Setup({}, "static-4", finetune=True),
}
"""In the order in which they are run: what the headline needs comes first."""

ORDER = [
    "dense", "static-4", "edgc-4", "static-8", "edgc-8", "static-16", "edgc-16", "static-2", "edgc-2", "edgc-20x",
    "edgc-10x", "edgc-5x", "edgc-3x", "paper", "edgc-4-bfloat16", "static-8-bfloat16", "edgc-4-global", "edgc-4-flat",
    "edgc-4-no-entropy", "edgc-free", "edgc-16-warmup", "edgc-4-no-feedback", "cast16", "finetune-dense",
    "finetune-static-4", "finetune-edgc-4",
]  # fmt: skip
