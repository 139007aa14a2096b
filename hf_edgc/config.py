"""EDGCConfig: every option of the compression, once, for the API, the command line and the docs."""

import math
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_type_hints

from hf_edgc.options import check_type, invalid, option
from hf_edgc.ranges import check_ranges

DEFAULT_MAX_RANK = 32
"""Rank at which GPT-2 small's 768 x 3072 matrices keep 32 (768 + 3072) / (768 * 3072) = 5.2 % of their entries."""


@dataclass(frozen=True)
class EDGCConfig:
    """Options of entropy-driven dynamic gradient compression (arXiv 2511.10333).

    Each field's help text is its documentation; ``HfArgumentParser`` turns the fields into
    command-line options. Values are checked on construction.

    Raises:
        ValueError: a value is out of range; names the option, the value and what is allowed.
    """

    _argument_group_name: ClassVar[str] = "compression"
    """Heading of these options in HfArgumentParser's help."""

    mode: Literal["edgc", "static", "none"] = option(
        "edgc",
        "edgc: ranks follow the gradient entropy; static: PowerSGD at a fixed rank; none: plain DDP all-reduce.",
    )
    codec: Literal["low_rank", "auto"] = option(
        "low_rank",
        "low_rank: compress wherever that saves bytes; auto: measure the link and the compression itself, at first "
        "and now and then, and compress only the matrices for which that saves time; such runs differ from each other.",
    )
    rank: int | None = option(
        None,
        "Matrix rank at the first compressed step, and throughout in mode static. Default: max_rank; with "
        "target_compression_ratio the budget decides.",
    )
    max_rank: int | None = option(
        None,
        "Largest rank that mode edgc may choose: of all matrices, or with allocation per_tensor of their mean (one "
        "matrix may then get more, up to where min_compression_ratio is reached). Default: "
        f"{DEFAULT_MAX_RANK}; with target_compression_ratio no limit but min_compression_ratio.",
    )
    min_rank: int | None = option(
        None,
        "Smallest rank that mode edgc may choose: of all matrices, or with allocation per_tensor of their mean (one "
        "matrix may then get 1). Default: max_rank / 4 (paper, DAC), or rank if smaller; 1 with "
        "target_compression_ratio.",
    )
    allocation: Literal["per_tensor", "global"] = option(
        "per_tensor",
        "per_tensor: the bytes of a step go where entries of the gradient wait longest, by the measured gradients "
        "and errors; global: one rank for all (paper). Default from benchmarks/RESULTS.md, edgc-4 over edgc-4-global.",
    )
    target_compression_ratio: float | None = option(
        None,
        "Budget mode bytes: dense bytes / sent bytes of the whole run, with tensors that are never compressed and a "
        "dense warm-up counted. The run ends within 2 percent of it; more is sent while the learning rate is high "
        "(lr_exponent). Needs a known run length. Default: none, budget mode free: the error model alone decides.",
    )
    rank_step: int = option(
        4,
        "Largest change of the rank of a matrix at the end of one window (4 in the authors' public code); with "
        "target_compression_ratio larger where the budget needs it.",
    )
    window_steps: int | None = option(
        None,
        "Optimizer steps between two rank decisions. Default: 5 percent of the run, at most 1000 (paper: 1000).",
    )
    warmup_fraction: float = option(
        0.0,
        "Share of the run that is at least sent dense before compression starts (paper: 0.1). The warm-up then goes "
        "on until the modelled error at min_rank falls below the first one at max_rank; with "
        "target_compression_ratio it is exactly this share. Default from benchmarks/RESULTS.md, edgc-16 over "
        "edgc-16-warmup.",
    )
    warmup_max_fraction: float | None = option(
        None,
        "Share of the run at which a dense warm-up ends whatever the error test says. Default: 0.3, or warmup_fraction "
        "if that is more.",
    )
    error_model: Literal["ef", "paper"] = option(
        "ef",
        "From entropy to rank. ef: hold the error-feedback residual (logit rule, well conditioned); paper: the CQM "
        "inversion r = g^-1(exp(H0 - H1) g(r0)).",
    )
    lr_exponent: float = option(
        0.25,
        "Error model ef only: let the allowed residual grow as (lr / peak lr)^-lr_exponent, so that bytes are spent "
        "while the learning rate is high; 0 turns it off. Ranks then fall about as (lr / peak lr)^(2 lr_exponent). "
        "Default from benchmarks/RESULTS.md, edgc-4 over edgc-4-flat.",
    )
    entropy_exponent: float = option(
        1.0,
        "Error model ef only: weight of the change of the entropy; 0: the learning rate alone, as good in "
        "benchmarks/RESULTS.md (edgc-4-no-entropy). Default: as the error model has it.",
    )
    entropy_estimator: Literal["histogram", "gaussian", "histogram_minmax"] = option(
        "histogram",
        "histogram: differential entropy over the 0.5 to 99.5 percent quantiles; gaussian: 0.5 ln(2 pi e var); "
        "histogram_minmax: the authors' 1000-bin min-max histogram, blind to scale, kept for reproduction.",
    )
    entropy_every: int = option(10, "Measure the entropy at every n-th optimizer step (1 / ISR; paper: ISR 0.1).")
    entropy_fraction: float = option(
        0.25, "Share of a gradient's entries that a measurement reads, by strides (GSR; paper: 0.25)."
    )
    min_compression_ratio: float = option(
        2.0,
        "Compress a tensor only at ranks where dense bytes / sent bytes is at least this; other tensors are sent "
        "dense (torch's PowerSGD hook: 2).",
    )
    factor_dtype: Literal["float32", "bfloat16", "float16"] = option(
        "bfloat16",
        "Data type in which the low-rank factors are sent; error feedback makes up for what rounding drops. The sums "
        "over the workers are rounded too: float32 where hundreds of workers average. Default from "
        "benchmarks/RESULTS.md, edgc-4 over edgc-4-float32.",
    )
    error_feedback: bool = option(
        True,
        "Add what compression dropped to the next gradient. Default from benchmarks/RESULTS.md, edgc-4 over "
        "edgc-4-no-feedback.",
    )
    watchdog_error_ratio: float = option(
        100.0,
        "Go dense for a window, with the errors dropped, when the norm of the errors exceeds this many gradient norms, "
        "so that compression is too strong. Rank 1 of a 4096 x 4096 matrix has some 32 in steady state. 0: off.",
    )
    watchdog_grad_growth: float = option(
        100.0,
        "Go dense for a window, with the errors dropped, when the gradient norm exceeds the smallest one measured in "
        "compressed steps so many times: the run diverges. 0: off.",
    )
    error_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Data type in which error feedback is kept between steps; bfloat16 halves its memory."
    )
    error_device: Literal["gradient", "cpu"] = option(
        "gradient",
        "Where error feedback is kept between steps: beside the gradient, or in host memory, which costs two copies "
        "a step.",
    )
    overlap: bool = option(
        True,
        "Exchange factors while backward goes on, in chunks of 32 MiB of gradients, not all together at its end.",
    )
    include: list[str] | None = option(  # noqa: RUF009 (ruff takes the list in the type for a mutable default)
        None, "Compress only parameters whose name matches one of these patterns (shell style, as '*.mlp.*')."
    )
    exclude: list[str] | None = option(  # noqa: RUF009
        None, "Send parameters dense whose name matches one of these patterns (shell style, as '*wpe*')."
    )
    require_state: bool = option(
        False, "Stop if a checkpoint to resume from has no usable EDGC state, instead of going on with a fresh one."
    )
    compression_seed: int = option(
        0, "Seed of the first random factors; with the parameter name and the step it fixes every draw."
    )

    def __post_init__(self) -> None:
        """Check every value against its type and range."""
        for spec in fields(self):
            check_type(spec.name, getattr(self, spec.name), get_type_hints(EDGCConfig)[spec.name])
        check_ranges(self.to_dict())
        if self.min_rank is not None and self.min_rank > self.highest_rank:
            raise invalid("min_rank", self.min_rank, f"an integer from 1 to max_rank ({self.highest_rank})")
        if self.mode == "edgc" and not self.lowest_rank <= self.start_rank <= self.highest_rank:
            allowed = f"an integer from min_rank ({self.lowest_rank}) to max_rank ({self.highest_rank})"
            raise invalid("rank", self.rank, allowed)
        if self.mode == "edgc" and self.allocation == "per_tensor" and not self.error_feedback:
            allowed = "global with error_feedback=False: shares of the error are measured on error feedback"
            raise invalid("allocation", self.allocation, allowed)
        if self.target_compression_ratio is not None:
            self._check_budget_mode()
        if self.warmup_max_fraction is not None and self.warmup_max_fraction < self.warmup_fraction:
            allowed = f"a number from warmup_fraction ({self.warmup_fraction}) to below 1"
            raise invalid("warmup_max_fraction", self.warmup_max_fraction, allowed)

    def _check_budget_mode(self) -> None:
        """Refuse what a byte budget replaces."""
        without = "without target_compression_ratio, which"
        for name, value, default, why in (
            ("mode", self.mode, "edgc", "is for mode edgc"),
            ("error_model", self.error_model, "ef", "replaces the paper's rule by its budget"),
            ("rank", self.rank, None, "decides the first rank too"),
            ("warmup_max_fraction", self.warmup_max_fraction, None, "makes the warm-up as long as warmup_fraction"),
        ):
            if value != default:
                raise invalid(name, value, f"it {without} {why}")

    @property
    def highest_rank(self) -> int:
        """Largest matrix rank, with allocation per_tensor largest mean rank, that any step can use."""
        if self.max_rank is not None:
            return self.max_rank
        return DEFAULT_MAX_RANK if self.target_compression_ratio is None else sys.maxsize

    @property
    def start_rank(self) -> int:
        """Matrix rank of the first compressed step, or its upper limit if a budget decides."""
        return self.rank if self.rank is not None else self.highest_rank

    @property
    def lowest_rank(self) -> int:
        """Smallest matrix rank, with allocation per_tensor smallest mean rank, that any step can use."""
        if self.mode == "static":
            return self.start_rank
        if self.min_rank is not None:
            return self.min_rank
        return 1 if self.target_compression_ratio is not None else min(self.start_rank, max(1, self.highest_rank // 4))

    def rank_range(self, found_max_rank: int | None = None) -> tuple[int, int]:
        """Smallest and largest rank that mode edgc may choose, given the max_rank that codec auto has found."""
        if found_max_rank is None:
            return self.lowest_rank, self.highest_rank
        lowest = self.min_rank if self.min_rank is not None else max(1, found_max_rank // 4)
        return min(lowest, found_max_rank), found_max_rank

    def window(self, total_steps: int | None) -> int:
        """Optimizer steps in a window, for a run of ``total_steps`` (None: of unknown length)."""
        if self.window_steps is not None:
            return self.window_steps
        return 1000 if total_steps is None else min(1000, max(1, total_steps // 20))

    def warmup_steps(self, total_steps: int | None) -> tuple[int, int]:
        """Fewest and most dense steps before compression, for a run of ``total_steps``.

        A warm-up in a run of unknown length (None) has no end; ``check_run_length`` refuses it.
        """
        if self.warmup_fraction == 0.0 or self.mode == "none":
            return 0, 0
        if total_steps is None:
            return sys.maxsize, sys.maxsize
        most = max(0.3, self.warmup_fraction) if self.target_compression_ratio is None else self.warmup_fraction
        most = self.warmup_max_fraction if self.warmup_max_fraction is not None else most
        return math.ceil(self.warmup_fraction * total_steps), math.ceil(most * total_steps)

    def check_run_length(self, total_steps: int | None) -> None:
        """Refuse a window or a warm-up that leaves no step to act on.

        Raises:
            ValueError: names the option, its value and the length of the run.
        """
        if self.mode == "none":
            return
        if total_steps is None:
            for name, off in (("warmup_fraction", 0.0), ("target_compression_ratio", None)):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"EDGC option {name}={getattr(self, name)} is for a whole run, whose length is not known: pass "
                        f"total_steps (EDGCPlugin(config, total_steps=...)) or use {name}={off}."
                    )
            return
        if self.mode == "edgc" and self.window_steps is not None and self.window_steps > total_steps:
            allowed = f"an integer from 1 to the {total_steps} optimizer steps of this run"
            raise invalid("window_steps", self.window_steps, allowed)
        if self.warmup_steps(total_steps)[0] >= total_steps:
            allowed = f"a smaller share: the dense warm-up fills all {total_steps} optimizer steps of this run"
            raise invalid("warmup_fraction", self.warmup_fraction, allowed)

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EDGCConfig":
        """Build a config from plain values.

        Raises:
            ValueError: an unknown option or a value out of range.
        """
        known = {spec.name for spec in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"EDGCConfig has no option {', '.join(unknown)}; allowed: {', '.join(sorted(known))}.")
        return cls(**values)

    def digest(self) -> int:
        """CRC-32 of all options, equal on workers that were given the same config."""
        return zlib.crc32(repr(sorted(self.to_dict().items())).encode())


def require_config(config: object) -> EDGCConfig:
    """``config``, or the default for None.

    Raises:
        ValueError: it is something else.
    """
    if config is None:
        return EDGCConfig()
    if not isinstance(config, EDGCConfig):
        raise ValueError(f"config={config!r} is not allowed: pass an EDGCConfig, as in EDGCConfig(max_rank=32).")
    return config
