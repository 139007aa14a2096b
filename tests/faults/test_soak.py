"""Random runs: sizes, buckets, ranks, delays, and faults in any order; replicas are bitwise equal after each."""

import random

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import GradientModel, edgc_ddp, gradients_for, same_everywhere
from soak_jobs import passed, soak_run

from hf_edgc import EDGCConfig

SHAPES = {"a": (64, 48), "b": (80, 40), "bias": (48,), "conv": (24, 8, 3, 3)}


@pytest.mark.fault(
    "collectives are delayed at random, with several buckets, any sizes and ranks",
    "nothing; 200 runs with benchmarks/soak.py",
)
@pytest.mark.parametrize("seed", range(20))
def test_soak(run_workers, seed):
    assert passed(run_workers(soak_run, seed=seed))


def sequence(seed):
    """Thirty steps with a fault in most of them, in an order fixed by ``seed`` and the same on all workers."""
    dice = random.Random(seed)
    config = EDGCConfig(max_rank=8, min_rank=1, rank_step=8, window_steps=3, entropy_every=1, min_compression_ratio=1.0)
    model = GradientModel(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    equal = True
    with edgc_ddp(model, config, 100, find_unused_parameters=True, bucket_cap_mb=0.01) as (ddp, state):
        state.loss_scale = scaler.get_scale
        for step in range(30):
            event = dice.choice(["none", "inf", "nan", "zero", "tiny", "huge", "unused", "unused here", "window ends"])
            victim, name = dice.randrange(dist.get_world_size()), dice.choice(list(SHAPES))
            here = dist.get_rank() == victim
            gradients = gradients_for(SHAPES, step, scale={"tiny": 1e-30, "huge": 1e25, "zero": 0.0}.get(event, 1.0))
            if event in ("inf", "nan") and here:
                gradients[name].view(-1)[3] = float(event)
            if event == "unused" or (event == "unused here" and here):
                del gradients[name]
            if event == "window ends":
                state.controller._progress.window_position = 2
            optimizer.zero_grad()
            scaler.scale(ddp(gradients)).backward()
            scaler.step(optimizer)
            scaler.update()
            equal = equal and all(same_everywhere(parameter.detach()) for parameter in model.parameters())
        finite = all(error.isfinite().all() for error in state.reducer.feedback.errors.values())
        return bool(equal and finite), state.totals.compressed_steps


@pytest.mark.fault(
    "any sequence of overflows, zero, tiny, huge and missing gradients, rank changes", "replicas stay bitwise equal"
)
@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_faults(run_workers, seed):
    for equal, compressed in run_workers(sequence, seed=seed):
        assert equal and compressed >= 1
