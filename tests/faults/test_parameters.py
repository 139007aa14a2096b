"""Odd parameters and gradients: shapes, types, zeros, parameters that are not used."""

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import (
    GradientModel,
    average,
    edgc_ddp,
    gradients_for,
    same_everywhere,
    synchronized,
    tiny_gpt2,
    train_steps,
)

from hf_edgc import EDGCConfig

BUCKETS = {"bucket_cap_mb": 0.01}
OPTIONS = {
    "max_rank": 4,
    "min_rank": 1,
    "rank": 4,
    "entropy_every": 1,
    "window_steps": 20,
    "min_compression_ratio": 1.0,
    "factor_dtype": "float32",  # so that what is lost can be told from rounding
}
STEPS = 11


def equal_replicas(model):
    return all(same_everywhere(parameter.detach()) for parameter in model.parameters())


def fed_and_decoded(shapes, gradients_of, dtypes=None, steps=STEPS, **ddp_options):
    """What was lost of the gradients over some steps, by parameter, and whether each step was compressed."""
    model = GradientModel(shapes)
    for name, dtype in (dtypes or {}).items():
        model.weights[name].data = model.weights[name].data.to(dtype)
    totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    sizes = {name: 0.0 for name in shapes}
    with edgc_ddp(model, EDGCConfig(**OPTIONS), 40, **BUCKETS, **ddp_options) as (ddp, state):
        equal = True
        for step in range(steps):
            gradients = gradients_of(step)
            decoded = synchronized(ddp, gradients)
            for name in shapes:
                mean = average(gradients[name])
                sizes[name] += mean.norm().item()
                totals[name] += decoded[name].double() - mean
                equal = equal and same_everywhere(decoded[name])
        for name, error in state.reducer.feedback.errors.items():
            totals[name[8:]] += average(error).view(shapes[name[8:]])
        compressed = state.totals.compressed_steps
        smaller = state.totals.sent_bytes < state.totals.dense_bytes
    lost = {name: total.norm().item() / max(sizes[name], 1e-30) for name, total in totals.items()}
    return {"lost": lost, "compressed": compressed, "equal": equal, "smaller": smaller}


def check(results, tolerance=1e-5, steps=STEPS):
    for result in results:
        assert result["compressed"] == steps and result["equal"] and result["smaller"]
        assert max(result["lost"].values()) < tolerance, result["lost"]


SHAPES = {
    "scalar": (), "one": (1,), "vector": (48,), "empty": (0, 5), "matrix": (64, 48), "thin": (300, 2), "flat": (2, 300),
    "row": (1, 64), "cube": (24, 8, 6), "conv": (40, 8, 3, 3),
}  # fmt: skip


def odd_shapes():
    return fed_and_decoded(SHAPES, lambda step: gradients_for(SHAPES, step))


@pytest.mark.fault(
    "0-D, 1-D, 3-D, 4-D and empty parameters, matrices thinner than the rank",
    "compressed where that saves bytes, else sent dense and listed with the reason; nothing is lost",
)
def test_odd_shapes(run_workers):
    check(run_workers(odd_shapes))


def deficient():
    shapes = {"a": (64, 48), "b": (80, 40)}

    def gradients(step):
        rank_one = torch.Generator().manual_seed(step // 4)  # rank 1, below the rank in use, changing now and then
        return {n: torch.randn(s[0], 1, generator=rank_one) @ torch.ones(1, s[1]) for n, s in shapes.items()}

    return fed_and_decoded(shapes, gradients)


@pytest.mark.fault("rank-deficient gradients", "compressed; the unused columns of the factors stay finite")
def test_rank_deficient_gradients(run_workers):
    check(run_workers(deficient))


def zeros_first():
    shapes = {"a": (64, 48), "b": (80, 40), "bias": (40,)}

    def gradients(step):
        zero = step < 3 or step == 6
        return {name: tensor * (not zero) for name, tensor in gradients_for(shapes, step).items()}

    return fed_and_decoded(shapes, gradients)


@pytest.mark.fault(
    "zero gradients from the first step, and again later", "nothing moves; later gradients are compressed"
)
def test_zero_gradients(run_workers):
    check(run_workers(zeros_first))


def unused_rows(steps):
    model = tiny_gpt2()
    before = model.transformer.wpe.weight.detach().clone()
    with edgc_ddp(model, EDGCConfig(**OPTIONS), 40, **BUCKETS) as (ddp, state):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(steps):
            tokens = torch.randint(64, (4, 20), generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
            optimizer.zero_grad()
            ddp(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        compressed = "transformer.wpe.weight" in state.reducer.slots
    after = model.transformer.wpe.weight.detach()
    tied = model.lm_head.weight is model.transformer.wte.weight
    return (
        torch.equal(before[20:], after[20:]),
        not torch.equal(before[:20], after[:20]),
        compressed,
        tied,
        equal_replicas(model),
    )


@pytest.mark.fault(
    "positions beyond the block get no gradient (wpe); tied embeddings; Conv1D", "those rows stay bitwise unchanged"
)
def test_rows_without_gradient_are_never_touched(run_workers):
    assert run_workers(unused_rows, steps=STEPS) == [(True, True, True, True, True)] * 2


def unused(kind):
    """One parameter without gradient: on one worker, on all, from step 5 on."""
    shapes = {"a": (64, 48), "b": (80, 40), "bias": (40,)}
    with edgc_ddp(GradientModel(shapes), EDGCConfig(**OPTIONS), 40, find_unused_parameters=True, **BUCKETS) as (
        ddp,
        state,
    ):
        frozen = equal = True
        for step in range(STEPS):
            gradients = gradients_for(shapes, step)
            absent = step >= 5 and (kind == "all" or dist.get_rank() == 1)
            if absent:
                del gradients["b"]
            before = state.reducer.feedback.errors.get("weights.b")
            before = None if before is None else before.clone()
            decoded = synchronized(ddp, gradients)
            error = state.reducer.feedback.errors["weights.b"]
            if kind == "all" and step >= 5:
                frozen = frozen and decoded["b"] is None and torch.equal(before, error)
            else:
                equal = equal and same_everywhere(decoded["b"]) and decoded["b"].abs().max() > 0
            equal = equal and same_everywhere(decoded["a"])
        return frozen, bool(equal), state.totals.compressed_steps


@pytest.mark.fault(
    "a parameter is unused on one worker from some step on", "averaged as by DDP, with zero for that worker"
)
def test_unused_on_one_worker(run_workers):
    assert run_workers(unused, kind="one") == [(True, True, STEPS)] * 2


@pytest.mark.fault(
    "a parameter is unused on all workers from some step on", "its .grad stays None and its error is kept"
)
def test_unused_on_all_workers(run_workers):
    assert run_workers(unused, kind="all") == [(True, True, STEPS)] * 2


def never_used():
    shapes = {"a": (64, 48), "never": (80, 40)}
    model = GradientModel(shapes)
    with edgc_ddp(model, EDGCConfig(**OPTIONS), 40, find_unused_parameters=True, **BUCKETS) as (ddp, state):
        for step in range(STEPS):
            result = synchronized(ddp, {"a": gradients_for(shapes, step)["a"]})
        ours = "weights.never" in state.reducer.slots or "weights.never" in state.reducer.feedback.errors
        return result["never"] is None, ours, state.totals.compressed_steps, same_everywhere(result["a"])


@pytest.mark.fault("a parameter never gets a gradient", "it keeps .grad None and takes no memory")
def test_never_used(run_workers):
    assert run_workers(never_used) == [(True, False, STEPS, True)] * 2


def frozen_and_lora():
    from peft import LoraConfig, get_peft_model

    base = tiny_gpt2()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    frozen = base.transformer.wte.weight.detach().clone()
    with edgc_ddp(model, EDGCConfig(max_rank=4), 40, **BUCKETS) as (ddp, state):
        train_steps(ddp, STEPS)
        dense = {reason.reason for reason in state.layout.dense}
        same_bytes = state.totals.sent_bytes == state.totals.dense_bytes
    return (
        len(state.layout.matrices),
        dense,
        same_bytes,
        torch.equal(frozen, base.transformer.wte.weight),
        equal_replicas(model),
    )


@pytest.mark.fault(
    "frozen parameters; LoRA adapters from peft", "frozen ones are not sent; adapters are small: dense, and so listed"
)
def test_frozen_parameters_and_lora(run_workers):
    expected = (0, {"saves less than 2 x at rank 1"}, True, True, True)
    assert run_workers(frozen_and_lora) == [expected] * 2


def mixed_types():
    shapes = {"a": (64, 48), "b": (80, 40), "c": (40, 72), "bias": (48,), "small": (40,)}
    dtypes = {"b": torch.bfloat16, "c": torch.float16, "small": torch.bfloat16}

    def gradients(step):
        return {n: g.to(dtypes.get(n, torch.float32)) for n, g in gradients_for(shapes, step, scale=0.01).items()}

    return fed_and_decoded(shapes, gradients, dtypes)


@pytest.mark.fault(
    "float32, bfloat16 and float16 parameters in one model", "each is compressed, with errors in float32"
)
def test_mixed_types(run_workers):
    check(run_workers(mixed_types), tolerance=2**-7)


def strided():
    """Transposed and channels-last parameters, whose gradients DDP shows as if they were contiguous."""
    shapes = {"a": (64, 24), "conv": (40, 8, 3, 3)}
    model = GradientModel(shapes)
    model.weights["a"].data = torch.zeros(24, 64).t()
    model.weights["conv"].data = torch.zeros(40, 8, 3, 3).to(memory_format=torch.channels_last)
    config = EDGCConfig(mode="static", rank=2, min_compression_ratio=1.0, factor_dtype="float32")
    with edgc_ddp(model, config, **BUCKETS) as (ddp, _):
        for step in range(STEPS):
            rank_one = torch.Generator().manual_seed(step)
            left, right = torch.randn(64, 1, generator=rank_one), torch.randn(1, 24, generator=rank_one)
            gradients = {"a": left @ right, "conv": gradients_for(shapes, step)["conv"]}
            result = synchronized(ddp, gradients)
    return ((result["a"] - left @ right).norm() / (left @ right).norm()).item(), same_everywhere(result["conv"])


@pytest.mark.fault("transposed and channels-last parameters", "compressed as the matrices that they are")
def test_strided_parameters(run_workers):
    for error, equal in run_workers(strided):
        assert error < 1e-5 and equal, "a rank-1 gradient is exact at rank 2"


def half_overflow():
    """Gradients near the end of float16 whose errors push the decoded mean beyond it."""
    shapes = {"a": (64, 64)}
    model = GradientModel(shapes, torch.float16)
    constant = (1e4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).clamp(-3e4, 3e4).half()
    total = torch.zeros(64, 64, dtype=torch.float64)
    with edgc_ddp(model, EDGCConfig(mode="static", rank=1, min_compression_ratio=1.0)) as (ddp, state):
        for _ in range(12):
            result = synchronized(ddp, {"a": constant})["a"]
            total += result.double()
        left = average(state.reducer.feedback.errors["weights.a"])
        lost = (total + left - 12 * constant.double()).norm() / (12 * constant.double()).norm()
        return result.isfinite().all().item(), lost.item(), state.totals.compressed_steps


@pytest.mark.fault(
    "a decoded gradient beyond the range of float16", "it is capped, and what it can't hold goes to the next step"
)
def test_decoded_gradients_that_float16_can_not_hold(run_workers):
    for finite, lost, compressed in run_workers(half_overflow):
        assert finite and compressed == 12 and lost < 1e-4


def complex_parameter():
    with pytest.raises(NotImplementedError) as caught:
        edgc_ddp(GradientModel({"a": (16, 16)}, torch.complex64), EDGCConfig(**OPTIONS)).__enter__()
    return str(caught.value)


@pytest.mark.fault("complex parameters", "refused by name at attach")
def test_complex_parameters(run_workers):
    assert all("can't compress complex parameters (weights.a)" in told for told in run_workers(complex_parameter))


def sparse_embedding():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(200, 32, sparse=True), torch.nn.Linear(32, 64))
    with edgc_ddp(model, EDGCConfig(**OPTIONS), 40, **BUCKETS) as (ddp, state):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens = torch.randint(200, (4,), generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
            ddp(tokens).square().sum().backward()
            optimizer.step()
        return equal_replicas(model), state.totals.compressed_steps, list(state.reducer.slots)


@pytest.mark.fault("sparse gradients (Embedding with sparse=True)", "sent as plain DDP does; the rest is compressed")
def test_sparse_gradients(run_workers):
    assert run_workers(sparse_embedding) == [(True, STEPS, ["1.weight"])] * 2


def other_default_dtype():
    shapes = {"a": (64, 48), "b": (80, 40)}
    torch.set_default_dtype(torch.float64)
    try:
        return fed_and_decoded(shapes, lambda step: {n: g.float() for n, g in gradients_for(shapes, step).items()})
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.fault("another default dtype", "compressed as any other")
def test_other_default_dtype(run_workers):
    check(run_workers(other_default_dtype))


def copied():
    import copy

    model = tiny_gpt2()
    with edgc_ddp(model, EDGCConfig(**OPTIONS), 40, **BUCKETS) as (ddp, state):
        average_model = torch.optim.swa_utils.AveragedModel(ddp)
        train_steps(ddp, STEPS)
        average_model.update_parameters(ddp)
        copy.deepcopy(ddp)
        train_steps(ddp, 1)
        return state.totals.compressed_steps, equal_replicas(model)


@pytest.mark.fault("the DDP model is copied (weight averaging)", "works; the copy synchronizes nothing of its own")
def test_copies_of_ddp(run_workers):
    assert run_workers(copied) == [(STEPS + 1, True)] * 2


def autocast(dtype):
    model = tiny_gpt2()
    with edgc_ddp(model, EDGCConfig(**OPTIONS), 40, **BUCKETS) as (ddp, state):
        with torch.autocast("cpu", dtype, cache_enabled=False):  # one region over many steps: no stale weights
            losses = train_steps(ddp, 30, learning_rate=3e-3)
        return sum(losses[-5:]) < sum(losses[:5]) - 0.5, state.totals.compressed_steps, equal_replicas(model)


@pytest.mark.fault("autocast in bfloat16", "gradients are float32 and compressed")
def test_autocast(run_workers):
    assert run_workers(autocast, dtype=torch.bfloat16) == [(True, 30, True)] * 2
