"""A pool of gloo processes that runs the same function on every worker."""

import gc
import multiprocessing
import os
import socket
import time
import traceback
from datetime import timedelta


class WorkerPool:
    """``workers`` processes joined in one gloo group on loopback."""

    def __init__(self, workers, collective_timeout_s=30.0):
        """Start the processes; they stay until ``close``. A collective that takes longer fails."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.broken = False
        self._pipes, self._processes = [], []
        for index in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, index, workers, port, collective_timeout_s), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(self, function, **kwargs):
        """Let all workers begin; nobody waits for them."""
        for pipe in self._pipes:
            pipe.send((function, kwargs))

    def run(self, function, timeout_s, **kwargs):
        """Results in worker order; raises the first worker's error, or TimeoutError (then the pool is dead)."""
        self.start(function, **kwargs)
        deadline = time.monotonic() + timeout_s
        answers = []
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.kill()
                raise TimeoutError(f"worker {index} did not answer within {timeout_s} s: a hang")
            answers.append(pipe.recv())
        errors = [f"worker {index}:\n{text}" for index, (text, _) in enumerate(answers) if text]
        if errors:
            self.kill()  # collectives of a worker that went on may be pending
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def kill(self):
        """End the processes at once."""
        self.broken = True
        for process in self._processes:
            process.kill()

    def close(self):
        """End the processes in order."""
        if not self.broken:
            for pipe in self._pipes:
                pipe.send(None)
            for process in self._processes:
                process.join(10)
        self.kill()


def _serve(pipe, index, workers, port, timeout_s):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # What torchrun would set, for Accelerate and Trainer, which ask the environment.
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
    }
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=index,
        world_size=workers,
        timeout=timedelta(seconds=timeout_s),
    )
    while (job := pipe.recv()) is not None:
        function, kwargs = job
        try:
            pipe.send((None, function(**kwargs)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
        gc.collect()
    dist.destroy_process_group()
