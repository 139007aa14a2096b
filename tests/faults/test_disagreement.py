"""Workers that do not agree, or of which one is gone."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ddp_jobs import GradientModel, edgc_ddp, gradients_for, synchronized
from worker_pool import WorkerPool

from hf_edgc import EDGCConfig, EDGCState

SHAPES = {"a": (64, 48), "bias": (48,), "b": (80, 40)}
OPTIONS = {"max_rank": 4, "min_rank": 1, "entropy_every": 1, "window_steps": 3, "min_compression_ratio": 1.0}


def disagree(what):
    worker = dist.get_rank()
    config = EDGCConfig(mode="static", rank=2 + worker if what == "config" else 2)
    shapes = {"a": (64, 48 + (worker if what == "model" else 0))}
    start = time.monotonic()
    try:
        EDGCState(config, GradientModel(shapes).named_parameters(), total_steps=10 + (worker if what == "steps" else 0))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None, 0.0


@pytest.mark.fault(
    "workers with different EDGCConfig, model or number of steps",
    "an error that names the difference, on all, at attach",
)
@pytest.mark.parametrize(
    "what, named", [("config", "EDGCConfig"), ("model", "model parameters"), ("steps", "total_steps")]
)
def test_workers_that_differ(run_workers, what, named):
    for message, seconds in run_workers(disagree, what=what):
        assert f"differ in: {named}." in message
        assert seconds < 10
    assert run_workers(disagree, what="nothing") == [(None, 0.0)] * 2


def different_learning_rates():
    with edgc_ddp(GradientModel(SHAPES), EDGCConfig(**{**OPTIONS, "max_rank": 16}), total_steps=40) as (ddp, state):
        ranks = []
        for step in range(20):
            # Worker 1 decays, worker 0 does not; if each decided for itself, their messages would differ in size.
            rate = 1.0 / (1 + step * dist.get_rank())
            state.learning_rate = lambda rate=rate: rate
            synchronized(ddp, gradients_for(SHAPES, step))
            ranks.append(state.last.ranks)
        return ranks


@pytest.mark.fault("workers with different learning rate schedules", "all decide from the mean of their rates")
def test_different_learning_rates(run_workers):
    first, second = run_workers(different_learning_rates)
    assert first == second and first[-1] < first[0]


def train_until(directory, event):
    """12 steps; in the 11th, worker 1 is killed, leaves, or has skipped an optimizer step."""
    with edgc_ddp(GradientModel(SHAPES), EDGCConfig(**OPTIONS), total_steps=40) as (ddp, state):
        start = time.monotonic()
        try:
            for step in range(12):
                if step == 10 and dist.get_rank() == 1:
                    if event == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if event == "leaves":
                        os._exit(0)
                    state.optimizer_steps -= 1  # as if its optimizer had not stepped
                start = time.monotonic()
                synchronized(ddp, gradients_for(SHAPES, step))
                state.optimizer_steps += 1
        except RuntimeError as error:
            Path(directory, str(dist.get_rank())).write_text(f"{time.monotonic() - start:.1f} {error}")
    os._exit(0)


def told_by(directory, event, worker):
    victims = WorkerPool(2)
    victims.start(train_until, directory=str(directory), event=event)
    file, deadline = Path(directory, str(worker)), time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    victims.kill()
    seconds, message = file.read_text().split(" ", 1)
    return float(seconds), message


@pytest.mark.fault(
    "a worker is killed with SIGKILL, or leaves early", "the others end at once with an error that says so"
)
@pytest.mark.parametrize("event", ["killed", "leaves"])
def test_a_worker_that_is_gone(tmp_path, event):
    seconds, message = told_by(tmp_path, event, worker=0)
    assert "could not exchange gradients on worker 0 of 2: another worker has stopped" in message
    assert "resume from the last checkpoint" in message and seconds < 10


@pytest.mark.fault("a worker skips an optimizer step", "an error with the step of each, on all workers")
def test_a_worker_that_skips_a_step(tmp_path):
    for worker in (0, 1):
        folder = tmp_path / str(worker)
        folder.mkdir()
        seconds, message = told_by(folder, "skips", worker)
        assert (
            f"not at the same point. Worker {worker} is at synchronization 10, optimizer step {10 - worker}" in message
        )
        assert seconds < 10
