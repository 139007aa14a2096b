"""EDGCCallback: turns EDGC on in a Trainer that is given it, and reports what it does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_edgc.callers import calling_argument, calling_instance
from hf_edgc.checkpoint import load_state, save_state
from hf_edgc.config import EDGCConfig, require_config
from hf_edgc.hook import EDGCState
from hf_edgc.logs import get_logger
from hf_edgc.model_card import extend_model_card, section
from hf_edgc.plugin import EDGCPlugin
from hf_edgc.recording import Recording
from hf_edgc.records import StepRecord, Totals
from hf_edgc.run_info import RECORD_FILE, RunInfo


class EDGCCallback(TrainerCallback):
    """``Trainer(..., callbacks=[EDGCCallback(EDGCConfig(...))])`` compresses the gradients of that Trainer.

    Args:
        config: options of the compression.
        record_path: file for one JSON record a step; default ``edgc_steps.jsonl`` in the Trainer's output_dir.
        report: write the run report beside the records when training ends; needs matplotlib, and says so without it.

    Raises:
        NotImplementedError: the Trainer does not use DDP (FSDP, DeepSpeed).
        RuntimeError: several workers would train without synchronizing; says what to do.
    """

    def __init__(
        self, config: EDGCConfig | None = None, record_path: str | Path | None = None, report: bool = True
    ) -> None:
        """See the class."""
        self.config = require_config(config)
        self._record_path = None if record_path is None else Path(record_path)
        self._state: EDGCState | None = None
        self._report = report
        self._recording: Recording | None = None
        self._logged = Totals()
        self._hook_s_before = 0.0

    @property
    def state(self) -> EDGCState | None:
        """EDGC's state of the model in training; None before training and with one process."""
        return self._state

    def summary(self) -> dict[str, float | int | None]:
        """Figures of the whole run, but the seconds in the hook: of this session, as Trainer's run time is."""
        totals = self._state.totals if self._state is not None else Totals()
        return {
            "edgc_compression_ratio": totals.compression_ratio,
            "edgc_sent_bytes": totals.sent_bytes,
            "edgc_dense_bytes": totals.dense_bytes,
            "edgc_final_rank": self._state.controller.plan.rank if self._state is not None else None,
            "edgc_hook_s": totals.hook_s - self._hook_s_before,
        }

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give the Trainer's accelerator our plugin, before any model is wrapped."""
        self._install(_trainer())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make sure that the wrapped model runs our hook, and start the run's records."""
        trainer = _trainer()
        plugin = trainer.accelerator.ddp_handler
        if not isinstance(plugin, EDGCPlugin):  # the callback was added to the Trainer after its construction
            plugin = self._install(trainer)
        self._state = plugin.state_of(trainer.model_wrapped)
        checkpoint = calling_argument(Trainer, "resume_from_checkpoint")
        if self._state is None:
            if args.world_size > 1:
                raise RuntimeError(
                    f"{args.world_size} workers are about to train without DDP, so their models would drift apart. "
                    "Trainer skips the wrapping when the model was prepared for evaluation only: train before "
                    "evaluating, or build a new Trainer."
                )
            if checkpoint is not None and any(Path(checkpoint).glob("edgc_*")):
                get_logger().warning("One process: the errors of the workers saved in %s are not used.", checkpoint)
            return
        self._state.start_run(state.max_steps)
        if checkpoint is not None:
            load_state(self._state, checkpoint)
        self._logged = replace(self._state.totals)
        self._hook_s_before = self._state.totals.hook_s
        if state.is_world_process_zero:
            path = self._record_path if self._record_path is not None else Path(args.output_dir or ".") / RECORD_FILE
            self._recording = Recording(self._state, state.max_steps, path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add our figures to a training log, where all reporters after us and ``log_history`` find them."""
        if self._state is None or self._state.last is None or logs is None or "loss" not in logs:
            return
        figures = self._figures(self._state, self._state.last)
        logs.update(figures)
        state.log_history[-1].update(figures)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write our state into the checkpoint that Trainer has just written."""
        if self._state is not None and not args.save_only_model:
            save_state(self._state, Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the records and write the report."""
        if self._recording is not None:
            self._recording.end(state, self._report)
            self._recording = None

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let a model that was only evaluated so far be wrapped for training."""
        _forget_evaluation_only(kwargs.get("model"))

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **kwargs: Any,
    ) -> None:
        """Let a model that was only evaluated so far be wrapped for training."""
        _forget_evaluation_only(kwargs.get("model"))

    def _install(self, trainer: Trainer) -> EDGCPlugin:
        plugin = EDGCPlugin(self.config).attach(trainer.accelerator, trainer.model_wrapped)
        # First in line, so that reporters see our figures; a new list, since Trainer may be walking the old one.
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        extend_model_card(trainer, lambda: self._card(trainer.state))
        return plugin

    def _card(self, trained: TrainerState) -> str | None:
        if self._state is None:
            return None
        info = RunInfo.of(self._state, trained.max_steps)
        return section(info, self._state.totals, self._state.controller.plan.rank, trained.log_history)

    def _figures(self, state: EDGCState, last: StepRecord) -> dict[str, float]:
        """Over the steps since the last log."""
        totals, before = state.totals, self._logged
        sent, dense = totals.sent_bytes - before.sent_bytes, totals.dense_bytes - before.dense_bytes
        steps = max(1, totals.steps - before.steps)
        figures = {
            "edgc/compression_ratio": dense / sent if sent else totals.compression_ratio,
            "edgc/rank_mean": sum(last.ranks) / max(1, len(last.ranks)),
            "edgc/sent_mb": sent / steps / 1e6,
            "edgc/hook_s": (totals.hook_s - before.hook_s) / steps,
        }
        if state.measured is not None:
            figures["edgc/grad_norm_dense"] = state.measured.grad_norm
            if state.measured.mean_entropy is not None:
                figures["edgc/entropy"] = state.measured.mean_entropy
        self._logged = replace(totals)
        return figures


def _trainer() -> Trainer:
    trainer = calling_instance(Trainer)
    if trainer is None:
        raise RuntimeError(
            "EDGCCallback must be called by a transformers Trainer. If it was, this version of transformers calls "
            "its callbacks in a way that hf_edgc does not know: use the versions in constraints.txt, or attach "
            "EDGCPlugin to trainer.accelerator before trainer.train()."
        )
    return trainer


def _forget_evaluation_only(model: torch.nn.Module | None) -> None:
    # Accelerate marks a model prepared for evaluation only as prepared and then never wraps it in DDP; the
    # attribute is not on the DDP-wrapped model's inner module, so a model in training is not touched.
    if model is not None and getattr(model, "_is_accelerate_prepared", False):
        del model._is_accelerate_prepared
