"""What is checked once everything but the model is known: the length of the run, and where it goes on from."""

import math
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_edgc import EDGCConfig
from hf_edgc.clm.errors import UsageError


def count_steps(training: TrainingArguments, blocks: int | None) -> int:
    """Optimizer steps of the whole run, as Trainer will count them.

    Args:
        training: batch sizes, accumulation and epochs, or ``max_steps``.
        blocks: number of training examples; None for a stream.

    Raises:
        UsageError: a stream without ``max_steps``, or too few blocks for one batch.
    """
    if training.max_steps > 0:
        return int(training.max_steps)
    if blocks is None:
        raise UsageError(f"streaming=True needs max_steps, the length of the run: it is {training.max_steps}.")
    rounded = math.floor if training.dataloader_drop_last else math.ceil
    batches: int = rounded(rounded(blocks / training.train_batch_size) / training.world_size)
    if batches == 0:
        raise UsageError(
            f"dataloader_drop_last=True leaves no batch: {blocks} blocks for {training.world_size} workers with "
            f"per_device_train_batch_size={training.per_device_train_batch_size}."
        )
    return math.ceil(training.num_train_epochs * math.ceil(batches / training.gradient_accumulation_steps))


def check_length(compression: EDGCConfig, steps: int) -> None:
    """Refuse a window or a warm-up that does not fit into ``steps`` optimizer steps.

    Raises:
        UsageError: names the option, its value and the length of the run.
    """
    try:
        compression.check_run_length(steps)
    except ValueError as error:
        raise UsageError(str(error)) from error


def find_checkpoint(training: TrainingArguments) -> str | None:
    """The checkpoint to resume from: a folder, or with ``true`` the last one in ``output_dir``.

    Raises:
        UsageError: there is none.
    """
    asked = training.resume_from_checkpoint
    if asked is None or str(asked).lower() == "false":
        return None
    if str(asked).lower() == "true":
        folder = Path(str(training.output_dir))
        found = get_last_checkpoint(str(folder)) if folder.is_dir() else None  # type: ignore[no-untyped-call]
        if found is None:
            raise UsageError(f"resume_from_checkpoint=true found no checkpoint-* folder in output_dir={str(folder)!r}.")
        return str(found)
    if not (Path(asked) / "trainer_state.json").is_file():
        raise UsageError(
            f"resume_from_checkpoint={asked!r} is no folder with a trainer_state.json: give a checkpoint-* folder of "
            "an earlier run, or true for the last one in output_dir."
        )
    return str(asked)
