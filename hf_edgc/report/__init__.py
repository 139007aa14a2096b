"""The run report: one HTML file and its pictures, made from what runs have left in their folders."""

from hf_edgc.report.page import write_report
from hf_edgc.report.run import Run, RunError, read_run

__all__ = ["Run", "RunError", "read_run", "write_report"]
