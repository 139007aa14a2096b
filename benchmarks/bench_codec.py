"""Time, error and bytes of each codec by shape and rank, against the floor of its three matrix products.

OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bench_codec.py

About three minutes on one core, no second worker: each message is answered with itself, which is what the mean over
one worker would be. The floor, the codec, and the codec with error feedback around it take turns in one loop. Writes
a JSON record. The matrices are seeded, with singular values i^-0.7 and noise that differs from round to round.
"""

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_step import spread, write
from record import environment, record_path
from torch import Tensor

from hf_edgc.codecs import CODECS, Codec, Decoded, Slot
from hf_edgc.feedback import ErrorFeedback

SHAPES = [(768, 2304), (768, 768), (768, 3072), (3072, 768), (50257, 768), (1024, 768)]
"""GPT-2 small's: attention, its projection, both layers of the MLP, token and position embedding."""
RANKS = [4, 8, 16, 32, 64, 128]
DECAY = 0.7
NOISE = 0.02
"""Norm of the noise over the matrix's."""
WARM_ROUNDS = 4
"""Untimed rounds: the factors are those of a running training, not the random first ones."""


def decaying(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """A matrix (rows, cols) of Frobenius norm 1 with singular values proportional to i^-0.7, and these values."""
    generator = torch.Generator().manual_seed(rows * 100_003 + cols)
    most = min(rows, cols)
    left = torch.linalg.qr(torch.randn(rows, most, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(cols, most, generator=generator))[0]
    values = torch.arange(1, most + 1, dtype=torch.float32) ** -DECAY
    values = values / values.norm()
    return (left * values) @ right.mT, values


def exchanged(codec: Codec, matrix: Tensor, slot: Slot) -> tuple[Decoded, int]:
    """Drive ``codec`` as the only worker; returns what it decoded and the bytes of its messages."""
    encoder = codec.encode(matrix, slot, 0)
    message, sent_bytes = next(encoder), 0
    while True:
        sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in message)
        try:
            message = encoder.send(message)
        except StopIteration as stop:
            decoded: Decoded = stop.value
            return decoded, sent_bytes


class Case:
    """One codec on one shape: three contenders that are timed in turn, and what they remember."""

    def __init__(self, codec: Codec, rank: int | None, matrix: Tensor) -> None:
        """Prepare the buffers, which no timed call allocates."""
        rows, cols = matrix.shape
        generator = torch.Generator().manual_seed(1)
        self.codec, self.matrix = codec, matrix
        self.noise = torch.randn(rows, cols, generator=generator).mul_(NOISE / (rows * cols) ** 0.5)
        self.grad, self.out = torch.empty_like(matrix), torch.empty_like(matrix)
        self.slots: dict[str, Slot] = {"alone": {}, "feedback": {}}
        self.feedback = ErrorFeedback()
        self.sent_bytes = 0
        self.p, self.q = (torch.randn(side, rank or 1, generator=generator) for side in (rows, cols))
        self.timed: dict[str, Callable[[], Any]] = {"codec": self.alone, "codec_feedback": self.with_feedback}
        if rank is not None:
            self.timed = {"floor": self.floor, **self.timed}

    def refill(self, number: int) -> None:
        """A new gradient: the same matrix with the noise's sign and rows changed."""
        torch.add(self.matrix, self.noise.roll(number, 0), alpha=1 - 2 * (number % 2), out=self.grad)

    def floor(self) -> None:
        """The three products that any low-rank codec of one power iteration needs."""
        p = self.grad @ self.q
        q = (self.p.mT @ self.grad).mT  # up to twice as fast as M^T P
        torch.mm(p, q.mT, out=self.out)

    def alone(self) -> None:
        """Compress and decompress."""
        decoded, self.sent_bytes = exchanged(self.codec, self.grad, self.slots["alone"])
        decoded.mean.write(self.out)
        self.slots["alone"] = decoded.slot

    def with_feedback(self) -> None:
        """The same with error feedback; the gradient is overwritten, as in training."""
        matrix = self.feedback.compensated("x", self.grad, 1.0)
        decoded, _ = exchanged(self.codec, matrix, self.slots["feedback"])
        self.feedback.keep("x", matrix, decoded.local, decoded.mean)
        self.slots["feedback"] = decoded.slot

    def run(self, repeats: int) -> dict[str, Any]:
        """Times of ``repeats`` rounds after the warm ones, and the relative error without feedback."""
        times: dict[str, list[float]] = {name: [] for name in self.timed}
        errors = []
        for number in range(WARM_ROUNDS + repeats):
            for name, call in self.timed.items():
                self.refill(number)
                start = time.perf_counter()
                call()
                if number >= WARM_ROUNDS:
                    times[name].append(round(time.perf_counter() - start, 7))
                if name == "codec":
                    errors.append(((self.grad - self.out).norm() / self.grad.norm()).item())
        result: dict[str, Any] = {f"{name}_s": spread(values) for name, values in times.items()}
        if "floor" in times:
            for name in ("codec", "codec_feedback"):
                # Pairs of one round see the same machine; their median ratio is less noisy than that of medians.
                pairs = zip(times[name], times["floor"], strict=True)
                result[f"{name}_over_floor"] = statistics.median(mine / floor for mine, floor in pairs)
        return {**result, "relative_error": statistics.median(errors[WARM_ROUNDS:]), "sent_bytes": self.sent_bytes}


def variants(name: str) -> list[tuple[Codec, int | None]]:
    """The codec ``name`` at each rank, or once if it has none."""
    kind: Any = CODECS[name]
    if "rank" in inspect.signature(kind).parameters:
        return [(kind(rank=rank), rank) for rank in RANKS]
    return [(kind(), None)]


def main(arguments: argparse.Namespace) -> None:
    """Every codec on every shape."""
    torch.set_num_threads(1)
    rows_of_table = []
    for rows, cols in arguments.shapes:
        matrix, values = decaying(rows, cols)
        for name in CODECS:
            for codec, rank in variants(name):
                row = {"codec": name, "rows": rows, "cols": cols, "rank": rank}
                row |= Case(codec, rank, matrix).run(arguments.repeats)
                row["wire_bytes"] = codec.wire_bytes(rows, cols, 4)
                row["optimal_error"] = values[rank:].norm().item() if rank is not None else 0.0
                rows_of_table.append(row)
                over = f", {row['codec_over_floor']:.2f} times the products" if rank else ""
                print(f"{name} {rows} x {cols}, rank {rank}: {row['codec_s']['median'] * 1e3:.2f} ms{over}", flush=True)
    path = arguments.output or record_path("codec")
    write(path, {"kind": "codec", **environment(), "results": rows_of_table})
    print(path)


def shape(text: str) -> tuple[int, int]:
    """``768x2304`` as a pair."""
    rows, cols = text.split("x")
    return int(rows), int(cols)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds")
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="as 768x2304")
    parser.add_argument("--output", type=Path, help="default: a new file in benchmarks/records/")
    sys.exit(main(parser.parse_args()))
