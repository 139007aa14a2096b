"""Link, cost model and break-even: what codec=auto decides from, on a fake exchange whose link is known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_edgc.cost import CodecCost, CostModel, Link
from hf_edgc.layout import Matrix
from hf_edgc.link import LARGE_BYTES, SMALL_BYTES, measure_codec, measure_link

CPU = torch.device("cpu")


class FakeExchange:
    """One worker of several; an all-reduce moves a clock on by latency and size over bandwidth, less a burst."""

    def __init__(self, latency_s, bytes_per_s, burst_bytes=0):
        self.latency_s, self.bytes_per_s, self.burst_bytes = latency_s, bytes_per_s, burst_bytes
        self.now_s = 0.0
        self.sizes = []

    def gather_ints(self, values, device):
        # Another worker is always a little faster.
        return [list(values), [max(0, value - 10) for value in values]]

    def mean_later(self, tensor):
        size = tensor.numel() * tensor.element_size()
        self.sizes.append(size)
        self.now_s += self.latency_s + max(0, size - self.burst_bytes) / self.bytes_per_s
        future = torch.futures.Future()
        future.set_result(tensor)
        return future

    def link(self):
        return measure_link(self, CPU, clock=lambda: self.now_s, sleep=lambda seconds: None)


@pytest.mark.parametrize("rate", [12.5e6, 125e6, 10e9])
def test_the_link_is_measured(rate):
    exchange = FakeExchange(3e-4, rate)
    link = exchange.link()
    assert link.latency_s == pytest.approx(3e-4, rel=0.02)  # but for its own 4 bytes
    assert link.bytes_per_s == pytest.approx(rate, rel=1e-2)
    assert link.seconds(10**8) == pytest.approx(3e-4 + 10**8 / rate, rel=1e-2)
    assert {SMALL_BYTES, LARGE_BYTES} <= set(exchange.sizes), "two sizes were sent"


def test_a_burst_is_seen():
    link = FakeExchange(3e-4, 25e6, burst_bytes=2**20).link()
    assert link.bytes_per_s == pytest.approx(25e6, rel=1e-3)
    assert link.seconds(5 * 2**20) == pytest.approx(3e-4 + 4 * 2**20 / 25e6, rel=1e-2)
    assert link.seconds(1000) == pytest.approx(3e-4, rel=1e-2), "no less than the latency"


def model(link, matrices, fixed_s=1e-3, per_rank_s=2e-5, **more):
    sizes = [4 * matrix.dense_elements for matrix in matrices]
    return CostModel(link, matrices, sizes, 10_000, [CodecCost(fixed_s, per_rank_s)] * len(matrices), 4, **more)


MATRICES = [Matrix(f"m{i}", 512, 2048, 200) for i in range(6)]


@pytest.mark.parametrize("hidden_s", [0.0, 5e-3])
@pytest.mark.parametrize("latency_s", [1e-5, 2e-3])
def test_the_plan_flips_at_the_computed_break_even(latency_s, hidden_s):
    def at(rate):
        return model(FakeExchange(latency_s, rate).link(), MATRICES, hidden_s=hidden_s)

    ranks = at(1e9).at_rank(16)
    rate = at(1e8).break_even_bytes_per_s(ranks)
    assert 1e7 < rate < 1e11
    assert at(0.97 * rate).paying(ranks) == ranks
    assert at(1.03 * rate).paying(ranks) == (0,) * 6
    assert at(rate).compressed_s(ranks) == pytest.approx(at(rate).dense_s(), rel=2e-2)


def test_each_matrix_is_looked_at_on_its_own():
    thin = Matrix("thin", 8, 2048, 3)  # too small to pay for the fixed part of its cost
    mixed = model(Link(1e-4, 125e6), [*MATRICES, thin], fixed_s=1e-3)
    assert mixed.paying(mixed.at_rank(16)) == (16,) * 6 + (0,)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1e6, 1e11),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-2),
    st.floats(0, 1e-3),
    st.floats(0, 0.1),
    st.integers(1, 250),
)
def test_what_is_chosen_is_never_predicted_slower_than_dense(rate, latency_s, fixed_s, per_rank_s, hidden_s, rank):
    cost = model(Link(latency_s, rate), MATRICES, fixed_s, per_rank_s, hidden_s=hidden_s)
    assert cost.compressed_s(cost.paying(cost.at_rank(rank))) <= cost.dense_s()
    # DAC's max_rank by trying them all.
    times = {each: cost.compressed_s(cost.at_rank(each)) for each in range(1, 201)}
    assert cost.break_even_rank() == max((each for each, s in times.items() if s <= cost.dense_s()), default=0)


def test_bytes_are_those_of_the_codec():
    from hf_edgc.codecs import LowRank

    cost = model(Link(1e-4, 1e8), MATRICES)
    first, second = cost.exchanged_bytes((7, 0, 0, 0, 0, 0))
    assert first + second - 10_000 - 5 * 4 * 512 * 2048 == LowRank(7).wire_bytes(512, 2048, 4)


def test_the_codec_is_timed_for_each_shape():
    matrices = [Matrix("a", 256, 512, 80), Matrix("b", 256, 512, 80), Matrix("c", 64, 64, 16)]
    costs = measure_codec(FakeExchange(0, 1), matrices, 32, torch.float32, CPU)
    assert costs[0] == costs[1] and len(costs) == 3
    assert all(cost.seconds(16) > 0 and cost.seconds(0) == 0 for cost in costs)
