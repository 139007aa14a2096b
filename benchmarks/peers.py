"""What torch's own powerSGD_hook does with the faults that hf_edgc is tested against, in the same harness.

.venv/bin/python benchmarks/peers.py

About three minutes. Prints a JSON line a fault: how many of some runs ended well with each hook, and how the others
ended. Each run has workers of its own, since a hook that fails may take its process along.
"""

import argparse
import json
import sys
from pathlib import Path

from record import environment

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]  # its worker pool and jobs

from worker_pool import WorkerPool

SHAPES = {"a": (64, 48), "b": (80, 40), "bias": (48,)}


def hooked(model, peer, rank, **ddp_options):
    """DDP with our hook or torch's, a function that changes its rank, and the loss scale's owner."""
    from ddp_jobs import ddp_of
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    from hf_edgc import EDGCConfig, EDGCState, edgc_hook

    if peer:
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return ddp_of(model, powerSGD_hook, state, **ddp_options), state
    config = EDGCConfig(max_rank=8, rank=rank, min_rank=1, min_compression_ratio=1.0, window_steps=100)
    state = EDGCState(config, model.named_parameters(), total_steps=100)
    return ddp_of(model, edgc_hook, state, **ddp_options), state


def several_buckets(peer):
    """Twelve steps of a small GPT-2 in several buckets."""
    from ddp_jobs import same_everywhere, tiny_gpt2, train_steps

    model = tiny_gpt2()
    ddp_context, _ = hooked(model, peer, 2, bucket_cap_mb=0.02)
    with ddp_context as ddp:
        losses = train_steps(ddp, 12)
    equal = all(same_everywhere(parameter.detach()) for parameter in model.parameters())
    return (
        "ok"
        if equal and losses[-1] < losses[0]
        else f"replicas equal: {equal}, loss {losses[0]:.2f} to {losses[-1]:.2f}"
    )


def overflow(peer):
    """One infinite gradient on one worker in step 6, with a real GradScaler; are later gradients finite?"""
    import torch
    import torch.distributed as dist
    from ddp_jobs import GradientModel, gradients_for

    model = GradientModel(SHAPES)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp_context, state = hooked(model, peer, 2)
    with ddp_context as ddp:
        if not peer:
            state.loss_scale = scaler.get_scale
        skipped = 0
        for step in range(20):
            gradients = gradients_for(SHAPES, step)
            if step == 6 and dist.get_rank() == 1:
                gradients["a"][0, 0] = float("inf")
            optimizer.zero_grad()
            before = scaler.get_scale()
            scaler.scale(ddp(gradients)).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
    return "ok" if skipped == 1 else f"{skipped} of 14 steps skipped after one overflow"


def zero_gradients(peer):
    """Zero gradients in some steps, at rank 2 where torch orthogonalizes by Gram-Schmidt."""
    from ddp_jobs import GradientModel, gradients_for, synchronized

    ddp_context, _ = hooked(GradientModel(SHAPES), peer, 2)
    with ddp_context as ddp:
        for step in range(12):
            result = synchronized(ddp, gradients_for(SHAPES, step, scale=float(step > 5)))
    bad = [name for name, gradient in result.items() if not gradient.isfinite().all()]
    return "ok" if not bad else f"NaN in {', '.join(bad)} ever after"


def rank_change(peer):
    """The rank goes from 2 to 4 after 6 steps; is what is sent then of rank 4?"""
    import torch
    from ddp_jobs import GradientModel, gradients_for, synchronized

    ddp_context, state = hooked(GradientModel(SHAPES), peer, 2)
    with ddp_context as ddp:
        for step in range(12):
            if step == 6:
                if peer:
                    state.matrix_approximation_rank = 4
                else:
                    state.controller._progress.ranks = [4] * len(state.layout.matrices)
            result = synchronized(ddp, gradients_for(SHAPES, step))
    rank = int(torch.linalg.matrix_rank(result["a"]).item())
    return "ok" if rank == 4 else f"a gradient of rank {rank} instead of 4"


FAULTS = {
    "several buckets": several_buckets,
    "one overflow": overflow,
    "zero gradients": zero_gradients,
    "rank change": rank_change,
}


def outcome(function, peer):
    """How one run ends."""
    pool = WorkerPool(2)
    try:
        results = pool.run(function, 40, peer=peer)
        return next((result for result in results if result != "ok"), "ok")
    except (EOFError, ConnectionError):
        return "the process died"
    except TimeoutError:
        return "hangs"
    except AssertionError as error:
        return str(error).strip().splitlines()[-1][:120]
    finally:
        pool.kill()


def main(runs: int) -> None:
    """Each fault with each hook, ``runs`` times."""
    for fault, function in FAULTS.items():
        for name, peer in (("hf_edgc", False), ("powerSGD_hook", True)):
            outcomes = [outcome(function, peer) for _ in range(runs)]
            others = sorted({each for each in outcomes if each != "ok"})
            print(
                json.dumps({"fault": fault, "hook": name, "runs": runs, "ok": outcomes.count("ok"), "else": others}),
                flush=True,
            )
    print(json.dumps(environment()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    main(**vars(parser.parse_args()))
