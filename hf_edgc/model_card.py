"""The section on compression in the README.md that Trainer writes for a model."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_edgc.advice import describe
from hf_edgc.config import EDGCConfig
from hf_edgc.records import Totals
from hf_edgc.run_info import RunInfo


def section(info: RunInfo, totals: Totals, final_rank: float, log: list[dict[str, Any]]) -> str:
    """The section in Markdown.

    Args:
        info: configuration, workers and link of the run.
        totals: bytes of the run.
        final_rank: mean matrix rank after the last step; 0: dense.
        log: Trainer's log history; the last perplexity or evaluation loss in it is told.
    """
    defaults = EDGCConfig().to_dict()
    rank = f"{final_rank:.3g}" if final_rank else "none (dense)"
    changed = [f"{name}={value!r}" for name, value in info.config.items() if value != defaults.get(name)]
    lines = [
        "### Gradient compression",
        "",
        f"Trained on {info.workers} data-parallel workers with hf_edgc {info.release} "
        "([EDGC](https://arxiv.org/abs/2511.10333)).",
        "",
        f"- options: `EDGCConfig({', '.join(changed)})`",
        f"- compressed: {len(info.matrices)} matrices, final rank {rank}; sent dense: {len(info.dense)} tensors",
        f"- sent by each worker: {totals.sent_bytes / 1e6:,.1f} MB in {totals.steps:,} steps instead of "
        f"{totals.dense_bytes / 1e6:,.1f} MB (compression ratio {totals.compression_ratio:.2f})",
    ]
    lines += [f"- {name}: {value:.4g}" for name, value in _quality(log)]
    if info.link is not None:
        lines.append(f"- {describe(info.link)}")
    return "\n".join(lines) + "\n"


def extend_model_card(trainer: Trainer, make_section: Callable[[], str | None]) -> None:
    """Let ``trainer.create_model_card``, which ``push_to_hub`` calls as well, add what ``make_section`` returns.

    No event of Trainer's comes between the writing of the card and its upload, so the method of this one object is
    wrapped; once, however often this is called.
    """
    create = trainer.create_model_card
    if getattr(create, "__wrapped__", None) is not None:
        return

    @functools.wraps(create)
    def create_and_add(*args: Any, **kwargs: Any) -> None:
        create(*args, **kwargs)
        path = Path(trainer.args.output_dir or ".") / "README.md"
        text = make_section() if trainer.is_world_process_zero() else None
        if text is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write("\n\n" + text)

    setattr(trainer, "create_model_card", create_and_add)  # noqa: B010  # mypy: a method is not to be assigned


def _quality(log: list[dict[str, Any]]) -> list[tuple[str, float]]:
    for key, name in (("eval_perplexity", "perplexity"), ("eval_loss", "evaluation loss")):
        values = [float(entry[key]) for entry in log if key in entry]
        if values:
            return [(name, values[-1])]
    return []
