"""A run that too strong compression makes diverge, and the watchdog that saves it."""

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import ddp_of, edgc_ddp, listening, same_everywhere

from hf_edgc import EDGCConfig


class Distance(torch.nn.Module):
    """Half the squared distance to a random matrix: gradient descent with a rate of 1.4 converges when it is exact."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(96, 96))
        self.goal = torch.randn(96, 96, generator=torch.Generator().manual_seed(1))

    def forward(self):
        return 0.5 * (self.weight - self.goal - 0.01 * dist.get_rank()).square().sum()


def descend(ddp, steps=120):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ddp()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def diverging(**options):
    config = EDGCConfig(rank=1, max_rank=1, entropy_every=2, window_steps=10, min_compression_ratio=1.0, **options)
    model = Distance()
    with listening() as told, edgc_ddp(model, config, 120) as (ddp, state):
        losses = descend(ddp)
        return max(losses), losses[-1], state.totals.compressed_steps, told, same_everywhere(model.weight.detach())


def dense():
    with ddp_of(Distance()) as ddp:
        return descend(ddp)[-1]


@pytest.mark.fault(
    "compression so strong that the run diverges",
    "one warning each time with the figures, a window of dense steps with the errors dropped, then another try",
)
def test_the_watchdog_catches_a_diverging_run(run_workers):
    assert run_workers(dense)[0] < 10.0, "without compression this converges"
    off = {"watchdog_error_ratio": 0.0, "watchdog_grad_growth": 0.0}
    peak_without, _, compressed, told, _ = run_workers(diverging, **off)[0]
    assert compressed == 120 and not told
    early = {"watchdog_error_ratio": 10.0, "watchdog_grad_growth": 10.0}
    (peak, _, compressed, told, equal), (_, _, _, silent, _) = run_workers(diverging, **early)
    assert peak_without > 100 * peak, "left alone, compression makes it diverge"
    assert 0 < compressed < 110 and equal
    alarms = [line for line in told if "dense for 10 steps, then compression is tried again" in line]
    assert len(alarms) == len(told) >= 1 and not silent, "said once each time, on the first worker"
