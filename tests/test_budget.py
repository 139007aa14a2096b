"""The byte budget and per-tensor ranks, on a training in numbers: every schedule, run length and restart."""

import json
import math

import pytest
from training_model import COSTS, GPT2, SCHEDULES, Training, drive

from hf_edgc.allocation import elements
from hf_edgc.config import EDGCConfig
from hf_edgc.controller import Controller
from hf_edgc.layout import Matrix
from hf_edgc.measured import Measured
from hf_edgc.schedule import expected_rates


def deviation(sent, total, ratio):
    """How far the compression ratio is from the target, as a share."""
    return abs(COSTS.dense_bytes * total / sent / ratio - 1)


@pytest.mark.parametrize("allocation", ["per_tensor", "global"])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("total", [100, 700, 5000])
def test_the_run_ends_within_2_percent_of_its_budget(schedule, total, allocation):
    for ratio in (5.0, 20.0) if total == 700 else (12.0,):
        controller = Controller(EDGCConfig(target_compression_ratio=ratio, allocation=allocation), GPT2, total, COSTS)
        sent, _, _ = drive(controller, Training(), SCHEDULES[schedule], 0, total, total)
        assert deviation(sent, total, ratio) < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_fraction": 0.05},
        {"window_steps": 7, "entropy_every": 3},
        {"rank_step": 1},
        {"window_steps": 40},
        {"entropy_every": 1},
        {"max_rank": 20, "min_rank": 3},
    ],
)
def test_the_budget_holds_with_other_options(options):
    config = EDGCConfig(target_compression_ratio=8.0, **options)
    sent, _, _ = drive(Controller(config, GPT2, 300, COSTS), Training(), SCHEDULES["cosine"], 0, 300, 300)
    assert deviation(sent, 300, 8.0) < 0.02


def test_more_is_sent_while_the_learning_rate_is_high_and_a_constant_one_is_flat():
    def quarters(schedule, **options):
        controller = Controller(EDGCConfig(target_compression_ratio=12.0, **options), GPT2, 1000, COSTS)
        _, _, sizes = drive(controller, Training(), SCHEDULES[schedule], 0, 1000, 1000)
        return [sum(sizes[start : start + 250]) / sum(sizes) for start in range(0, 1000, 250)]

    for schedule in ("cosine", "linear"):
        exact = [
            sum(SCHEDULES[schedule](step / 1000) for step in range(start, start + 250)) for start in (0, 250, 500, 750)
        ]
        for share, wanted in zip(quarters(schedule, lr_exponent=0.5), exact, strict=True):
            assert share == pytest.approx(wanted / sum(exact), abs=0.07), "ranks go as the rate at exponent 0.5"
    assert quarters("constant") == pytest.approx([0.25] * 4, abs=0.02)
    assert quarters("cosine", lr_exponent=0.0) == pytest.approx([0.25] * 4, abs=0.02)


def test_without_a_learning_rate_spending_is_flat():
    controller = Controller(EDGCConfig(target_compression_ratio=12.0), GPT2, 400, COSTS)
    training, sizes = Training(), []
    for _ in range(400):
        grads, errors = training.step(controller.plan.ranks)
        sizes.append(elements(GPT2, controller.plan.ranks))
        norms = (math.hypot(*grads), math.hypot(*errors), None, grads, errors)
        controller.advance(Measured([-3.0] * len(GPT2), *norms) if controller.wants_entropies else None)
    assert sum(sizes[:200]) == pytest.approx(sum(sizes[200:]), rel=0.03)


@pytest.mark.parametrize("ratio, words", [(1.5, "a number from 2."), (500.0, "to 56")])
def test_a_target_that_no_rank_meets_is_refused_with_the_range(ratio, words):
    with pytest.raises(ValueError, match="target_compression_ratio") as caught:
        Controller(EDGCConfig(target_compression_ratio=ratio), GPT2, 400, COSTS)
    assert words in str(caught.value)
    with pytest.raises(ValueError, match="after 40 of 400 steps sent dense"):
        Controller(EDGCConfig(target_compression_ratio=12.0, warmup_fraction=0.1), GPT2, 400, COSTS)
    with pytest.raises(ValueError, match="no matrix to compress"):
        Controller(EDGCConfig(target_compression_ratio=12.0), [], 400)


@pytest.mark.parametrize("cut", [1, 150, 203, 391])
def test_a_restart_changes_no_rank(cut):
    def start():
        return Controller(EDGCConfig(target_compression_ratio=12.0, entropy_every=3), GPT2, 400, COSTS)

    whole, training = start(), Training()
    _, _, expected = drive(whole, training, SCHEDULES["linear"], 0, 400, 400)
    first, second, training = start(), start(), Training()
    _, _, sizes = drive(first, training, SCHEDULES["linear"], 0, cut, 400)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.plan, second.predicted_error_norm) == (first.plan, first.predicted_error_norm)
    sizes += drive(second, training, SCHEDULES["linear"], cut, 400, 400)[2]
    assert sizes == expected and second.state_dict() == whole.state_dict()


def test_another_target_after_a_restart_is_met_with_what_was_sent_before():
    first, training = Controller(EDGCConfig(target_compression_ratio=12.0), GPT2, 400, COSTS), Training()
    sent, _, _ = drive(first, training, SCHEDULES["constant"], 0, 200, 400)
    second = Controller(EDGCConfig(target_compression_ratio=15.0), GPT2, 400, COSTS)
    second.load_state_dict(first.state_dict(), same_config=False)
    sent += drive(second, training, SCHEDULES["constant"], 200, 400, 400)[0]
    assert deviation(sent, 400, 15.0) < 0.02


def test_a_window_of_dense_steps_is_made_good():
    controller, training = Controller(EDGCConfig(target_compression_ratio=8.0), GPT2, 400, COSTS), Training()
    sent, _, _ = drive(controller, training, SCHEDULES["constant"], 0, 100, 400)
    controller._progress.fallback_steps = 10  # as the watchdog sets it
    sent += drive(controller, training, SCHEDULES["constant"], 100, 400, 400)[0]
    assert deviation(sent, 400, 8.0) < 0.02


def test_the_predicted_error_is_within_20_percent_rms_of_the_measured_one():
    for schedule in ("cosine", "steps", "constant"):
        controller = Controller(EDGCConfig(target_compression_ratio=12.0, entropy_every=5), GPT2, 600, COSTS)
        _, pairs, sizes = drive(controller, Training(), SCHEDULES[schedule], 0, 600, 600)
        assert len(pairs) > 100 and len(set(sizes)) > 3, "the ranks did change"
        logs = [math.log(predicted / norm) for predicted, norm in pairs]
        assert math.sqrt(sum(log * log for log in logs) / len(logs)) < 0.2


def test_free_mode_keeps_the_bytes_of_the_rule_and_gives_them_to_those_that_gain():
    config = EDGCConfig(max_rank=8, rank=8, lr_exponent=0.0)
    controller, training = Controller(config, GPT2, 400, COSTS), Training(noise=0.0)
    drive(controller, training, SCHEDULES["constant"], 0, 400, 400)
    ranks = controller.plan.ranks
    assert controller.rank == 8 and controller.plan.rank == pytest.approx(8, abs=0.1)
    assert elements(GPT2, ranks) <= elements(GPT2, [8] * len(GPT2))

    def delay(ranks):
        others = Training(noise=0.0)
        for _ in range(300):
            grads, errors = others.step(ranks)
        rows = zip(GPT2, grads, errors, strict=True)
        return sum(matrix.dense_elements * (error / grad) ** 2 for matrix, grad, error in rows)

    assert delay(ranks) < 0.9 * delay([8] * len(GPT2)), "at no more bytes"


def test_ranks_move_by_at_most_rank_step_in_free_mode():
    config = EDGCConfig(max_rank=16, allocation="per_tensor")
    controller, training, before, largest = Controller(config, GPT2, 400, COSTS), Training(), None, 0
    for step in range(400):
        ranks = controller.plan.ranks
        if before is not None:
            largest = max(largest, max(abs(a - b) for a, b in zip(ranks, before, strict=True)))
        before = ranks
        drive(controller, training, SCHEDULES["linear"], step, step + 1, 400)
    assert largest == config.rank_step


def test_unused_unmeasured_and_overflowing_matrices():
    matrices = [Matrix(name, 256, 256, 64) for name in ("good", "unused", "unknown", "infinite")]
    controller = Controller(EDGCConfig(target_compression_ratio=16.0, entropy_every=1, window_steps=5), matrices, 200)
    start = controller.plan.ranks
    for _ in range(100):
        grads, errors = [1.0, 0.0, math.nan, math.inf], [2.0, 0.5, math.nan, math.inf]
        controller.advance(Measured([-3.0] * 4, 1.0, 2.0, 1.0, grads, errors))
    good, unused, unknown, infinite = controller.plan.ranks
    assert (unknown, infinite) == start[2:] and unused == 1 and good > start[0]


def test_a_schedule_is_recognized_by_what_it_has_done_so_far():
    def future(schedule, at, peak=0.0):
        history = [[step, SCHEDULES[schedule](step / 1000)] for step in range(0, at + 1, 50)]
        return expected_rates(history, round(1000 * peak), 1000, [at + 100, (at + 1000) / 2, 999])

    for schedule, peak in (("linear", 0.0), ("cosine", 0.0), ("warm-up, cosine", 0.1), ("warm-up, linear", 0.06)):
        for at in (300, 600, 850):
            exact = [SCHEDULES[schedule](step / 1000) for step in (at + 100, (at + 1000) / 2, 999)]
            assert future(schedule, at, peak) == pytest.approx(exact, abs=0.02)
    assert future("constant", 500) == [1.0] * 3
    assert future("steps", 650, 0.45) == pytest.approx([0.1] * 3)
    assert future("exponential", 500) == pytest.approx([math.exp(-5 * x) for x in (0.6, 0.75, 0.999)], rel=0.01)
    assert future("inverse sqrt", 500, 0.05)[0] == pytest.approx(math.sqrt(0.05 / 0.6), rel=0.05)
