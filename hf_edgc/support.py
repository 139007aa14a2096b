"""What EDGC can't work with, refused by name before training."""

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from hf_edgc.hook import PYTHON_REDUCER
from hf_edgc.logs import get_logger, is_main_process

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
            "machine without GPU use Accelerator(cpu=True), TrainingArguments(use_cpu=True) (as option: --use_cpu "
            "true) or ACCELERATE_USE_CPU=true."
        )
    if is_main_process():
        get_logger().warning(
            "One process: no gradients to synchronize, nothing is compressed. Launch several workers; on a CPU "
            "accelerate launch --num_processes N starts one only, unless its configuration is like "
            "accelerate_configs/cpu_2proc.yaml."
        )


def check_ddp(ddp: DistributedDataParallel, accelerator: Accelerator | None) -> None:
    """Refuse modes of DDP in which torch can't run any communication hook.

    Raises:
        NotImplementedError: names the mode and what to use instead.
    """
    if getattr(ddp, "_use_python_reducer", False):
        raise NotImplementedError(PYTHON_REDUCER)
    if ddp.static_graph and accelerator is not None and accelerator.gradient_accumulation_steps > 1:
        raise NotImplementedError(
            "static_graph=True with gradient accumulation fails inside DDP with any communication hook. Use "
            "static_graph=False (Trainer: --ddp_static_graph false)."
        )
