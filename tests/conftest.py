"""Shared fixtures: long-lived gloo workers, so that a two-process test costs milliseconds instead of seconds."""

import pytest
from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pools():
    """Pools by worker count, started on first use."""
    started: dict[int, WorkerPool] = {}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture
def run_workers(pools):
    """``run_workers(function, workers=2, **kwargs)``: results of a module-level function, in worker order."""

    def run(function, workers=2, timeout_s=60.0, **kwargs):
        if workers not in pools or pools[workers].broken:
            pools[workers] = WorkerPool(workers)
        return pools[workers].run(function, timeout_s, **kwargs)

    return run
