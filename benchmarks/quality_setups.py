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
    """Highest one; rises linearly over 7 percent of the steps, then a cosine."""
    block: int = 128
    batch: int = 4


SIZES = {
    # 4 * 12 * 128^2 + (2048 + 128) * 128: 1.07 M parameters, as in the Makefile's run. From a rate of 2e-3 on runs are
    # chaotic: the seed of the first factors alone moved the perplexity of static-4 from 165 to 198.
    "small": Size("small", 128, 4, 4, 2048, 400, 1e-3),
    # 7 * 12 * 320^2 + (4096 + 128) * 320: 9.95 M parameters; the rate of small times sqrt(128 / 320)
    "large": Size("large", 320, 7, 5, 4096, 300, 6e-4),
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
    "lr_exponent": 0.0, "max_rank": 16, "factor_dtype": "float32",
}  # fmt: skip

STATIC: dict[str, Any] = {"mode": "static", "factor_dtype": "float32"}
"""As PowerSGD sends it."""

SETUPS: dict[str, Setup] = {
    "dense": Setup({"mode": "none"}),
    **{f"static-{rank}": Setup({**STATIC, "rank": rank}) for rank in (4, 8, 2, 16)},
    **{f"edgc-{rank}": Setup({}, f"static-{rank}") for rank in (4, 8, 2, 16)},
    **{f"edgc-{ratio}x": Setup({"target_compression_ratio": float(ratio)}) for ratio in (20, 10, 5)},
    **{f"static-{rank}-bfloat16": Setup({"mode": "static", "rank": rank}) for rank in (4, 8, 16, 32)},
    "edgc-4-float32": Setup({"factor_dtype": "float32"}, "static-4"),
    "edgc-4-global": Setup({"allocation": "global"}, "static-4"),
    "edgc-4-flat": Setup({"lr_exponent": 0.0}, "static-4"),
    "edgc-4-no-entropy": Setup({"entropy_exponent": 0.0}, "static-4"),
    "edgc-4-no-feedback": Setup({"error_feedback": False, "allocation": "global"}, "static-4"),
    "edgc-16-warmup": Setup({"warmup_fraction": 0.1}, "static-16"),
    "edgc-free": Setup({}),
    "paper": Setup(PAPER),
    "cast16": Setup({"mode": "none"}, torch_hook="fp16_compress_hook"),
    "finetune-dense": Setup({"mode": "none"}, finetune=True),
    "finetune-static-4": Setup({**STATIC, "rank": 4}, finetune=True),
    "finetune-edgc-4": Setup({}, "static-4", finetune=True),
}

ORDER = [
    "dense", "static-4", "edgc-4", "static-8", "edgc-8", "static-16", "edgc-16", "static-8-bfloat16", "paper",
    "edgc-4-float32", "edgc-4-global", "edgc-4-flat", "edgc-4-no-entropy", "static-2", "edgc-2", "edgc-10x",
    "static-16-bfloat16", "edgc-5x", "edgc-20x", "edgc-free", "edgc-16-warmup", "edgc-4-no-feedback", "cast16",
    "finetune-dense", "finetune-static-4", "finetune-edgc-4", "static-4-bfloat16", "static-32-bfloat16",
]  # fmt: skip
"""In which they are run: what the headline needs comes first."""
