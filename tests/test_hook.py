"""The hook on two real gloo workers: bytes, faults, units, agreement."""

import torch
import torch.distributed as dist
from ddp_jobs import (
    GradientModel,
    edgc_ddp,
    gradients_for,
    synchronized,
    tiny_gpt2,
    train_steps,
)

from hf_edgc import EDGCConfig

SHAPES = {"a": (64, 48), "bias": (48,), "b": (80, 40), "conv": (40, 8, 3, 3)}
STATIC = EDGCConfig(mode="static", rank=4)
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.01}


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
    # rank 4 of (64, 48), (80, 40) and (40, 72); the bias dense; a flag for each matrix; 8 of a fingerprint
    factors = 4 * (64 + 48 + 80 + 40 + 40 + 72)
    dense = 4 * (64 * 48 + 48 + 80 * 40 + 40 * 72)
    for dtype, itemsize, scales, collectives in (
        ("float32", 4, 0, 2),
        ("bfloat16", 2, 0, 3),
        ("float16", 2, 3, 3),
    ):
        for handed, count, sent, plain in run_workers(bytes_sent, factor_dtype=dtype):
            assert handed == sent == factors * itemsize + (48 + 3 + 8 + scales) * 4
            assert plain == dense
            assert count == collectives, "one collective for each round and type, whatever the buckets"


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
