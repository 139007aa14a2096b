"""codec=auto on two real workers whose link is said to be slow or fast: trial, decision, and what is sent then."""

from unittest import mock

import pytest
from ddp_jobs import GradientModel, average, edgc_ddp, gradients_for, listening, same_everywhere, synchronized

from hf_edgc import EDGCConfig
from hf_edgc.cost import CodecCost, Link
from hf_edgc.trial import COMPRESSED_STEPS, DENSE_STEPS, TRIAL_STEPS

SHAPES = {"a": (64, 48), "b": (80, 40), "bias": (48,)}


def trained(bytes_per_s, steps, options=None):
    """Steps with a link and codec of known cost; what was sent, and whether anything was lost."""
    config = EDGCConfig(codec="auto", **{"mode": "static", "rank": 4, "factor_dtype": "float32", **(options or {})})
    costs = [CodecCost(1e-5, 0.0)] * 2
    lost = 0.0
    with (
        mock.patch("hf_edgc.advice.measure_link", lambda *_: Link(1e-4, bytes_per_s)),
        mock.patch("hf_edgc.advice.measure_codec", lambda *_: costs),
        # In real steps this small model's codec takes as long as its Python code: not what is tested here.
        mock.patch("hf_edgc.cost.CostModel.in_training", lambda model, **_: model),
        listening() as told,
        edgc_ddp(GradientModel(SHAPES), config, total_steps=1000) as (ddp, state),
    ):
        records = []
        for step in range(steps):
            gradients = gradients_for(SHAPES, step)
            before = {
                name: average(state.reducer.feedback.errors.get(f"weights.{name}", 0 * g))
                for name, g in gradients.items()
            }
            means = synchronized(ddp, gradients)
            for name, gradient in gradients.items():
                left = average(state.reducer.feedback.errors.get(f"weights.{name}", 0 * gradient))
                difference = before[name] + average(gradient) - left - means[name].double()
                lost = max(lost, difference.abs().max().item() / average(gradient).abs().max().item())
            assert all(same_everywhere(mean) for mean in means.values())
            records.append((state.last.compressed, state.last.ranks, state.last.sent_bytes))
        return records, lost, state.link_report, list(told), len(state.reducer.feedback.errors)


@pytest.mark.parametrize("bytes_per_s, pays", [(1e6, True), (1e12, False)])
def test_a_slow_link_is_compressed_and_a_fast_one_is_not(run_workers, bytes_per_s, pays):
    results = run_workers(trained, bytes_per_s=bytes_per_s, steps=TRIAL_STEPS + 3)
    dense_bytes = 4 * (64 * 48 + 80 * 40 + 48)
    for records, lost, report, _, errors in results:
        in_trial = [compressed for compressed, _, _ in records[:TRIAL_STEPS]]
        assert in_trial == [False] * DENSE_STEPS + [True] * COMPRESSED_STEPS
        assert lost < 1e-5, "what is left of compressed steps is sent with the first dense one"
        for _, ranks, sent in records[TRIAL_STEPS + 1 :]:
            assert ranks == ((4, 4) if pays else (0, 0))
            assert (sent < dense_bytes / 2) if pays else (sent == dense_bytes)
        assert errors == (2 if pays else 0)
        assert report["compressed_matrices"] == (2 if pays else 0)
        assert (report["compressed_s"] < report["dense_s"]) == pays
        assert (report["link_mbit_per_s"] < report["break_even_mbit_per_s"]) == pays
    told = [line for line in results[0][3] if "codec auto" in line]
    assert len(told) == 1 and ("compressing 2 of 2" if pays else "sending dense") in told[0]
    assert results[0][2] == results[1][2], "decided on the same numbers"


def test_the_paper_takes_max_rank_from_the_break_even(run_workers):
    """With the paper's error model, max_rank is where compressed time reaches dense time, min_rank a quarter of it."""
    options = {
        "mode": "edgc",
        "rank": None,
        "error_model": "paper",
        "allocation": "global",
        "min_compression_ratio": 1.0,
    }
    for _, _, report, _, _ in run_workers(trained, bytes_per_s=1e6, steps=TRIAL_STEPS + 1, options=options):
        # A step's bytes at rank r against dense ones, at 1 MB/s: 232 r + ... elements; the codec takes 20 us more.
        assert report["max_rank"] == report["break_even_rank"] > 4
        assert EDGCConfig().rank_range(report["max_rank"]) == (report["max_rank"] // 4, report["max_rank"])


def test_ranks_stay_where_no_rank_pays(run_workers):
    """They are tried again in the next trial, when the link may be slower."""
    for _, _, report, _, _ in run_workers(
        trained, bytes_per_s=1e12, steps=TRIAL_STEPS + 1, options={"mode": "edgc", "rank": None}
    ):
        assert report["break_even_rank"] == 0 and report["compressed_matrices"] == 0
        assert report["max_rank"] is None


def measured_report():
    with edgc_ddp(GradientModel(SHAPES), EDGCConfig(codec="auto"), total_steps=1000) as (ddp, state):
        for step in range(TRIAL_STEPS + 1):
            synchronized(ddp, gradients_for(SHAPES, step))
        return state.link_report


def test_the_link_is_really_measured(run_workers):
    first, second = run_workers(measured_report)
    assert first == second
    assert first["link_mbit_per_s"] > 0 and first["link_latency_s"] > 0 and first["codec_s"] > 0
    assert first["compressed_matrices"] == 0, "some kilobytes over loopback are not worth a product"
