"""EDGCPlugin: gives every model that Accelerate wraps in DDP its EDGC hook."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from hf_edgc.callers import calling_instance
from hf_edgc.checkpoint import load_state, save_state
from hf_edgc.config import EDGCConfig, require_config
from hf_edgc.hook import EDGCState, edgc_hook
from hf_edgc.logs import get_logger, is_main_process
from hf_edgc.memory import expected_memory
from hf_edgc.optimizers import LearningRate, listen
from hf_edgc.records import StepRecord
from hf_edgc.support import check_ddp, check_supported


class EDGCPlugin(DistributedDataParallelKwargs):  # type: ignore[misc]  # accelerate has no types
    """Compresses the gradient synchronization of every model that an ``Accelerator`` wraps in DDP.

    ``Accelerator(kwargs_handlers=[EDGCPlugin(EDGCConfig(...))])`` or, for an accelerator that exists already,
    ``EDGCPlugin(EDGCConfig(...)).attach(accelerator)``. It takes DDP's options as
    ``DistributedDataParallelKwargs`` does and stands in for it, since Accelerate keeps one such handler.

    Args:
        config: options of the compression.
        total_steps: optimizer steps of the run, for window and warm-up given as shares; None if unknown.
        on_record: called with a ``StepRecord`` after each synchronization, on every worker.
        **ddp_options: bucket_cap_mb, find_unused_parameters and the others of ``DistributedDataParallelKwargs``.

    Raises:
        ValueError: a ``comm_hook`` among the options; EDGC is the hook.
    """

    def __init__(
        self,
        config: EDGCConfig | None = None,
        *,
        total_steps: int | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        **ddp_options: Any,
    ) -> None:
        """See the class."""
        clashing = sorted(set(ddp_options) & {"comm_hook", "comm_wrapper", "comm_state_option"})
        if clashing:
            raise ValueError(f"EDGCPlugin takes no {', '.join(clashing)}: EDGC is the communication hook.")
        ours = sorted(set(ddp_options) & set(EDGCConfig().to_dict()))
        if ours:
            raise ValueError(
                f"EDGCPlugin takes {', '.join(ours)} in its config: EDGCPlugin(EDGCConfig({ours[0]}=...))."
            )
        super().__init__(**ddp_options)
        self.config = require_config(config)
        self.total_steps = total_steps
        self.on_record = on_record
        # Weak keys: a model that is freed takes its state along.
        self._attached: weakref.WeakKeyDictionary[DistributedDataParallel, _Attached] = weakref.WeakKeyDictionary()
        self._hooked: weakref.WeakSet[Accelerator] = weakref.WeakSet()
        self._warned_often = False
        self._diagnosed = False
        listen(self)

    # Accelerator looks its handlers up by exact class; a plain subclass would be a KeyError there.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Say ``DistributedDataParallelKwargs`` to those who ask the object; ``isinstance`` knows better."""
        return DistributedDataParallelKwargs

    # A plugin is one object with its models, not the sum of its options as the dataclass below it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as the options, without any model's state."""
        return (_rebuild, (self.config, self.total_steps, self.on_record, self._ddp_options()))

    def to_dict(self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")) -> Any:
        """DDP's own options only; ours must never reach DDP."""
        return {key: value for key, value in self._ddp_options().items() if key not in ignore_keys}

    @property
    def states(self) -> list[EDGCState]:
        """States of all models attached, in the order in which they were prepared."""
        return [attached.state for attached in self._attached.values()]

    @property
    def state(self) -> EDGCState:
        """State of the only model attached.

        Raises:
            RuntimeError: no model is attached, or several are (use ``states`` or ``state_of``).
        """
        states = self.states
        if len(states) != 1:
            hint = "" if states else ": one process needs no synchronization, or prepare was not called yet"
            raise RuntimeError(f"EDGCPlugin.state needs exactly one attached model, there are {len(states)}{hint}.")
        return states[0]

    def state_of(self, model: torch.nn.Module) -> EDGCState | None:
        """State of ``model``, given as DDP, as what DDP wraps, or compiled; None if it is not attached."""
        inner = getattr(model, "_orig_mod", model)
        for ddp, attached in self._attached.items():
            if inner is ddp or inner is ddp.module:
                return attached.state
        return None

    def attach(self, accelerator: Accelerator, *prepared: torch.nn.Module) -> "EDGCPlugin":
        """Take over ``accelerator``'s gradient synchronization for the models that it will prepare.

        DDP options of a handler that the accelerator already has are kept.

        Args:
            accelerator: any that uses DDP.
            *prepared: models that it has prepared already and that have not run backward yet.

        Raises:
            NotImplementedError: the accelerator does not use DDP (FSDP, DeepSpeed, Megatron-LM, tensor parallel).
            RuntimeError: WORLD_SIZE says there are several workers but this process sees only itself.
        """
        self._diagnosed = True
        check_supported(accelerator.state)
        present = accelerator.ddp_handler
        if present is not None and present is not self:
            for spec in fields(DistributedDataParallelKwargs):
                setattr(self, spec.name, getattr(present, spec.name))
        accelerator.ddp_handler = self
        for model in prepared:
            ddp = getattr(model, "_orig_mod", model)
            if isinstance(ddp, DistributedDataParallel):
                self._register(ddp, accelerator)
        return self

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called by Accelerate right after it has wrapped a model; once for each model.

        Raises:
            NotImplementedError: DDP runs in a mode in which torch can't run any hook.
        """
        self._register(model, calling_instance(Accelerator))

    def _register(self, ddp: DistributedDataParallel, accelerator: Accelerator | None) -> None:
        if ddp in self._attached:
            return
        check_ddp(ddp, accelerator)
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        named = [(name, p) for name, p in ddp.module.named_parameters() if name not in ignored]
        state = EDGCState(self.config, named, ddp.process_group, self.total_steps)
        ddp.register_comm_hook(state, edgc_hook)
        state.on_record = self.on_record
        if accelerator is not None:
            state.loss_scale = _LossScale(accelerator)
            state.learning_rate = LearningRate(accelerator, state.parameters.ids)
            self._save_with(accelerator)
        taken = {attached.number for attached in self._attached_to(accelerator)}
        number = next(number for number in itertools.count() if number not in taken)
        owner = None if accelerator is None else weakref.ref(accelerator)
        self._attached[ddp] = _Attached(state, owner, number)
        self._diagnosed = True
        if is_main_process():
            note = f" ({self.config.error_dtype})" if self.config.error_device == "gradient" else " (host memory)"
            lines = [state.layout.describe(), expected_memory(state).describe(note)]
            get_logger().info("%s on %d workers\n%s", self.config.mode, state.exchange.workers, "\n".join(lines))

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and find out at the first one whether EDGC is on at all."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for ddp, attached in self._attached.items():
            # Under Join a worker that has run out of data still synchronizes but no longer steps: not a difference.
            joining = getattr(getattr(ddp, "_join_config", None), "enable", False)
            if not joining and not owned.isdisjoint(attached.state.parameters.ids):
                self._count_step(attached)
        if not self._diagnosed:
            self._diagnosed = True  # said once
            check_supported(PartialState())
            if PartialState().num_processes > 1:
                get_logger().warning(
                    "An optimizer steps on several workers, but no model was wrapped in DDP, so their models drift "
                    "apart. Pass the plugin to Accelerator(kwargs_handlers=[...]) and the model through "
                    "accelerator.prepare (not evaluation_mode=True) before training."
                )

    def _count_step(self, attached: "_Attached") -> None:
        """Count an optimizer step of a model; warn once if it was synchronized more than once for it."""
        synchronized = attached.state.totals.steps
        if synchronized - attached.synchronized > 1 and not self._warned_often:
            self._warned_often = True
            if is_main_process():
                get_logger().warning(
                    "A model's gradients are synchronized several times for one step of its optimizer. Each time costs "
                    "bytes, and what is dropped of a gradient that you then discard enters the next one. Accumulate "
                    "with accelerator.accumulate(model), and run the passes whose gradients you discard (the "
                    "discriminator's in a generator's step) under accelerator.no_sync(model)."
                )
        attached.synchronized = synchronized
        attached.state.optimizer_steps += 1

    def _save_with(self, accelerator: Accelerator) -> None:
        """Write and read our state in ``accelerator.save_state`` and ``load_state``.

        ``register_for_checkpointing`` would write the first worker's errors for everybody.
        """
        if accelerator in self._hooked:
            return
        self._hooked.add(accelerator)
        plugin, owner = weakref.ref(self), weakref.ref(accelerator)

        def on_each(action: Callable[[EDGCState, str, int], object], directory: str) -> None:
            alive = plugin()
            for attached in alive._attached_to(owner()) if alive is not None else []:
                action(attached.state, directory, attached.number)

        def save(models: Any, weights: Any, output_dir: str) -> None:
            on_each(save_state, output_dir)

        def load(models: Any, input_dir: str) -> None:
            on_each(load_state, input_dir)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)

    def _attached_to(self, accelerator: Accelerator | None) -> "list[_Attached]":
        return [each for each in self._attached.values() if (each.owner and each.owner()) is accelerator]

    def _ddp_options(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in fields(DistributedDataParallelKwargs)}


@dataclass(eq=False)
class _Attached:
    """One model's state; ``number`` names its files and stays when another model is freed."""

    state: EDGCState
    owner: "weakref.ref[Accelerator] | None"
    number: int
    synchronized: int = 0
    """Synchronizations up to the last step of its optimizer."""


class _LossScale:
    """Current loss scale of an accelerator, 1 without a scaler; holds the accelerator weakly."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)

    def __call__(self) -> float:
        accelerator = self._accelerator()
        scaler = getattr(accelerator, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def _rebuild(config: EDGCConfig, total_steps: int | None, on_record: Any, ddp_options: dict[str, Any]) -> EDGCPlugin:
    plugin = EDGCPlugin(config, total_steps=total_steps, on_record=on_record)
    for name, value in ddp_options.items():
        setattr(plugin, name, value)
    return plugin
