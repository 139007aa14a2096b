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


def collectives_of(**options):
    config = EDGCConfig(window_steps=4, entropy_every=2, min_compression_ratio=1.0, **options)
    with edgc_ddp(tiny_gpt2(), config, total_steps=40, **SEVERAL_BUCKETS) as (ddp, state):
        records = []
        state.on_record = records.append
        before = state.exchange.collectives
        train_steps(ddp, 40)
        return state.exchange.collectives - before, [record.to_dict() for record in records]


def test_per_tensor_ranks_need_no_further_collective_and_are_the_same_everywhere(run_workers):
    mine = run_workers(collectives_of, max_rank=8)
    alike = run_workers(collectives_of, max_rank=8, allocation="global")
    assert [count for count, _ in mine] == [count for count, _ in alike] == [3 * 40] * 2, (
        "P and Q in bfloat16, the rest in float32"
    )
    (_, records), (_, others) = mine
    assert [record["ranks"] for record in records] == [record["ranks"] for record in others]
    assert len(set(records[-1]["ranks"])) > 2, "the matrices have ranks of their own"
    assert all(len(set(record["ranks"])) == 1 for record in alike[0][1])
    predicted = [(record["predicted_error_norm"], record["error_norm"]) for record in records if record["entropy"]]
    known = [(model, norm) for model, norm in predicted if model is not None]
    assert len(known) > 10 and all(0.5 < model / norm < 2.0 for model, norm in known)


def test_the_budget_is_met_on_the_wire(run_workers):
    for _, records in run_workers(collectives_of, target_compression_ratio=9.0):
        ratio = sum(record["dense_bytes"] for record in records) / sum(record["sent_bytes"] for record in records)
        assert abs(ratio / 9.0 - 1) < 0.02
