"""The targets of quality and speed, and whether they are met."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from sections import Records, memory, quality_runs, runs, table

OURS = ("static 8", "static 32", "static 32 bf16", "static 32 no overlap", "edgc")


@dataclass(frozen=True)
class Target:
    """``figure`` must be at most ``limit``; None: not measured."""

    what: str
    limit: float
    figure: float | None
    unit: str = "x"

    def row(self) -> list[str]:
        """A line of the table."""
        if self.figure is None:
            return [self.what, f"{self.limit:g} {self.unit}", "", "not measured"]
        met = "met" if self.figure <= self.limit else "**not met**"
        return [self.what, f"{self.limit:g} {self.unit}", f"{self.figure:.3g} {self.unit}", met]


def text(records: Records) -> str | None:
    """A row for each target."""
    if not any(records.get(kind) for kind in ("quality", "step", "codec", "memory")):
        return None
    speed = [*_step_time(records), *_overheads(records), *_codec(records), *_bytes(records), *_memory(records)]
    targets = [*_quality(records), *speed]
    header = ["target", "at most", "measured", ""]
    return "## Targets\n\nOf quality means over the seeds; of speed medians, ratios within one run.\n\n" + table(
        header, [target.row() for target in targets]
    )


def _on_links(records: Records, model: str) -> dict[str, runs.Cells]:
    return runs.cells(runs.newest(records).get(model, {}))


def _quality(records: Records) -> Iterator[Target]:
    groups = {group.any()["size"]["name"]: group for group in quality_runs.groups(records)}
    nothing = quality_runs.Group("")
    small, large = groups.get("small", nothing), groups.get("large", nothing)
    for name, limit in (("edgc-4", 0.95), ("edgc-8", 1.0), ("edgc-16", 1.0)):
        sent = [100 / run["ratio"] for run in small.seeds(name).values()]
        share = f", {fmean(sent):.1f} % of the bytes" if sent else ""
        what = f"small: perplexity of {name} over static compression at equal bytes{share}"
        yield Target(what, limit, _ratio(quality_runs.to_static(small, name)))
    over_dense = _ratio(quality_runs.between(large, "edgc-10x", "dense"))
    yield Target("large: perplexity at a tenth of the bytes over dense", 1.005, over_dense)
    rms = [value for group in groups.values() for value in quality_runs.prediction_rms(group)]
    found = 100 * quality_runs.pooled(rms) if rms else None
    yield Target("predicted over measured error, rms of the logarithm", 20, found, "%")


def _ratio(differences: list[float]) -> float | None:
    """Of perplexities, from differences of their logarithms."""
    return math.exp(fmean(differences)) if differences else None


def _step_time(records: Records) -> Iterator[Target]:
    for model in ("17m", "gpt2"):
        by_link = _on_links(records, model)
        for link, limit in (("1gbit", 0.35), ("200mbit", 0.15)):
            on_link = by_link.get(link, {})
            yield Target(f"{model}, {link}: static 32 over DDP", limit, runs.ratio(on_link, "static 32", "ddp"))
        for link in ("1gbit", "200mbit"):
            found = runs.ratio(by_link.get(link, {}), "static 32", "powerSGD_hook 32")
            yield Target(f"{model}, {link}: static 32 over torch's powerSGD_hook at rank 32", 0.9, found)


def _overheads(records: Records) -> Iterator[Target]:
    for model in ("17m", "gpt2"):
        on_loopback = _on_links(records, model).get("loopback", {})
        yield Target(f"{model}, loopback: auto over DDP", 1.03, runs.ratio(on_loopback, "auto", "ddp"))
        hook = runs.ratio(on_loopback, "none", "allreduce_hook")
        yield Target(f"{model}, loopback: our hook without compression over allreduce_hook", 1.01, hook)
        edgc = on_loopback.get("edgc", {})
        share = None
        if "measured_step_s" in edgc:
            share = 100 * edgc["measured_step_s"] / edgc["entropy_every"] / edgc["step_s"]["median"]
        yield Target(f"{model}, loopback: measuring entropies, of the step time over a window", 0.5, share, "%")
        controller = 1e3 * edgc["controller_step_s"] if "controller_step_s" in edgc else None
        yield Target(f"{model}, loopback: controller, a step", 1.0, controller, "ms")


def _codec(records: Records) -> Iterator[Target]:
    rows = [
        row for record in records.get("codec", [])[:1] for row in record["results"] if row["rank"] in (8, 16, 32, 64)
    ]
    for name in sorted({row["codec"] for row in rows}) or ["low_rank"]:
        over = [row["codec_over_floor"] for row in rows if row["codec"] == name]
        what = f"{name}: compression and decompression over the three products, worst of ranks 8 to 64"
        yield Target(what, 1.5, max(over, default=None))


def _bytes(records: Records) -> Iterator[Target]:
    codecs = [
        abs(row["sent_bytes"] - row["wire_bytes"])
        for record in records.get("codec", [])[:1]
        for row in record["results"]
    ]
    yield Target("every codec: bytes sent beyond the formula", 0, max(codecs, default=None), "bytes")
    for model in ("17m", "gpt2"):
        cells = [on_link[name] for on_link in _on_links(records, model).values() for name in OURS if name in on_link]
        beyond = [
            abs(cell["last_sent_bytes"] - sum(cell[f"{part}_bytes"] for part in ("factor", "dense_part", "control")))
            for cell in cells
            if "last_sent_bytes" in cell
        ]
        yield Target(f"{model}: bytes of a step beyond the formula", 0, max(beyond, default=None), "bytes")
        halves = [
            on_link["static 32 bf16"]["factor_bytes"] / on_link["static 32"]["factor_bytes"]
            for on_link in _on_links(records, model).values()
            if {"static 32", "static 32 bf16"} <= set(on_link)
        ]
        yield Target(f"{model}: factors in bfloat16 over float32, bytes", 0.5, max(halves, default=None))


def _memory(records: Records) -> Iterator[Target]:
    models = memory.newest(records)
    for model in ("17m", "gpt2"):
        for name, limit in (("static 32", 1.0), ("static 32 bf16 errors", 0.5)):
            found = models.get(model, {}).get(name, {}).get("beyond_ddp_over_gradient_bytes")
            yield Target(f"{model}: memory beyond DDP over gradient bytes, {name}", limit, found)
