"""Codecs: pure mathematics of compression, without collectives and without state."""

from hf_edgc.codecs.base import Codec, Decoded, Rounds, Slot
from hf_edgc.codecs.dense import Dense
from hf_edgc.codecs.low_rank import LowRank

CODECS: dict[str, type[Codec]] = {"none": Dense, "low_rank": LowRank}
"""Every codec by name; the contract tests run over this table."""

__all__ = ["CODECS", "Codec", "Decoded", "Dense", "LowRank", "Rounds", "Slot"]
