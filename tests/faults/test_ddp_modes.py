"""Ways to run DDP: each trains compressed with equal replicas, or is refused by name."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import edgc_ddp, same_everywhere, tiny_gpt2, train_steps
from torch.distributed.algorithms.join import Join

from hf_edgc import EDGCConfig

CONFIG = EDGCConfig(max_rank=4, min_rank=1, entropy_every=2, window_steps=5, min_compression_ratio=1.0)
BUCKETS = {"bucket_cap_mb": 0.02}
STEPS = 10


def tokens_of(step, worker):
    return torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(31 * step + worker))


def outcome(model, state):
    equal = all(same_everywhere(parameter.detach()) for parameter in model.parameters())
    return equal and state.totals.sent_bytes < state.totals.dense_bytes, state.totals.compressed_steps


def accumulation(no_sync, last=3):
    """Ten optimizer steps of three micro-batches each, the last one of ``last``."""
    model = tiny_gpt2()
    with edgc_ddp(model, CONFIG, 40, **BUCKETS) as (ddp, state):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(STEPS):
            count = last if step == STEPS - 1 else 3
            for micro in range(count):
                quiet = no_sync and micro < count - 1
                with ddp.no_sync() if quiet else contextlib.nullcontext():
                    tokens = tokens_of(3 * step + micro, dist.get_rank())
                    ddp(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, state)


@pytest.mark.fault("gradient accumulation with no_sync, an uneven last one, clipping", "one exchange an optimizer step")
@pytest.mark.parametrize("last", [3, 1])
def test_accumulation_with_no_sync(run_workers, last):
    assert run_workers(accumulation, no_sync=True, last=last) == [(True, STEPS)] * 2


@pytest.mark.fault(
    "gradient accumulation without no_sync", "one exchange a micro-batch, each counted in bytes and steps"
)
def test_accumulation_without_no_sync(run_workers):
    assert run_workers(accumulation, no_sync=False) == [(True, 3 * STEPS)] * 2


def uneven_inputs():
    model = tiny_gpt2()
    with edgc_ddp(model, CONFIG, 40, **BUCKETS) as (ddp, state):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([ddp]):
            for step in range(STEPS + 4 * dist.get_rank()):
                tokens = tokens_of(step, dist.get_rank())
                optimizer.zero_grad()
                ddp(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
        return outcome(model, state)


@pytest.mark.fault(
    "uneven inputs under Join", "the worker that has finished sends zeros and its errors; weights agree in the end"
)
def test_uneven_inputs_under_join(run_workers):
    assert run_workers(uneven_inputs) == [(True, STEPS + 4)] * 2


def checkpointing(reentrant):
    model = tiny_gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    with edgc_ddp(model, CONFIG, 40, **BUCKETS) as (ddp, state):
        train_steps(ddp, STEPS)
        return outcome(model, state)


@pytest.mark.fault("activation checkpointing, reentrant or not", "compressed as any other")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(run_workers, reentrant):
    assert run_workers(checkpointing, reentrant=reentrant) == [(True, STEPS)] * 2


def with_ddp_option(**option):
    model = tiny_gpt2()
    with edgc_ddp(model, CONFIG, 40, **BUCKETS, **option) as (ddp, state):
        train_steps(ddp, STEPS)
        return outcome(model, state)


@pytest.mark.fault("gradient_as_bucket_view, static_graph", "compressed as any other")
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_ddp_options(run_workers, option):
    assert run_workers(with_ddp_option, **{option: True}) == [(True, STEPS)] * 2


def compiled(order, optimize_ddp):
    import torch._dynamo

    torch._dynamo.reset()
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = optimize_ddp
    try:
        model = tiny_gpt2(n_embd=128)  # 1.8 MB: two buckets of at most 1 MB, less than that torch's optimizer refuses
        inner = torch.compile(model, backend="eager") if order == "model" else model
        with edgc_ddp(inner, CONFIG, 40, bucket_cap_mb=1) as (ddp, state):
            train_steps(torch.compile(ddp, backend="eager") if order == "ddp" else ddp, STEPS)
            return outcome(model, state)
    finally:
        torch._dynamo.config.optimize_ddp = before


@pytest.mark.fault(
    "torch.compile of the model or of DDP, with and without torch's DDP optimizer", "compressed as any other"
)
@pytest.mark.parametrize("order, optimize_ddp", [("model", True), ("ddp", True), ("ddp", False)])
def test_compile(run_workers, order, optimize_ddp):
    results = run_workers(compiled, order=order, optimize_ddp=optimize_ddp, timeout_s=120)
    assert results == [(True, STEPS)] * 2


def raises_in_the_middle():
    """An exception in backward after some buckets have been collected, on both workers, and a further step."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("from the user's own backward")

    model = tiny_gpt2()
    hook = None
    with edgc_ddp(model, CONFIG, 40, **BUCKETS) as (ddp, state):
        train_steps(ddp, 3)
        hook = model.transformer.h[0].register_forward_pre_hook(lambda module, args: (Fails.apply(args[0]), *args[1:]))
        with pytest.raises(ArithmeticError):
            train_steps(ddp, 1, first_step=3)
        hook.remove()
        waiting = len(state._collected.futures)
        try:
            train_steps(ddp, 7, first_step=4)
        except RuntimeError as error:
            return waiting, str(error)
        return waiting, ""


@pytest.mark.fault(
    "backward raises after some buckets came in",
    "the exception of the user's code; DDP then refuses a further step by name, nothing hangs",
)
def test_an_exception_in_backward(run_workers):
    for waiting, told in run_workers(raises_in_the_middle):
        assert waiting > 0, "some buckets had been collected"
        assert "Expected to have finished reduction in the prior iteration" in told
