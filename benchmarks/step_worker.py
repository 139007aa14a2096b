"""What one worker of ``bench_step.py`` runs: the contenders in turn, on the same model and data, round after round."""

import gc
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Contender, Probe, gradient_bytes
from link import set_rate
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

BLOCK = 64
"""Tokens of the one sequence of a step."""
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, Callable[[], GPT2Config]] = {
    # 4 * 12 * 512^2 + 8192 * 512 + 64 * 512 = 16.8 M parameters
    "17m": lambda: GPT2Config(
        n_layer=4,
        n_embd=512,
        n_head=8,
        vocab_size=8192,
        n_positions=BLOCK,
        bos_token_id=0,
        eos_token_id=0,
        **NO_DROPOUT,
    ),
    "gpt2": lambda: GPT2Config(**NO_DROPOUT),  # 124 M parameters
}
PARTS = ("step_s", "forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Job:
    """What to run, as the driver passes it in JSON."""

    model: str
    rate: str | None
    contenders: list[str]
    rounds: int
    steps: int
    seconds: float
    """A contender's turn in a round ends after so many seconds, or ``steps`` steps, but not before one step."""
    output: str


class Bench:
    """One model on one worker."""

    def __init__(self, job: Job) -> None:
        """Build the model, equal on all workers, and this worker's tokens."""
        self.job = job
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(MODELS[job.model]())
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.tokens = torch.randint(self.model.config.vocab_size, (16, 1, BLOCK), generator=generator)

    def turn(self, contender: Contender) -> dict[str, Any]:
        """One contender's turn: attach, warm up, timed steps. Times are the larger ones of the two workers."""
        self.model.load_state_dict(self.initial)
        device = os.environ["GLOO_SOCKET_IFNAME"]
        set_rate(device, self.job.rate if contender.slow_start else None)  # the dense warm-up would take minutes
        caps = {} if contender.bucket_cap_mb is None else {"bucket_cap_mb": contender.bucket_cap_mb}
        ddp = DistributedDataParallel(self.model, init_sync=False, **caps)
        probe = contender.attach(ddp)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-5, fused=True)
        for number in range(contender.warm_up_steps):
            self._step(ddp, optimizer, probe, number)
        dist.barrier()
        set_rate(device, self.job.rate)
        rows = [self._step(ddp, optimizer, probe, contender.warm_up_steps)]
        while len(rows) < self.job.steps and sum(row["step_s"] for row in rows) < self.job.seconds:
            rows.append(self._step(ddp, optimizer, probe, contender.warm_up_steps + len(rows)))
        final = {**probe.final(), **contender.check(probe), "gradient_bytes": gradient_bytes(ddp)}
        del ddp, probe, optimizer
        gc.collect()
        return {"rows": rows, "final": final}

    def _step(self, ddp: DistributedDataParallel, optimizer: Any, probe: Probe, number: int) -> dict[str, Any]:
        tokens = self.tokens[number % len(self.tokens)]
        dist.barrier()
        times = [time.perf_counter()]
        loss = ddp(input_ids=tokens, labels=tokens).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        own = [times[3] - times[0], *(after - before for before, after in itertools.pairwise(times))]
        slowest = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # also makes both workers stop after the same step
        return {**dict(zip(PARTS, slowest.tolist(), strict=True)), **probe.step()}


def run(job: Job) -> dict[str, Any]:
    """All rounds; the order is reversed in every other one. Returns the turns of each contender."""
    bench = Bench(job)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in job.contenders}
    for number in range(job.rounds):
        for name in job.contenders if number % 2 == 0 else reversed(job.contenders):
            turns[name].append(bench.turn(CONTENDERS[name]))
            if dist.get_rank() == 0:
                times = ", ".join(f"{row['step_s']:.3f}" for row in turns[name][-1]["rows"])
                where = f"{job.model} at {job.rate or 'loopback'}, round {number + 1} of {job.rounds}"
                print(f"{where}: {name}: {times} s", flush=True)
    return {"turns": turns}


def peak_memory(job: Job) -> dict[str, Any]:
    """The one contender's steps, and then the largest resident size of this process so far, in bytes."""
    bench = Bench(job)
    turn = bench.turn(CONTENDERS[job.contenders[0]])
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])  # Linux counts in KiB
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"peak_rss_bytes": int(peak), "gradient_bytes": turn["final"]["gradient_bytes"], "steps": job.steps}


def main(task: str, job: Job) -> None:
    """Join the other worker, run, and let worker 0 write the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    result = {"run": run, "memory": peak_memory}[task](job)
    if dist.get_rank() == 0:
        Path(job.output).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Job(**json.loads(sys.argv[2])))
