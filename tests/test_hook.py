"""The hook on two real gloo workers: bytes, faults, units, agreement."""

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

SHAPES = {"a": (64, 48), "bias": (48,), "b": (80, 40), "conv": (40, 8, 3, 3)}
STATIC = EDGCConfig(mode="static", rank=4)
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.01}


def snapshot(state):
    tensors = {f"error {name}": tensor.clone() for name, tensor in state.reducer.feedback.errors.items()}
    for name, slot in state.reducer.slots.items():
        tensors |= {f"slot {name} {key}": tensor.clone() for key, tensor in slot.items()}
    return tensors


def unchanged(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def bytes_sent(factor_dtype):
    handed = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        handed.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    config = EDGCConfig(mode="static", rank=4, factor_dtype=factor_dtype)
    dist.all_reduce = counting
    try:
        with edgc_ddp(GradientModel(SHAPES), config, **SEVERAL_BUCKETS) as (ddp, state):
            synchronized(ddp, gradients_for(SHAPES, 0))
            record = state.last
    finally:
        dist.all_reduce = all_reduce
    return sum(handed), len(handed), record.sent_bytes, record.dense_bytes


def test_bytes_on_the_wire_are_the_formula(run_workers):
    # rank 4 of (64, 48), (80, 40) and (40, 72); the bias dense; one flag for each of the three matrices
    factors = 4 * (64 + 48 + 80 + 40 + 40 + 72)
    dense = 4 * (64 * 48 + 48 + 80 * 40 + 40 * 72)
    for dtype, itemsize, scales, collectives in (
        ("float32", 4, 0, 2),
        ("bfloat16", 2, 0, 3),
        ("float16", 2, 3, 3),
    ):
        for handed, count, sent, plain in run_workers(bytes_sent, factor_dtype=dtype):
            assert handed == sent == factors * itemsize + (48 + 3 + scales) * 4
            assert plain == dense
            assert count == collectives, "one collective for each round and type, whatever the buckets"


def poisoned(bad, where, scale_of_step, only_worker):
    config = EDGCConfig(rank=4, max_rank=4, entropy_every=1, min_compression_ratio=1.0)
    with edgc_ddp(GradientModel(SHAPES), config, total_steps=40, **SEVERAL_BUCKETS) as (ddp, state):
        if not scale_of_step:
            for step in range(3):
                synchronized(ddp, gradients_for(SHAPES, step))
        before, measured = snapshot(state), state.measured
        gradients = gradients_for(SHAPES, 3)
        if only_worker is None or dist.get_rank() == only_worker:
            gradients[where].view(-1)[5] = bad
        result = synchronized(ddp, gradients)
        passed = not state.last.finite and not state.last.compressed and state.last.entropy is None
        passed &= unchanged(before, snapshot(state)) and state.measured == measured
        passed &= not result[where].isfinite().all()
        finite = [name for name in SHAPES if name != where]
        for name in finite:  # the other tensors are what plain DDP gives
            torch.testing.assert_close(
                result[name].double(), average(gradients_for(SHAPES, 3)[name]), atol=2e-3, rtol=0
            )
        after = synchronized(ddp, gradients_for(SHAPES, 4))
        passed &= state.last.compressed and all(gradient.isfinite().all() for gradient in after.values())
        return bool(passed), all(same_everywhere(gradient) for gradient in after.values())


def test_a_non_finite_gradient_goes_through_and_leaves_all_state_as_it_was(run_workers):
    cases = [
        (float("inf"), "a", False, 1),
        (float("nan"), "conv", False, 0),
        (float("nan"), "bias", False, None),
        (float("-inf"), "b", True, 1),  # in the very first step
    ]
    for bad, where, first, worker in cases:
        for passed, equal in run_workers(poisoned, bad=bad, where=where, scale_of_step=first, only_worker=worker):
            assert passed and equal


def unused_parameter(everywhere):
    with edgc_ddp(GradientModel(SHAPES), STATIC, find_unused_parameters=True, **SEVERAL_BUCKETS) as (ddp, state):
        for step in range(3):
            synchronized(ddp, gradients_for(SHAPES, step))
        before = snapshot(state)
        gradients = gradients_for(SHAPES, 3)
        if everywhere or dist.get_rank() == 1:
            del gradients["b"]
        result = synchronized(ddp, gradients)
        after = snapshot(state)
        kept = all(torch.equal(before[key], after[key]) for key in before if "weights.b" in key)
        moved = not torch.equal(before["error weights.a"], after["error weights.a"])
        return result["b"], kept, moved, state.last.compressed


def test_a_parameter_unused_on_all_workers_keeps_its_error(run_workers):
    for gradient, kept, moved, compressed in run_workers(unused_parameter, everywhere=True):
        assert gradient is None and kept and moved and compressed


def test_a_parameter_unused_on_one_worker_is_still_averaged(run_workers):
    results = run_workers(unused_parameter, everywhere=False)
    assert all(not kept and moved and compressed for _, kept, moved, compressed in results)
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].abs().max() > 0


def scaled_run(scales):
    config = EDGCConfig(rank=4, max_rank=4, entropy_every=1, min_compression_ratio=1.0)
    outputs = []
    with edgc_ddp(GradientModel(SHAPES), config, total_steps=40, **SEVERAL_BUCKETS) as (ddp, state):
        for step, scale in enumerate(scales):
            state.loss_scale = lambda scale=scale: scale
            result = synchronized(ddp, gradients_for(SHAPES, step, scale=scale))
            outputs.append(
                [gradient / scale for gradient in result.values()]
                + [torch.tensor(state.measured.mean_entropy), torch.tensor(state.measured.grad_norm)]
            )
        return outputs, list(snapshot(state).values())


def test_a_changing_loss_scale_changes_nothing(run_workers):
    plain = run_workers(scaled_run, scales=[1.0] * 6)
    scaled = run_workers(scaled_run, scales=[2.0**16, 2.0**17, 2.0**17, 2.0**10, 2.0**-4, 1.0])
    for (outputs, state), (scaled_outputs, scaled_state) in zip(plain, scaled, strict=True):
        for ours, theirs in zip(outputs, scaled_outputs, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * one.abs().max().item())
        for one, other in zip(state, scaled_state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 * one.abs().max().item())


def half_precision(dtype):
    shapes = {"a": (64, 48), "b": (80, 40), "bias": (40,)}
    model = GradientModel(shapes, dtype)
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    fed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    with edgc_ddp(model, STATIC, **SEVERAL_BUCKETS) as (ddp, state):
        for step in range(12):
            gradients = gradients_for(shapes, step, scale=0.01, dtype=dtype)
            for name, gradient in synchronized(ddp, gradients).items():
                total[name] += gradient.double()
                fed[name] += average(gradients[name])
        assert all(error.dtype == torch.float32 for error in state.reducer.feedback.errors.values())
        assert state.last.sent_bytes < state.last.dense_bytes
        left = {name: average(state.reducer.feedback.errors[f"weights.{name}"]) for name in ("a", "b")}
    # What was decoded and what is left add up to what was fed, to the precision of the decoded gradients.
    return {name: ((total[name] + left[name] - fed[name]).norm() / fed[name].norm()).item() for name in left}


def test_half_precision_gradients_keep_errors_in_float32(run_workers):
    for dtype, tolerance in ((torch.bfloat16, 2**-7), (torch.float16, 2**-9)):
        for differences in run_workers(half_precision, dtype=dtype):
            assert max(differences.values()) < tolerance


def disagree(what):
    rank = dist.get_rank()
    config = EDGCConfig(mode="static", rank=2 + rank if what == "config" else 2)
    shapes = {"a": (64, 48 + (rank if what == "model" else 0))}
    steps = 10 + (rank if what == "steps" else 0)
    try:
        from hf_edgc import EDGCState

        EDGCState(config, GradientModel(shapes).named_parameters(), total_steps=steps)
    except RuntimeError as error:
        return str(error)
    return None


def test_workers_that_differ_are_told_so_before_training(run_workers):
    for what, named in (("config", "EDGCConfig"), ("model", "model parameters"), ("steps", "total_steps")):
        for message in run_workers(disagree, what=what):
            assert f"differ in: {named}." in message
    assert run_workers(disagree, what="nothing") == [None, None]


def warmup_then_ranks():
    config = EDGCConfig(
        max_rank=8,
        window_steps=4,
        entropy_every=2,
        warmup_fraction=0.1,
        warmup_max_fraction=0.2,
        min_compression_ratio=1,
    )
    records = []
    generator_state = torch.get_rng_state()
    model = tiny_gpt2()
    torch.set_rng_state(generator_state)
    with edgc_ddp(model, config, total_steps=40, **SEVERAL_BUCKETS) as (ddp, state):
        state.on_record = records.append
        train_steps(ddp, 40)
        untouched = torch.equal(generator_state, torch.get_rng_state())
        return [record.to_dict() for record in records], untouched, state.totals.compression_ratio


def test_dense_warm_up_then_compression_with_entropies_and_no_global_randomness(run_workers):
    first, second = run_workers(warmup_then_ranks)
    records, untouched, ratio = first
    phases = [record["phase"] for record in records]
    warm = phases.count("warmup")
    assert 4 <= warm <= 8 and phases == ["warmup"] * warm + ["compress"] * (40 - warm)
    assert all(record["compressed"] == (record["phase"] == "compress") for record in records)
    for record in records:
        assert (record["entropy"] is not None) == (record["step"] % 2 == 0)
        if record["compressed"]:
            assert 0 < record["sent_bytes"] < record["dense_bytes"]
        else:
            assert record["sent_bytes"] >= record["dense_bytes"]
    assert untouched and ratio > 1
    same = ("step", "phase", "rank", "ranks", "entropy", "sent_bytes")
    assert [[record[key] for key in same] for record in second[0]] == [
        [record[key] for key in same] for record in records
    ]


def losses(mode, error_feedback=True):
    config = EDGCConfig(
        mode=mode, rank=2, max_rank=2, min_rank=1, min_compression_ratio=1, error_feedback=error_feedback
    )
    with edgc_ddp(tiny_gpt2(), config, **SEVERAL_BUCKETS) as (ddp, state):
        curve = train_steps(ddp, 60, learning_rate=3e-3)
        return sum(curve[-10:]) / 10, curve[0], state.totals.compression_ratio


def test_compressed_training_learns_as_dense_training_does(run_workers):
    dense, start, _ = run_workers(losses, mode="none")[0]
    compressed, _, ratio = run_workers(losses, mode="static")[0]
    assert ratio > 5
    assert dense < start - 1.0
    assert compressed < start - 0.9 * (start - dense)


def different_learning_rates():
    config = EDGCConfig(max_rank=16, min_rank=1, window_steps=3, entropy_every=1, min_compression_ratio=1.0)
    with edgc_ddp(GradientModel(SHAPES), config, total_steps=40) as (ddp, state):
        ranks = []
        for step in range(20):
            # Worker 1 decays, worker 0 does not; if each decided for itself, their messages would differ in size.
            rate = 1.0 / (1 + step * dist.get_rank())
            state.learning_rate = lambda rate=rate: rate
            synchronized(ddp, gradients_for(SHAPES, step))
            ranks.append(state.last.ranks)
        return ranks


def test_workers_with_different_learning_rates_still_decide_the_same(run_workers):
    first, second = run_workers(different_learning_rates)
    assert first == second and first[-1] < first[0]
