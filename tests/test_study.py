"""What the notebooks compute from recorded gradients."""

import math

import numpy as np
import pytest
import torch
from ddp_jobs import tiny_gpt2

from hf_edgc import EDGCConfig
from hf_edgc.study import Gradients, decide_ranks, entropies, error_after_rank, record_gradients

CONFIG = EDGCConfig(max_rank=16, min_rank=2, window_steps=4, min_compression_ratio=1.0, lr_exponent=0.0)


def gaussian(step, scale, name="w", shape=(64, 96)):
    generator = torch.Generator().manual_seed(step)
    return Gradients(step, {name: scale * torch.randn(shape, generator=generator)})


def test_recording_trains_and_keeps_every_nth_gradient():
    model = tiny_gpt2()
    before = model.transformer.wte.weight.detach().clone()
    batches = [torch.arange(32).reshape(2, 16) + step for step in range(5)]
    records = record_gradients(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    assert [record.step for record in records] == [0, 2, 4]
    assert not torch.equal(before, model.transformer.wte.weight)
    kept = records[0].matrices
    assert all(grad.dim() == 2 for grad in kept.values()) and "transformer.ln_f.weight" not in kept
    # Tokens 0 to 31 have been read or predicted; the gradient of the first step is not that of the last one.
    assert kept["transformer.wte.weight"].norm() > 0
    assert not torch.equal(kept["transformer.wte.weight"], records[-1].matrices["transformer.wte.weight"])


def test_entropy_sees_the_scale_or_does_not():
    records = [gaussian(0, 1.0), gaussian(1, 0.5)]
    for estimator in ("histogram", "gaussian"):
        rise = entropies(records, "w", estimator, scale=10.0) - entropies(records, "w", estimator)
        assert rise == pytest.approx([math.log(10)] * 2, abs=1e-4)
    blind = [entropies(records, "w", "histogram_minmax", scale=scale) for scale in (1.0, 10.0)]
    assert blind[0] == pytest.approx(blind[1], abs=1e-3)


def test_independent_entries_follow_the_law_and_low_rank_ones_lie_below():
    real, modelled = error_after_rank(gaussian(0, 3.0, shape=(200, 300)).matrices["w"])
    assert len(real) == len(modelled) == 201 and real[0] == modelled[0] == 1.0 and real[-1] < 1e-9
    assert np.abs(real - modelled).max() < 0.02  # 200 x 300 entries; the law holds for infinitely many
    product = torch.outer(torch.arange(1.0, 201.0), torch.ones(300)) + 0.01 * torch.randn(200, 300)
    real, modelled = error_after_rank(product)
    assert real[1] < 1e-4 < modelled[1]


def test_ranks_fall_with_the_entropy_by_the_steps_allowed():
    scales = [1.0] * 4 + [math.exp(-0.5)] * 8
    ranks = decide_ranks([gaussian(step, scale) for step, scale in enumerate(scales)], CONFIG, [1e-3] * 12)
    assert ranks[:8] == [16] * 8 and ranks[8:] == [12] * 4  # one rank_step of 4 after the second window
    steady = decide_ranks([gaussian(step, 1.0) for step in range(12)], CONFIG, [1e-3] * 12)
    assert min(steady) >= 14
