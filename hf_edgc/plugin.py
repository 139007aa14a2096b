"""EDGCPlugin: gives every model that Accelerate wraps in DDP its EDGC hook."""

import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch.nn.parallel import DistributedDataParallel

from hf_edgc.callers import calling_instance
from hf_edgc.checkpoint import load_state, save_state
from hf_edgc.config import EDGCConfig
from hf_edgc.hook import EDGCState, edgc_hook
from hf_edgc.logs import get_logger, is_main_process
from hf_edgc.memory import expected_memory
from hf_edgc.optimizers import LearningRate, listen
from hf_edgc.records import StepRecord

_DDP_TYPES = {
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_MLU,
    DistributedType.MULTI_MUSA,
    DistributedType.MULTI_SDAA,
    DistributedType.MULTI_NEURON,
    DistributedType.MULTI_HPU,
}


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
        super().__init__(**ddp_options)
        self.config = config if config is not None else EDGCConfig()
        self.total_steps = total_steps
        self.on_record = on_record
        # Weak keys: a model that is freed takes its state along.
        self._states: weakref.WeakKeyDictionary[DistributedDataParallel, EDGCState] = weakref.WeakKeyDictionary()
        self._hooked: weakref.WeakSet[Accelerator] = weakref.WeakSet()
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
        return list(self._states.values())

    @property
    def state(self) -> EDGCState:
        """State of the only model attached.

        Raises:
            RuntimeError: no model is attached, or several are (use ``states`` or ``state_of``).
        """
        states = self.states
        if len(states) != 1:
            raise RuntimeError(f"EDGCPlugin.state needs exactly one attached model, there are {len(states)}.")
        return states[0]

    def state_of(self, model: torch.nn.Module) -> EDGCState | None:
        """State of ``model``, given as DDP, as what DDP wraps, or compiled; None if it is not attached."""
        inner = getattr(model, "_orig_mod", model)
        for ddp, state in self._states.items():
            if inner is ddp or inner is ddp.module:
                return state
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
        if ddp in self._states:
            return
        _check_ddp(ddp, accelerator)
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        named = [(name, p) for name, p in ddp.module.named_parameters() if name not in ignored]
        state = EDGCState(self.config, named, ddp.process_group, self.total_steps)
        ddp.register_comm_hook(state, edgc_hook)
        state.on_record = self.on_record
        if accelerator is not None:
            state.loss_scale = _LossScale(accelerator)
            state.learning_rate = LearningRate(accelerator, state.parameter_ids)
            self._save_with(accelerator)
        self._states[ddp] = state
        self._diagnosed = True
        if is_main_process():
            note = f" ({self.config.error_dtype})" if self.config.error_device == "gradient" else " (host memory)"
            lines = [state.layout.describe(), expected_memory(state).describe(note)]
            get_logger().info("%s on %d workers\n%s", self.config.mode, state.exchange.workers, "\n".join(lines))

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and find out at the first one whether EDGC is on at all."""
        for state in self._states.values():
            state.optimizer_steps += 1
        if not self._diagnosed:
            self._diagnosed = True  # said once
            check_supported(PartialState())
            if PartialState().num_processes > 1:
                warnings.warn(
                    "EDGCPlugin: an optimizer steps on several workers, but no model was wrapped in DDP, so their "
                    "models drift apart. Pass the plugin to Accelerator(kwargs_handlers=[...]) and the model through "
                    "accelerator.prepare (not evaluation_mode=True) before training.",
                    stacklevel=2,
                )

    def _save_with(self, accelerator: Accelerator) -> None:
        """Write and read our state in ``accelerator.save_state`` and ``load_state``.

        ``register_for_checkpointing`` would write the first worker's errors for everybody.
        """
        if accelerator in self._hooked:
            return
        self._hooked.add(accelerator)
        plugin = weakref.ref(self)

        def save(models: Any, weights: Any, output_dir: str) -> None:
            alive = plugin()
            for index, state in enumerate(alive.states if alive is not None else []):
                save_state(state, output_dir, index)

        def load(models: Any, input_dir: str) -> None:
            alive = plugin()
            for index, state in enumerate(alive.states if alive is not None else []):
                load_state(state, input_dir, index)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)

    def _ddp_options(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in fields(DistributedDataParallelKwargs)}


def check_supported(state: Any) -> None:
    """Refuse what EDGC can't compress; warn when there is nothing to compress.

    Args:
        state: Accelerate's ``AcceleratorState`` or ``PartialState``.

    Raises:
        NotImplementedError: gradients are not synchronized by DDP.
        RuntimeError: WORLD_SIZE says there are several workers but this process sees only itself.
    """
    kind, launched = state.distributed_type, int(os.environ.get("WORLD_SIZE", "1"))
    if kind in _DDP_TYPES:
        return
    if kind != DistributedType.NO:
        raise NotImplementedError(
            f"EDGC compresses the gradient synchronization of DistributedDataParallel; {kind.value} synchronizes "
            "gradients itself. Launch with a MULTI_GPU or MULTI_CPU configuration, or leave EDGC out."
        )
    if launched > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {launched}, but Accelerate sees a single process: each worker would train alone. On a "
            "machine without GPU pass --use_cpu (Trainer), Accelerator(cpu=True) or ACCELERATE_USE_CPU=true."
        )
    warnings.warn(
        "EDGC: one process, no gradients to synchronize, nothing is compressed. Use accelerate launch "
        "--num_processes N to train on N workers.",
        stacklevel=3,
    )


def _check_ddp(ddp: DistributedDataParallel, accelerator: Accelerator | None) -> None:
    if getattr(ddp, "_use_python_reducer", False):
        raise NotImplementedError(
            'torch._dynamo.config.optimize_ddp="python_reducer" gives communication hooks no buckets. Use '
            'optimize_ddp=True (torch\'s default) or "no_optimization" with EDGC.'
        )
    if ddp.static_graph and accelerator is not None and accelerator.gradient_accumulation_steps > 1:
        raise NotImplementedError(
            "static_graph=True with gradient accumulation fails inside DDP with any communication hook. Use "
            "static_graph=False (Trainer: --ddp_static_graph false)."
        )


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
