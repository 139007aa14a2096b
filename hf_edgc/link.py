"""Measures the link between the workers and the codec's cost on this hardware, equally on all workers."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_edgc.codecs import LowRank, Slot
from hf_edgc.cost import CodecCost, Link
from hf_edgc.exchange import Exchange
from hf_edgc.feedback import ErrorFeedback
from hf_edgc.layout import Matrix

SMALL_BYTES, LARGE_BYTES = 2**21, 2**23
"""The two all-reduces that give the bandwidth: larger than the burst of a traffic shaper, and 0.8 s at 100 Mbit/s."""

LONG_ENOUGH_S, LARGEST_BYTES = 0.05, 2**25
"""On a fast link the large one is made larger until it takes so long, up to 32 MiB, so that jitter matters less."""

PAUSE_S = 0.1
"""Before each of them, as in training there is time between two steps: a shaper's burst, spent, comes back."""

REPEATS = 3
MAX_ELEMENTS = 2**22
"""Of a matrix on which the codec is timed; larger ones take as much longer as they are larger."""


def measure_link(
    exchange: Exchange,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Link:
    """Time dense all-reduces; every worker must call this, and all get the same result.

    Args:
        exchange: of the workers.
        device: where gradients are.
        clock: time in seconds.
        sleep: waits for so many seconds.
    """

    def all_reduce_s(size_bytes: int, pause_s: float) -> float:
        tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
        times = []
        for _ in range(1 + REPEATS):  # the first one opens connections and is left out
            sleep(pause_s)
            exchange.gather_ints([0], device)  # all workers start together
            start = clock()
            exchange.mean_later(tensor).wait()
            _synchronize(device)
            times.append(clock() - start)
        return sorted(slowest(exchange, times[1:], device))[REPEATS // 2]

    latency_s = all_reduce_s(4, 0.0)
    small_s, large_s, large_bytes = all_reduce_s(SMALL_BYTES, PAUSE_S), 0.0, LARGE_BYTES // 4
    while large_s < LONG_ENOUGH_S and large_bytes < LARGEST_BYTES:
        large_bytes *= 4
        large_s = all_reduce_s(large_bytes, PAUSE_S)
    bytes_per_s = (large_bytes - SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return Link(latency_s, bytes_per_s, max(0.0, large_bytes - (large_s - latency_s) * bytes_per_s))


def measure_codec(
    exchange: Exchange, matrices: Sequence[Matrix], rank: int, dtype: torch.dtype, device: torch.device
) -> list[CodecCost]:
    """Time compression, decompression and error feedback of each shape at two ranks, up to ``rank``.

    Every worker must call this, at the same time as in training; all get the times of the slowest.
    """
    shapes = sorted({(matrix.rows, matrix.cols, matrix.max_rank) for matrix in matrices})
    ranks = [(min(max(1, rank // 4), most), min(max(2, rank), most)) for _, _, most in shapes]
    own = [
        _codec_s(rows, cols, LowRank(each, dtype, 1), device)
        for (rows, cols, _), pair in zip(shapes, ranks, strict=True)
        for each in pair
    ]
    times = iter(slowest(exchange, own, device))
    costs = {}
    for shape, (low, high) in zip(shapes, ranks, strict=True):
        low_s, high_s = next(times), next(times)
        per_rank_s = max(0.0, high_s - low_s) / max(1, high - low)
        costs[shape] = CodecCost(max(0.0, low_s - low * per_rank_s), per_rank_s)
    return [costs[matrix.rows, matrix.cols, matrix.max_rank] for matrix in matrices]


def _codec_s(rows: int, cols: int, codec: LowRank, device: torch.device) -> float:
    taken = min(rows, max(codec.rank, MAX_ELEMENTS // cols))
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(taken, cols, generator=generator).to(device)
    feedback, times = ErrorFeedback(), []
    slot: Slot = {}
    for _ in range(1 + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        matrix = feedback.compensated("", grad, 1.0)
        encoder = codec.encode(matrix, slot, 0)
        message: list[Tensor] = next(encoder)
        try:
            while True:
                message = encoder.send([tensor.clone() for tensor in message])
        except StopIteration as stop:
            feedback.keep("", matrix, stop.value.local, stop.value.mean)
            slot = stop.value.slot
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2] * rows / taken


def slowest(exchange: Exchange, times: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each over the workers; whole nanoseconds, so that all hold the same numbers."""
    rows = exchange.gather_ints([round(each * 1e9) for each in times], device)
    return [max(column) / 1e9 for column in zip(*rows, strict=True)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
