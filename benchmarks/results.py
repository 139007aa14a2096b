"""RESULTS.md and its plots, from the newest records in ``records/``.

.venv/bin/python benchmarks/results.py
.venv/bin/python benchmarks/results.py --records FOLDER --output FOLDER

A few seconds. Tables are generated, never typed: to change one, make a new record and run this.
"""

import argparse
import importlib
import json
from pathlib import Path

from record import RECORDS
from sections import SECTIONS, Records

FOLDER = Path(__file__).parent
HEAD = """# Results

Made by `python benchmarks/results.py` from the newest records in `benchmarks/records/`; `make bench` measures anew.
"""


def load(folder: Path) -> Records:
    """All records by kind, newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))]
    found.sort(key=lambda record: record["date"], reverse=True)
    return {kind: [record for record in found if record["kind"] == kind] for kind in {r["kind"] for r in found}}


def document(records: Records) -> str:
    """The whole RESULTS.md; sections without records are left out."""
    texts = [importlib.import_module(f"sections.{name}").text(records) for name in SECTIONS]
    return "\n".join([HEAD, *(text for text in texts if text is not None)])


def draw(records: Records, folder: Path) -> list[Path]:
    """Write every section's figures into ``folder``; returns their paths."""
    paths = []
    for name in SECTIONS:
        figures = getattr(importlib.import_module(f"sections.{name}"), "figures", lambda records: {})
        for file, figure in figures(records).items():
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / file, dpi=130, metadata={"Software": None})
            paths.append(folder / file)
    return paths


def main(records: Path, output: Path) -> None:
    """Generate everything."""
    loaded = load(records)
    output.mkdir(parents=True, exist_ok=True)
    (output / "RESULTS.md").write_text(document(loaded), encoding="utf-8")
    for path in [output / "RESULTS.md", *draw(loaded, output / "plots")]:
        print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--output", type=Path, default=FOLDER, help="where RESULTS.md and plots/ go")
    main(**vars(parser.parse_args()))
