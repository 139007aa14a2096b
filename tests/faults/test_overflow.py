"""Gradients that are not finite, huge or tiny, with torch's own GradScaler."""

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import GradientModel, average, edgc_ddp, gradients_for, same_everywhere, synchronized

from hf_edgc import EDGCConfig

SHAPES = {"a": (64, 48), "bias": (48,), "b": (80, 40), "conv": (40, 8, 3, 3)}
BUCKETS = {"bucket_cap_mb": 0.01}
OPTIONS = {"max_rank": 4, "min_rank": 1, "entropy_every": 1, "window_steps": 20, "min_compression_ratio": 1.0}


def memory_of(state, model):
    """All that an overflow must not change."""
    tensors = {f"error {name}": error for name, error in state.reducer.feedback.errors.items()}
    tensors |= {f"slot {name} {key}": t for name, slot in state.reducer.slots.items() for key, t in slot.items()}
    tensors |= {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in tensors.items()}, state.measured


def same(before, after):
    (ours, measured), (theirs, measured_now) = before, after
    return (
        ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours) and measured == measured_now
    )


def scaled_training(
    bad=None, where="a", bad_workers=(0,), bad_step=4, steps=14, init_scale=2.0**10, growth=1000, **options
):
    """Train with a real GradScaler on scaled losses; what the bad step did, and the weights."""
    model = GradientModel(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth)
    untouched, scales = True, []
    with edgc_ddp(model, EDGCConfig(**{**OPTIONS, **options}), 40, **BUCKETS) as (ddp, state):
        state.loss_scale = scaler.get_scale
        for step in range(steps):
            gradients = gradients_for(SHAPES, step)
            if bad is not None and step == bad_step and dist.get_rank() in bad_workers:
                gradients[where].view(-1)[7] = bad
            before = memory_of(state, model)
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
            scaler.scale(ddp(gradients)).backward()
            scaler.step(optimizer)
            scaler.update()
            if bad is not None and step == bad_step:
                untouched = same(before, memory_of(state, model)) and not (state.last.compressed and state.last.finite)
                untouched = untouched and scaler.get_scale() == scales[-1] / 2
        compressed = state.totals.compressed_steps
        errors_finite = all(error.isfinite().all() for error in state.reducer.feedback.errors.values())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    equal = all(same_everywhere(weight) and weight.isfinite().all() for weight in weights)
    return {
        "untouched": untouched,
        "compressed": compressed,
        "equal": equal and errors_finite,
        "weights": weights,
        "scales": scales,
    }


CASES = [
    ("inf on one worker", {"bad": float("inf"), "bad_workers": (1,)}),
    ("NaN on one worker", {"bad": float("nan"), "where": "conv", "bad_workers": (0,)}),
    ("-inf on both workers", {"bad": float("-inf"), "bad_workers": (0, 1)}),
    ("NaN in the first compressed step", {"bad": float("nan"), "bad_step": 0, "bad_workers": (1,)}),
    ("inf in a 1-D tensor only", {"bad": float("inf"), "where": "bias", "bad_workers": (0,)}),
]


@pytest.mark.fault(
    "inf or NaN on one worker, on both, in the first compressed step, in a 1-D tensor only",
    "the scaler skips the step and halves its scale; errors, factors and statistics are bitwise as before",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_scaler_skips_an_overflow(run_workers, case):
    for worker in run_workers(scaled_training, **case[1]):
        assert worker["untouched"] and worker["equal"]
        assert worker["compressed"] == 13, "all other steps are compressed"


@pytest.mark.fault(
    "inf during the dense warm-up", "the scaler skips the step as with plain DDP; compression starts as planned"
)
def test_overflow_in_the_warm_up(run_workers):
    warmup = {"warmup_fraction": 0.1, "warmup_max_fraction": 0.1}  # 4 of 40 steps
    for worker in run_workers(scaled_training, bad=float("inf"), bad_step=2, bad_workers=(1,), **warmup):
        assert worker["untouched"] and worker["equal"] and worker["compressed"] == 10


@pytest.mark.fault("the loss scale grows and shrinks", "the result is that of the run without scaling, to rounding")
def test_a_changing_loss_scale_changes_nothing(run_workers):
    exact = {"factor_dtype": "float32"}  # bfloat16 would round what differs in float32's last digit
    plain = run_workers(scaled_training, init_scale=1.0, **exact)
    for case in ({"init_scale": 2.0**-6, "growth": 2}, {"init_scale": 2.0**14, "growth": 3}):
        for one, other in zip(plain, run_workers(scaled_training, **case, **exact), strict=True):
            assert len(set(other["scales"])) >= 4
            for left, right in zip(one["weights"], other["weights"], strict=True):
                # Powers of two change no mantissa; what remains is rounding near the end of float32's range.
                torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4 * left.abs().max().item())


def magnitudes(scale, factor_dtype="float32", steps=11):
    shapes = {"a": (64, 48), "b": (80, 40)}
    decoded = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    fed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    config = EDGCConfig(**OPTIONS, factor_dtype=factor_dtype, watchdog_error_ratio=0.0, watchdog_grad_growth=0.0)
    with edgc_ddp(GradientModel(shapes), config, 40, **BUCKETS) as (ddp, state):
        for step in range(steps):
            gradients = gradients_for(shapes, step, scale=scale)
            for name, gradient in synchronized(ddp, gradients).items():
                decoded[name] += gradient.double()
                fed[name] += average(gradients[name])
        left = {name: average(state.reducer.feedback.errors[f"weights.{name}"]) for name in shapes}
        compressed = state.totals.compressed_steps
    lost = {name: ((decoded[name] + left[name] - fed[name]).norm() / fed[name].norm()).item() for name in shapes}
    return compressed, max(lost.values()), all(same_everywhere(total) for total in decoded.values())


@pytest.mark.fault(
    "gradients of 1e30, 1e-30, and denormal ones; float16 factors of gradients of 4e4 and 1e30",
    "compressed as any other; nothing overflows, decoded gradients and errors add up to what went in",
)
@pytest.mark.parametrize(
    "scale, dtype, tolerance",
    [
        (1e27, "float32", 1e-5),  # entries up to 1e30: 20 * normal * normal + noise, times the scale
        (1e-32, "float32", 1e-5),
        (1e-42, "float32", 0.05),  # denormals have few bits
        (4e4, "float16", 2e-3),
        (1e27, "float16", 2e-3),
        (1e-32, "bfloat16", 1e-2),
    ],
)
def test_extreme_magnitudes(run_workers, scale, dtype, tolerance):
    for compressed, lost, equal in run_workers(magnitudes, scale=scale, factor_dtype=dtype):
        assert compressed == 11 and equal
        assert lost < tolerance
