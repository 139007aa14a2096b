"""codec=auto: measures link and codec, predicts what a step waits, and says which matrices to compress."""

from typing import Any

import torch

from hf_edgc.config import EDGCConfig
from hf_edgc.controller import Controller
from hf_edgc.cost import CodecCost, CostModel, Link
from hf_edgc.exchange import Exchange
from hf_edgc.layout import Layout
from hf_edgc.link import measure_codec, measure_link, slowest
from hf_edgc.logs import get_logger
from hf_edgc.parameters import Parameters
from hf_edgc.records import StepRecord


class Advisor:
    """Decides with ``codec=auto``; all workers ask theirs at the same steps and are answered the same.

    A trial (``trial.py``) has some dense steps, which show how long backward goes on after its first
    gradients, and some compressed ones, which show what the codec takes in a real step. In between link and codec are
    measured by themselves.

    Attributes:
        report: what was found and decided last, as plain numbers; None before the first decision.
    """

    def __init__(self, exchange: Exchange, config: EDGCConfig, layout: Layout, parameters: Parameters) -> None:
        """Advise on the matrices of ``layout``."""
        self._config = config
        self._exchange = exchange
        self._matrices = layout.matrices
        self._dense_bytes = [parameters.gradient_bytes[matrix.name] for matrix in layout.matrices]
        self._rest_bytes = sum(parameters.gradient_bytes.values()) - sum(self._dense_bytes)
        self._device = parameters.device
        self._dtype = getattr(torch, config.factor_dtype)
        self._link: Link | None = None
        self._costs: list[CodecCost] = []
        self._hidden_s = 0.0
        self._busy_s: list[tuple[float, tuple[int, ...]]] = []
        self.report: dict[str, Any] | None = None

    def before_step(self, controller: Controller) -> None:
        """Measure or decide, if it is time to; issues collectives."""
        stage = controller.trial_stage
        if stage == "dense":
            self._link, self._busy_s = None, []
        elif stage == "compressed" and self._link is None:
            self._link = measure_link(self._exchange, self._device)
            most = max(controller.ranks)
            self._costs = measure_codec(self._exchange, self._matrices, most, self._dtype, self._device)
        elif stage == "over":
            if self._link is None or not self._busy_s:
                controller.begin_trial()  # it began in another process
            else:
                self._decide(controller, self._link)

    def after_step(self, record: StepRecord, span_s: float) -> None:
        """Take note of a step: ``span_s`` went by from its first bucket to its last."""
        if not record.compressed:
            self._hidden_s = span_s
        elif self._link is not None:
            self._busy_s.append((record.hook_s - record.wait_s, record.ranks))

    def _decide(self, controller: Controller, link: Link) -> None:
        model = self._model(link)
        ranks = controller.ranks
        break_even_rank = model.break_even_rank()
        max_rank = self._max_rank(break_even_rank)
        if max_rank is not None:
            ranks = tuple(min(rank, max_rank) for rank in ranks)
        chosen = model.paying(ranks)
        controller.end_trial([rank > 0 for rank in chosen], max_rank)
        some = chosen if any(chosen) else ranks
        self.report = {
            "step": controller.step,
            "link_mbit_per_s": link.bytes_per_s * 8e-6,
            "link_latency_s": link.latency_s,
            "link_burst_bytes": link.burst_bytes,
            "hidden_s": model.hidden_s,
            "codec_s": model.codec_s(some),
            "exchange_s": sum(model.rounds_s(some)),
            "round_bytes": list(model.exchanged_bytes(some)),
            "dense_bytes": model.gradient_bytes,
            "dense_exchange_s": link.seconds(model.gradient_bytes),
            "dense_s": model.dense_s(),
            "compressed_s": model.compressed_s(some),
            "break_even_mbit_per_s": model.break_even_bytes_per_s(some) * 8e-6,
            "break_even_rank": break_even_rank,
            "max_rank": max_rank,
            "matrices": len(chosen),
            "compressed_matrices": sum(rank > 0 for rank in chosen),
        }
        if self._exchange.worker == 0:
            get_logger().info("%s", describe(self.report))

    def _model(self, link: Link) -> CostModel:
        """The costs as measured by themselves, and as they were in the trial's last two steps."""
        model = CostModel(link, self._matrices, self._dense_bytes, self._rest_bytes, self._costs, self._dtype.itemsize)
        busy_s = min(self._busy_s[-2:])[0]
        expected_s = model.codec_s(self._busy_s[-1][1])
        # Backward hides as much as it does on the worker that hides least: minus, since the largest is taken.
        slowdown, shown_s = slowest(self._exchange, [busy_s / max(expected_s, 1e-9), -self._hidden_s], self._device)
        return model.in_training(slowdown=slowdown, hidden_s=-shown_s)

    def _max_rank(self, break_even_rank: int) -> int | None:
        """DAC's max_rank, unless it is given; None: as it is, also where no rank pays and ranks wait for a slower link.

        The paper's rule spends up to all that compression saves. Else it is a limit to the default rank, since a faster
        step is what compression is asked for.
        """
        config, found = self._config, break_even_rank
        if (
            found == 0
            or config.mode != "edgc"
            or config.max_rank is not None
            or config.target_compression_ratio is not None
        ):
            return None
        if config.error_model == "paper":
            return found
        return min(config.highest_rank, found)


def describe(report: dict[str, Any]) -> str:
    """One line for a user."""
    pays = report["compressed_matrices"] > 0
    break_even = report["break_even_mbit_per_s"]
    return (
        f"codec auto, step {report['step']}: the link has {report['link_mbit_per_s']:,.0f} Mbit/s and "
        f"{report['link_latency_s'] * 1e3:.2f} ms; a step waits {report['dense_s'] * 1e3:,.0f} ms dense and "
        f"{report['compressed_s'] * 1e3:,.0f} ms compressed (predicted); "
        + (f"compressing {report['compressed_matrices']} of {report['matrices']} matrices" if pays else "sending dense")
        + (f"; compression pays below {break_even:,.0f} Mbit/s" if break_even else "; compression pays nowhere")
    )
