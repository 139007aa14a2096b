"""The page: pictures and tables in one HTML file that needs nothing from outside, and the pictures beside it."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2

from hf_edgc.advice import describe
from hf_edgc.report import tables
from hf_edgc.report.figures import PICTURES
from hf_edgc.report.run import Run, folder_of, read_runs

ONE, SEVERAL = "edgc_report", "edgc_comparison"
"""Names of the page (.html) and of the folder of its pictures."""


def write_report(runs: Sequence[str | Path], destination: str | Path | None = None) -> Path:
    """Write the report of one run, or several over each other.

    Args:
        runs: their output folders, or the files of records in them; at least one.
        destination: where the page and the folder of pictures go; default: the first run's folder.

    Returns:
        The page: ``edgc_report.html``, or ``edgc_comparison.html`` for several runs.

    Raises:
        RunError: a folder holds no run or a damaged one.
        OSError: the report can't be written.
    """
    paths = [Path(run) for run in runs]
    found = read_runs(paths)
    target = folder_of(paths[0]) if destination is None else Path(destination)
    name = ONE if len(found) == 1 else SEVERAL
    pictures = draw(found)
    (target / name).mkdir(parents=True, exist_ok=True)
    for stale in (target / name).glob("*.png"):
        stale.unlink()
    for picture, data in pictures.items():
        (target / name / f"{picture}.png").write_bytes(data)
    page = target / f"{name}.html"
    page.write_text(render(found, pictures), encoding="utf-8")
    return page


def draw(runs: Sequence[Run]) -> dict[str, bytes]:
    """PNG data of each picture, by name; those that no run measured are left out."""
    drawn = {}
    for picture in PICTURES:
        figure = picture.draw(runs)
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            drawn[picture.name] = buffer.getvalue()
    return drawn


def render(runs: Sequence[Run], pictures: dict[str, bytes]) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_edgc.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        results=tables.results(runs),
        decisions=[(run.name, describe(run.info.link)) for run in runs if run.info is not None and run.info.link],
        link=tables.link(runs),
        configuration=tables.configuration(runs),
        pictures=[(each, base64.b64encode(pictures[each.name]).decode()) for each in PICTURES if each.name in pictures],
        missing=[each.title for each in PICTURES if each.name not in pictures],
    )
