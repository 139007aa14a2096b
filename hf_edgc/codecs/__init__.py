"""Codecs: pure mathematics of compression, without collectives and without state."""

from hf_edgc.codecs.base import Approximation, Codec, Decoded, Product, Rounds, Slot, Whole
from hf_edgc.codecs.dense import Dense
from hf_edgc.codecs.low_rank import LowRank

CODECS: dict[str, type[Codec]] = {"none": Dense, "low_rank": LowRank}
"""Every codec by name; the contract tests run over this table."""

__all__ = ["CODECS", "Approximation", "Codec", "Decoded", "Dense", "LowRank", "Product", "Rounds", "Slot", "Whole"]
