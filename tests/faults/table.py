"""The table of faults in README.md, made from the marks on the tests: python tests/faults/table.py --write."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
HEAD = """# What can go wrong, and what happens then

Made from the tests by `python tests/faults/table.py --write`; each row is a test in this folder or the one above,
with real gloo workers unless it needs none.

| fault | what a user sees | test |
|---|---|---|
"""


def table() -> str:
    """The whole README.md."""
    sys.path[:0] = [path for path in (str(FOLDER), str(FOLDER.parent)) if path not in sys.path]
    rows = []
    for file in [*sorted(FOLDER.glob("test_*.py")), *sorted(FOLDER.parent.glob("test_*.py"))]:
        if "mark.fault(" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(file.stem)
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []) if name.startswith("test_") else []:
                if mark.name == "fault":
                    rows.append(f"| {mark.args[0]} | {mark.args[1]} | `{file.name}::{name}` |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(table(), encoding="utf-8")
    else:
        print(table(), end="")
