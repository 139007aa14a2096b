"""Short random trainings with delays before collectives; used by tests/faults and benchmarks/soak.py."""

import math
import random
import time

import torch
import torch.distributed as dist
from ddp_jobs import edgc_ddp, same_everywhere, tiny_gpt2, train_steps

from hf_edgc import EDGCConfig

STEPS = 12
FEWEST_COMPRESSED = STEPS - math.ceil(0.3 * STEPS)  # a dense warm-up ends at warmup_max_fraction at the latest


def plan_of(seed):
    """Everything random about run ``seed``, the same on all workers."""
    dice = random.Random(seed)
    max_rank = dice.choice([1, 2, 4, 8, 16])
    return {
        "model": {
            "n_layer": dice.randint(1, 3),
            "n_embd": dice.choice([32, 48, 64, 96]),
            "n_head": 2,
            "vocab_size": dice.choice([64, 200, 256]),
            "tie_word_embeddings": dice.random() < 0.5,
        },
        "ddp": {
            "bucket_cap_mb": dice.choice([0.001, 0.005, 0.02, 0.1, 25]),
            "find_unused_parameters": dice.random() < 0.5,
            "gradient_as_bucket_view": dice.random() < 0.5,
        },
        "config": {
            "mode": dice.choice(["edgc", "edgc", "static"]),
            "max_rank": max_rank,
            "min_rank": 1,
            "rank_step": dice.choice([1, 4, 16]),
            "window_steps": dice.randint(1, 4),
            "entropy_every": dice.randint(1, 3),
            "warmup_fraction": dice.choice([0.0, 0.0, 0.2]),
            "min_compression_ratio": 1.0,
            "factor_dtype": dice.choice(["float32", "bfloat16", "float16"]),
            "error_dtype": dice.choice(["float32", "bfloat16"]),
        },
        "delay_s": dice.choice([0.0, 0.002, 0.01]),
    }


def soak_run(seed):
    """One run; whether the replicas are bitwise equal, and the totals."""
    plan = plan_of(seed)
    own = random.Random(f"{seed} {dist.get_rank()}")
    model = tiny_gpt2(seed, **plan["model"])
    all_reduce = dist.all_reduce

    def late(*args, **kwargs):
        time.sleep(own.uniform(0, plan["delay_s"]))
        return all_reduce(*args, **kwargs)

    dist.all_reduce = late
    try:
        with edgc_ddp(model, EDGCConfig(**plan["config"]), STEPS, **plan["ddp"]) as (ddp, state):
            losses = train_steps(ddp, STEPS, vocab=plan["model"]["vocab_size"])
            totals = state.totals
    finally:
        dist.all_reduce = all_reduce
    equal = all(same_everywhere(parameter.detach()) for parameter in model.parameters())
    finite = all(torch.tensor(losses).isfinite().tolist())
    return {
        "replicas_equal": equal and finite,
        "compressed_steps": totals.compressed_steps,
        "compression_ratio": totals.compression_ratio,
    }


def passed(results):
    """Whether a run is as it should be on all workers: replicas equal, and compression took place."""
    return all(
        result["replicas_equal"]
        and result["compressed_steps"] >= FEWEST_COMPRESSED
        and result["compression_ratio"] > 1.0
        for result in results
    )
