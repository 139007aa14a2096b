"""``hf-edgc``: reports of runs, saved state, and whether compression pays on a link."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hf_edgc import __version__
from hf_edgc.clm.errors import UsageError, report

_EPILOG = """Exit code 0: done; 2: something that you passed can't be used, the message says what."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "probe":
        parser.error(f"unknown argument {rest[0]}; see hf-edgc {options.command} --help")
    try:
        if options.command == "report":
            _report(options.runs, options.output_dir)
        elif options.command == "inspect":
            _inspect(options.checkpoint)
        else:
            from hf_edgc.probe import main as probe

            probe(rest)
    except UsageError as error:
        return report(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hf-edgc", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"hf-edgc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    made = commands.add_parser(
        "report",
        help="write the run report of one run, or several over each other",
        description="Writes edgc_report.html (edgc_comparison.html for several runs) and its pictures as PNG files.",
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run, or its file of records")
    made.add_argument("--output_dir", type=Path, help="where the report goes; default: the first run's folder")
    seen = commands.add_parser(
        "inspect", help="show the state in a checkpoint", description="Shows phase, ranks and error norms."
    )
    seen.add_argument("checkpoint", type=Path, help="a checkpoint-N folder, or one that save_state wrote")
    commands.add_parser(
        "probe",
        add_help=False,  # it has its own, with the options of run_clm_edgc.py
        help="measure the link between workers and say whether compression pays for a model (start it on all workers)",
    )
    return parser


def _report(runs: Sequence[Path], output_dir: Path | None) -> None:
    try:
        from hf_edgc.report import RunError, write_report
    except ModuleNotFoundError as error:
        raise UsageError(f"The report needs {error.name}: pip install hf_edgc[report].") from error
    try:
        page = write_report(runs, output_dir)
    except (RunError, OSError) as error:
        raise UsageError(str(error)) from error
    print(page)


def _inspect(checkpoint: Path) -> None:
    from hf_edgc.inspection import inspect_checkpoint, print_states

    print_states(inspect_checkpoint(checkpoint), Console(highlight=False))
