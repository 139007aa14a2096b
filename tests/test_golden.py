"""Against torch's own hooks: the codec `none` bitwise, `low_rank` step by step."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_jobs import (
    GradientModel,
    ddp_of,
    edgc_ddp,
    gradients_for,
    same_everywhere,
    synchronized,
    tiny_gpt2,
    train_steps,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hf_edgc import EDGCConfig

SHAPES = {"a": (96, 64), "b": (64, 160), "bias": (64,), "c": (80, 80)}
DENSE_STEPS = 2  # torch refuses to start PowerSGD with error feedback before the buckets are rebuilt


def torch_power_sgd(rank, steps):
    """Averaged gradients of every step, and the bucket's parameter order and dense and sent element counts."""
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=DENSE_STEPS, random_seed=5)
    order = []

    def recording_hook(state, bucket):
        assert bucket.index() == 0 and bucket.is_last(), "powerSGD_hook works on gloo with one bucket only"
        order[:] = [tuple(gradient.shape) for gradient in bucket.gradients()]
        return powerSGD_hook(state, bucket)

    with ddp_of(GradientModel(SHAPES), recording_hook, state) as ddp:
        results = [synchronized(ddp, gradients_for(SHAPES, step, strong=rank)) for step in range(steps)]
    return results, order, state.total_numel_before_compression, state.total_numel_after_compression


def first_q(order, rank):
    """torch's first Q of each matrix: one draw a bucket, in the bucket's order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(5).randint(1_000_000_000))
        return {shape: torch.randn(shape[1], rank) for shape in order if len(shape) == 2}


def compare_power_sgd(rank):
    expected, order, dense_elements, torch_elements = torch_power_sgd(rank, DENSE_STEPS + 10)
    assert torch_elements < dense_elements, "torch did not compress"
    config = EDGCConfig(mode="static", rank=rank, factor_dtype="float32")
    worst = 0.0
    with edgc_ddp(GradientModel(SHAPES), config) as (ddp, state):
        for shape, q in first_q(order, rank).items():
            name = next(name for name, other in SHAPES.items() if other == shape)
            state.reducer.slots[f"weights.{name}"] = {"q": q}
        for step in range(DENSE_STEPS, DENSE_STEPS + 10):
            ours = synchronized(ddp, gradients_for(SHAPES, step, strong=rank))
            assert state.last.compressed and state.last.sent_bytes < state.last.dense_bytes
            for name, gradient in ours.items():
                worst = max(worst, ((gradient - expected[step][name]).norm() / expected[step][name].norm()).item())
                assert same_everywhere(gradient)
    return worst


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_low_rank_equals_torchs_power_sgd(run_workers, rank, workers):
    # Both work in float32; ten steps of feedback amplify its rounding of 1e-7.
    assert max(run_workers(compare_power_sgd, workers, rank=rank)) < 1e-4


def bitwise_none(bucket_cap_mb):
    results, buckets = [], []
    for use_ours in (False, True):
        model = tiny_gpt2()
        if use_ours:
            with edgc_ddp(model, EDGCConfig(mode="none"), bucket_cap_mb=bucket_cap_mb) as (ddp, state):
                train_steps(ddp, 5)
                assert state.totals.sent_bytes == state.totals.dense_bytes > 0
                buckets.append(state.exchange.collectives / 5)
        else:
            with ddp_of(model, allreduce_hook, dist.group.WORLD, bucket_cap_mb=bucket_cap_mb) as ddp:
                train_steps(ddp, 5)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True)), buckets[0]


def test_none_is_bitwise_allreduce_hook_with_several_buckets(run_workers):
    for equal, buckets in run_workers(bitwise_none, bucket_cap_mb=0.05):
        assert equal
        assert buckets > 3


def replicas_after_rank_changes(bucket_cap_mb):
    model = tiny_gpt2()
    config = EDGCConfig(max_rank=8, min_rank=2, rank=2, min_compression_ratio=1.0)
    with edgc_ddp(model, config, bucket_cap_mb=bucket_cap_mb) as (ddp, state):
        used = []
        for start, rank in ((0, 2), (7, 8), (14, 4)):
            state.controller._progress.ranks = [rank] * len(state.layout.matrices)
            train_steps(ddp, 7 if rank != 4 else 6, first_step=start)
            used.append(state.last.ranks)
        assert state.totals.steps == state.totals.compressed_steps == 20
        assert state.totals.sent_bytes < state.totals.dense_bytes
        return used, all(same_everywhere(parameter.detach()) for parameter in model.parameters())


def test_replicas_stay_bitwise_equal_over_rank_changes(run_workers):
    for used, equal in run_workers(replicas_after_rank_changes, bucket_cap_mb=0.05):
        assert equal
        assert [max(ranks) for ranks in used] == [2, 8, 4]
