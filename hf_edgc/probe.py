"""``hf-edgc probe``: measures the link between the workers and says whether compression pays for a model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console
from transformers import AutoModelForCausalLM

from hf_edgc.clm.arguments import ModelArguments
from hf_edgc.clm.command_line import Parser, check_workers
from hf_edgc.clm.errors import UsageError
from hf_edgc.clm.model import load_config
from hf_edgc.clm.results import fact_table
from hf_edgc.config import EDGCConfig
from hf_edgc.cost import CostModel
from hf_edgc.exchange import Exchange
from hf_edgc.layout import Layout, build_layout
from hf_edgc.link import measure_codec, measure_link

USAGE = "torchrun --standalone --nproc_per_node 2 -m hf_edgc probe [--model_name_or_path NAME] [--option value ...]"


def main(argv: Sequence[str]) -> None:
    """Probe with the model and compression options of run_clm_edgc.py; every worker must call this.

    Raises:
        UsageError: an option that can't be used, or one worker only.
    """
    arguments, config = parse(argv)
    workers = PartialState(cpu=not torch.accelerator.is_available())
    try:
        check_workers(workers.num_processes)
        if workers.num_processes == 1:
            raise UsageError(f"One worker has no link to measure. Start the probe on all workers: {USAGE}")
        model = model_on_meta(arguments)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        layout = build_layout(shapes, config)
        if not layout.matrices:
            raise UsageError(f"Nothing of this model would be compressed: {layout.describe()}")
        costs = measure(layout, config, workers.device, next(model.parameters()).dtype.itemsize)
        if workers.is_main_process:
            print_probe(rows(costs, layout, config, workers.num_processes, arguments), costs, config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def model_on_meta(arguments: ModelArguments) -> torch.nn.Module:
    """The model with shapes and no weights: only its configuration is read.

    Raises:
        UsageError: the name can't be loaded, or the overrides don't fit.
    """
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            load_config(arguments), trust_remote_code=arguments.trust_remote_code
        )
    return model


def measure(layout: Layout, config: EDGCConfig, device: torch.device, itemsize: int) -> CostModel:
    """Measure link and codec; every worker must call this, and all get the same numbers.

    Args:
        layout: of the model.
        config: rank and type of the factors.
        device: where gradients are.
        itemsize: bytes of one entry of a gradient.
    """
    exchange = Exchange()
    dtype = getattr(torch, config.factor_dtype)
    return CostModel(
        link=measure_link(exchange, device),
        matrices=layout.matrices,
        dense_bytes=[matrix.dense_elements * itemsize for matrix in layout.matrices],
        rest_bytes=sum(tensor.elements for tensor in layout.dense) * itemsize,
        costs=measure_codec(exchange, layout.matrices, config.start_rank, dtype, device),
        factor_bytes=dtype.itemsize,
    )


def rows(
    costs: CostModel, layout: Layout, config: EDGCConfig, workers: int, arguments: ModelArguments
) -> list[tuple[str, str]]:
    """What was found, as names and values."""
    ranks = costs.at_rank(config.start_rank)
    dense_bytes = costs.gradient_bytes
    sent_bytes = sum(costs.exchanged_bytes(ranks))
    break_even = costs.break_even_bytes_per_s(ranks)
    name = arguments.model_name_or_path or arguments.config_name or f"new {arguments.model_type}"
    return [
        ("model", name),
        ("workers", str(workers)),
        ("link", f"{costs.link.bytes_per_s * 8e-6:,.0f} Mbit/s, {costs.link.latency_s * 1e3:.2f} ms"),
        ("to compress", f"{len(layout.matrices)} matrices at rank {config.start_rank} or the most they can have"),
        ("sent dense", f"{len(layout.dense)} tensors"),
        ("bytes a step", f"{sent_bytes / 1e6:,.1f} MB instead of {dense_bytes / 1e6:,.1f} MB"),
        ("compression ratio", f"{dense_bytes / sent_bytes:.2f}"),
        ("dense exchange", f"{costs.dense_s() * 1e3:,.0f} ms"),
        (
            "compressed exchange",
            f"{costs.compressed_s(ranks) * 1e3:,.0f} ms, {costs.codec_s(ranks) * 1e3:,.0f} of them computing",
        ),
        ("break-even", f"{break_even * 8e-6:,.0f} Mbit/s" if break_even else "nowhere"),
    ]


def verdict(costs: CostModel, config: EDGCConfig) -> str:
    """One sentence: does it pay on this link, for how many of the matrices, how much."""
    ranks = costs.at_rank(config.start_rank)
    chosen = costs.paying(ranks)
    count, dense_s = sum(rank > 0 for rank in chosen), costs.dense_s()
    if count:
        saved = 1 - costs.compressed_s(chosen) / dense_s
        return (
            f"Compression pays on this link: {saved:.0%} less time a synchronization, with {count} of {len(chosen)} "
            "matrices compressed."
        )
    return "Compression does not pay on this link: plain DDP is faster."


def print_probe(found: list[tuple[str, str]], costs: CostModel, config: EDGCConfig) -> None:
    """Print the table and the verdict."""
    console = Console(highlight=False)
    console.print(fact_table("EDGC probe", found))
    console.print(verdict(costs, config), soft_wrap=True)
    console.print(
        "Times are those of an exchange by itself; a backward that overlaps with it hides part of both.", soft_wrap=True
    )


def parse(argv: Sequence[str]) -> tuple[ModelArguments, EDGCConfig]:
    """The options of the probe.

    Raises:
        UsageError: one that is unknown or has a value that is not allowed.
    """
    kinds: Any = [ModelArguments, EDGCConfig]
    parser = Parser(kinds, usage=USAGE, description=__doc__, allow_abbrev=False)
    (arguments, config), rest = parser.read(argv)
    if rest:
        raise UsageError(f"unknown argument {rest[0]}; see hf-edgc probe --help.")
    return arguments, config
