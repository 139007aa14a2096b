"""The runs of bench_quality by size, setup and seed, and how they compare."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance

from sections import Record, Records


@dataclass(frozen=True)
class Group:
    """All runs of one size and length; ``runs`` by setup, then by seed."""

    name: str
    runs: dict[str, dict[int, Record]] = field(default_factory=dict)

    def seeds(self, setup: str) -> dict[int, Record]:
        """Runs of a setup by seed; none if it was not run."""
        return self.runs.get(setup, {})

    def all(self) -> Iterator[Record]:
        """Every run."""
        return itertools.chain.from_iterable(runs.values() for runs in self.runs.values())

    def any(self) -> Record:
        """A run, for what all have in common."""
        return next(self.all())

    @staticmethod
    def is_default(setup: str) -> bool:
        """Whether a setup is the default of mode edgc at some budget."""
        return re.fullmatch(r"edgc-\d+x?", setup) is not None

    def curves_of(self) -> str | None:
        """The setup of which curves over time are shown."""
        return next((name for name in ("edgc-4", "edgc-10x") if name in self.runs), None)


def prediction_rms(group: Group) -> list[float]:
    """Of each run of the default: how far predicted error norms were from the measured ones."""
    runs = [run for name in group.runs if group.is_default(name) for run in group.seeds(name).values()]
    return [run["prediction_rms"] for run in runs if run["prediction_rms"] is not None]


def pooled(rms: Sequence[float]) -> float:
    """Root mean square over runs, from that of each; at least one."""
    return math.hypot(*rms) / math.sqrt(len(rms))


def groups(records: Records) -> list[Group]:
    """All runs by size and length, the smallest model first."""
    found: dict[str, Group] = {}
    for record in sorted(records.get("quality", []), key=lambda record: (record["parameters"], record["seed"])):
        name = f"{record['size']['name']}-{record['size']['steps']}"
        group = found.setdefault(name, Group(name))
        group.runs.setdefault(record["setup"], {}).setdefault(record["seed"], record)
    return list(found.values())


def on_static_curve(setup: str) -> bool:
    """Whether a setup is one of those that others are compared with: a static rank in float32, or dense."""
    return setup == "dense" or re.fullmatch(r"static-\d+", setup) is not None


def static_nll(group: Group, seed: int, sent_share: float) -> float | None:
    """Loss of static compression at a share of the dense bytes: linear in its logarithm between the ranks of the runs.

    Dense training is the last point of the curve; None outside it.
    """
    runs = [group.seeds(name)[seed] for name in group.runs if on_static_curve(name) and seed in group.seeds(name)]
    points = sorted((1 / run["ratio"], run["nll"]) for run in runs)
    for (low, low_nll), (high, high_nll) in itertools.pairwise(points):
        if low * (1 - 1e-3) <= sent_share <= high * (1 + 1e-3):
            place = math.log(sent_share / low) / math.log(high / low)
            return low_nll + place * (high_nll - low_nll)
    return None


def to_static(group: Group, setup: str) -> list[float]:
    """Loss minus that of static compression at equal bytes, nats, for each seed that has both."""
    pairs = [(run["nll"], static_nll(group, seed, 1 / run["ratio"])) for seed, run in group.seeds(setup).items()]
    return [nll - static for nll, static in pairs if static is not None]


def between(group: Group, setup: str, other: str) -> list[float]:
    """Loss of ``setup`` minus that of ``other``, nats, for each seed that has both."""
    others = group.seeds(other)
    return [run["nll"] - others[seed]["nll"] for seed, run in group.seeds(setup).items() if seed in others]


def noise_nats(group: Group) -> float | None:
    """Standard deviation over the seeds of a difference to static, pooled over the setups; None with one seed."""
    differences = [to_static(group, name) for name in group.runs if not on_static_curve(name)]
    spreads = [(len(values) - 1, variance(values)) for values in differences if len(values) > 1]
    degrees = sum(count for count, _ in spreads)
    return math.sqrt(sum(count * value for count, value in spreads) / degrees) if degrees else None


def verdict(group: Group, differences: Sequence[float]) -> str:
    """Whether a mean difference is larger than noise: two standard errors, with the pooled deviation."""
    noise = noise_nats(group)
    if noise is None or not differences:
        return "one seed"
    beyond = abs(fmean(differences)) > 2 * noise / math.sqrt(len(differences))
    return ("lower" if fmean(differences) < 0 else "higher") if beyond else "within noise"
