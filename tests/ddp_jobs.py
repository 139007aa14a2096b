"""Building blocks for what runs on the pool's workers: models with prescribed gradients, and a GPT-2 in small."""

import gc
import logging
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_edgc import EDGCConfig, EDGCState, edgc_hook
from hf_edgc.logs import get_logger


class GradientModel(torch.nn.Module):
    """The gradient of each parameter is whatever tensor is fed for it."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        self.weights = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
        )

    def forward(self, gradients):
        return sum((self.weights[name] * gradient).sum() for name, gradient in gradients.items())


def gradients_for(shapes, step, strong=4, scale=1.0, dtype=torch.float32):
    """This worker's gradients of one step, fixed by step and worker: ``strong`` directions that stay, and noise.

    The strong singular values are some 80 times the noise's largest, so that the noise which error feedback
    piles up over ten steps stays below them: where the two cross, rounding alone decides what is sent.
    """
    noise = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    result = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=noise)
        if len(shape) == 2:
            shared = torch.Generator().manual_seed(7)
            left = 20 * torch.randn(shape[0], strong, generator=shared)
            tensor = tensor + left @ torch.randn(strong, shape[1], generator=shared)
        result[name] = (scale * tensor).to(dtype)
    return result


@contextmanager
def ddp_of(model, hook=None, state=None, **ddp_options):
    """DDP with a hook, torn down in the order that lets gloo end cleanly."""
    ddp = DistributedDataParallel(model, **ddp_options)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    try:
        yield ddp
    finally:
        del ddp
        gc.collect()


@contextmanager
def edgc_ddp(model, config=None, total_steps=None, **ddp_options):
    """DDP and the EDGCState whose hook it runs."""
    state = EDGCState(config or EDGCConfig(), model.named_parameters(), total_steps=total_steps)
    with ddp_of(model, edgc_hook, state, **ddp_options) as ddp:
        yield ddp, state


def synchronized(ddp, gradients):
    """Averaged gradients by name after one backward."""
    ddp.zero_grad()
    ddp(gradients).backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in ddp.module.weights.items()
    }


def average(tensor):
    """Mean over the workers, in float64."""
    result = tensor.double()
    dist.all_reduce(result)
    return result / dist.get_world_size()


def same_everywhere(tensor):
    """Whether all workers hold bitwise the same tensor."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return all(torch.equal(copies[0], other) for other in copies)


def tiny_gpt2(seed=0, **overrides):
    """A GPT-2 of about 0.1 M parameters, tied embeddings, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 256,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(**{**sizes, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **overrides})
    return GPT2LMHeadModel(config)


def train_steps(ddp, steps, learning_rate=1e-3, batch=4, length=32, vocab=256, first_step=0):
    """A few AdamW steps on this worker's own random tokens; returns the losses."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=learning_rate)
    losses = []
    for step in range(first_step, first_step + steps):
        generator = torch.Generator().manual_seed(31 * step + dist.get_rank())
        tokens = torch.randint(vocab // 4, (batch, length), generator=generator)
        optimizer.zero_grad()
        loss = ddp(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Told(logging.Handler):
    """What the package's logger says on this worker."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@contextmanager
def listening():
    told = Told()
    get_logger().addHandler(told)
    try:
        yield told.messages
    finally:
        get_logger().removeHandler(told)
