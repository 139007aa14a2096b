"""DAC's decisions from given numbers: warm-up, window, target, step limit, determinism, state."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_edgc.config import EDGCConfig
from hf_edgc.controller import Controller
from hf_edgc.layout import Matrix
from hf_edgc.measured import Measured
from hf_edgc.rank_model import ef_rank, paper_rank, relative_error

WIDE = Matrix("wide", 768, 3072, max_rank=300)
SMALL = Matrix("small", 64, 96, max_rank=10)


def run(controller, entropies, steps, learning_rate=1.0):
    """Ranks used in ``steps`` steps; ``entropies(step)`` gives nats for every matrix."""
    ranks = []
    for step in range(steps):
        ranks.append(controller.plan.rank)
        measured = entropies(step) if controller.wants_entropies else None
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        controller.advance(None if measured is None else Measured(measured, 1.0, 0.0, rate))
    return ranks


def config(**options):
    defaults = {"max_rank": 32, "window_steps": 10, "entropy_every": 5, "lr_exponent": 0.0, "allocation": "global"}
    return EDGCConfig(**{**defaults, **options})


def test_constant_entropy_keeps_the_rank():
    controller = Controller(config(rank=20), [WIDE])
    assert run(controller, lambda step: [-3.0], 100) == [20] * 100
    assert controller.target_rank == pytest.approx(20, abs=1e-6)


@pytest.mark.parametrize("model, rule", [("ef", ef_rank), ("paper", paper_rank)])
def test_the_target_is_the_error_models(model, rule):
    drop = 0.3 if model == "ef" else 0.005
    controller = Controller(config(rank=20, error_model=model), [WIDE])
    run(controller, lambda step: [-3.0 if step < 10 else -3.0 - drop], 20)
    assert controller.target_rank == pytest.approx(rule(20, -3.0, -3.0 - drop, 768, 3072))
    assert 8 < controller.target_rank < 20


def test_falling_entropy_lowers_the_rank_by_at_most_rank_step_to_an_even_rank_within_bounds():
    controller = Controller(config(), [WIDE])
    ranks = run(controller, lambda step: [-0.05 * step], 200)
    assert ranks[:20] == [32] * 20, "the first window is the reference"
    steps = [later - now for now, later in itertools.pairwise(ranks)]
    assert {change for change in steps if change} <= {-2, -4} and -4 in steps
    assert ranks[-1] == 8, "min_rank is max_rank / 4"
    assert all(rank % 2 == 0 for rank in ranks)
    # decisions fall at the ends of windows only
    assert all((index + 1) % 10 == 0 for index, change in enumerate(steps) if change)


@pytest.mark.parametrize("rank, rank_step", [(8, 1), (9, 2), (20, 3)])
def test_any_rank_step_moves_and_is_kept_to(rank, rank_step):
    controller = Controller(config(rank=rank, min_rank=1, rank_step=rank_step), [WIDE])
    ranks = run(controller, lambda step: [-0.05 * step], 400)
    assert max(abs(later - now) for now, later in itertools.pairwise(ranks)) == rank_step
    assert ranks[-1] == 1


def test_a_first_measurement_that_is_not_finite_does_not_disable_the_error_test():
    options = {"warmup_fraction": 0.1, "entropy_every": 1}
    controller = Controller(config(**options), [WIDE], total_steps=200)
    assert run(controller, lambda step: [math.nan if step < 2 else -1.0 * step], 200).count(0) == 20


def test_rising_entropy_raises_the_rank_to_max_rank():
    controller = Controller(config(rank=8), [WIDE])
    assert run(controller, lambda step: [0.05 * step], 200)[-1] == 32


def test_the_learning_rate_falling_lowers_the_rank_under_ef_only():
    def decay(step):
        return max(1.0 - step / 200, 0.0)

    falling = run(Controller(config(lr_exponent=0.5), [WIDE]), lambda step: [-3.0], 200, decay)
    assert falling[-1] == 8
    assert run(Controller(config(lr_exponent=0.0), [WIDE]), lambda step: [-3.0], 200, decay)[-1] == 32
    paper = Controller(config(lr_exponent=0.5, error_model="paper"), [WIDE])
    assert run(paper, lambda step: [-3.0], 200, decay)[-1] == 32


def test_the_learning_rate_is_compared_with_its_peak_so_that_a_linear_warm_up_changes_nothing():
    rising = run(Controller(config(lr_exponent=0.5), [WIDE]), lambda step: [-3.0], 100, lambda step: step / 100)
    assert rising == [32] * 100


def test_one_rank_for_all_is_the_mean_of_their_targets_by_bytes_and_capped_for_each():
    controller = Controller(config(rank=20), [WIDE, SMALL])
    run(controller, lambda step: [-3.0 if step < 10 else -3.2, -1.0], 20)
    wide, small = ef_rank(20, -3.0, -3.2, 768, 3072), ef_rank(10, -1.0, -1.0, 64, 96)
    assert controller.target_rank == pytest.approx((wide * 3840 + small * 160) / 4000)
    assert controller.plan.ranks == (controller.rank, 10)


def test_entropies_that_are_not_finite_are_left_out():
    controller = Controller(config(rank=20), [WIDE, SMALL])
    run(controller, lambda step: [-3.0 if step < 10 else -3.2, -math.inf if step % 2 else math.nan], 20)
    assert controller.target_rank == pytest.approx(ef_rank(20, -3.0, -3.2, 768, 3072))
    nothing = Controller(config(rank=20), [WIDE])
    assert run(nothing, lambda step: [math.nan], 60) == [20] * 60


def test_warm_up_has_a_floor_ends_by_the_error_test_and_has_a_ceiling():
    options = {"warmup_fraction": 0.1, "warmup_max_fraction": 0.3, "entropy_every": 1}
    # sigma must fall by sqrt(rho(32) / rho(8)) for the error at 8 to pass below the first error at 32
    needed = 0.5 * math.log(relative_error(8, 768, 3072) / relative_error(32, 768, 3072))

    def dense_steps(entropies):
        return run(Controller(config(**options), [WIDE], total_steps=200), entropies, 200).count(0)

    assert dense_steps(lambda step: [0.0]) == 60
    assert dense_steps(lambda step: [0.0 if step < 30 else -1.01 * needed]) == 31
    assert dense_steps(lambda step: [0.0 if step < 30 else -0.99 * needed]) == 60
    assert dense_steps(lambda step: [-1.0 * step]) == 20


def test_static_keeps_its_rank_and_none_never_compresses():
    static = Controller(config(mode="static", rank=6, warmup_fraction=0.1), [WIDE], total_steps=100)
    assert not static.wants_entropies
    assert run(static, None, 100) == [0] * 10 + [6] * 90
    none = Controller(config(mode="none"), [])
    assert run(none, None, 20) == [0] * 20 and none.phase == "off"


def test_without_a_matrix_to_compress_it_is_off():
    controller = Controller(config(), [])
    assert controller.phase == "off" and not controller.wants_entropies and not controller.plan.compress


def test_window_default_is_a_twentieth_of_the_run_and_at_most_1000():
    options = EDGCConfig()
    assert [options.window(steps) for steps in (None, 10, 400, 100_000)] == [1000, 1, 20, 1000]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 120),
    st.lists(st.floats(-5, 5), min_size=200, max_size=200),
    st.sampled_from(["ef", "paper"]),
)
def test_state_dict_resumes_exactly(cut, walk, model):
    options = config(error_model=model, warmup_fraction=0.1, entropy_every=3, window_steps=7, lr_exponent=0.5)

    def entropies(step):
        return [sum(walk[: step + 1]) / 10, walk[step]]

    matrices = [WIDE, SMALL]
    whole = Controller(options, matrices, total_steps=200)
    expected = run(whole, entropies, 200, lambda step: 1 - step / 200)
    first = Controller(options, matrices, total_steps=200)
    ranks = run(first, entropies, cut, lambda step: 1 - step / 200)
    second = Controller(options, matrices, total_steps=200)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    ranks += run(second, lambda step: entropies(step + cut), 200 - cut, lambda step: 1 - (step + cut) / 200)
    assert ranks == expected


def test_a_state_of_another_model_is_read_by_name():
    saved = Controller(config(rank=20), [WIDE, SMALL])
    run(saved, lambda step: [-3.0, -1.0], 20)
    other = Controller(config(rank=20), [SMALL, Matrix("new", 512, 512, 100)])
    other.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert other.step == 20
    run(other, lambda step: [-1.2, -7.0], 10)  # "new" has no reference, so only "small" speaks
    assert other.target_rank == pytest.approx(ef_rank(10, -1.0, -1.2, 64, 96))


def test_another_config_keeps_step_and_phase_and_starts_its_own_ranks():
    saved = Controller(config(rank=20, warmup_fraction=0.1), [WIDE], total_steps=100)
    run(saved, lambda step: [-3.0], 40)
    other = Controller(config(rank=12, warmup_fraction=0.1), [WIDE], total_steps=100)
    other.load_state_dict(saved.state_dict(), same_config=False)
    assert (other.step, other.phase, other.plan.rank) == (40, "compress", 12)


def test_a_state_of_another_version_is_refused():
    for broken in ({"unknown": 1}, {"matrices": [], "unknown": 1}):
        with pytest.raises(ValueError, match="does not fit this version"):
            Controller(config(), [WIDE]).load_state_dict(broken)


def test_the_watchdog_goes_dense_for_a_window_and_tries_again():
    def phases(numbers, **options):
        controller, alarms, seen = Controller(config(**options), [WIDE]), [], []
        for step in range(60):
            seen.append(controller.phase)
            measured = Measured([-3.0], *numbers(step), 1.0) if controller.wants_entropies else None
            if alarm := controller.advance(measured):
                alarms.append((step, alarm))
        return seen, alarms

    seen, alarms = phases(lambda step: (1.0, 150.0 if step == 20 else 5.0))
    assert seen == ["compress"] * 21 + ["fallback"] * 10 + ["compress"] * 29
    assert alarms == [(20, alarms[0][1])] and "the errors have 150 gradient norms" in alarms[0][1]
    seen, alarms = phases(lambda step: (2.0 if step < 20 else 300.0, 1.0))
    assert [step for step, _ in alarms] == [20, 35, 50], "it falls back again if it is no better"
    assert "the gradient norm has grown 150 times to 300" in alarms[0][1]
    off = {"watchdog_error_ratio": 0.0, "watchdog_grad_growth": 0.0}
    assert phases(lambda step: (10.0**step, 10.0**step * 1000), **off) == (["compress"] * 60, [])
    assert phases(lambda step: (math.nan, math.inf))[1] == [], "an overflow is not a divergence"
