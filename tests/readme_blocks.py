"""The generated parts of the documents: python tests/readme_blocks.py --write (make blocks)."""

import re
import sys
from dataclasses import fields
from pathlib import Path

from hf_edgc.config import EDGCConfig

ROOT = Path(__file__).parents[1]

FIRST = (
    "mode", "codec", "max_rank", "min_rank", "allocation", "target_compression_ratio", "window_steps", "lr_exponent",
    "error_model", "warmup_fraction", "factor_dtype", "error_dtype", "error_device", "include", "exclude",
)  # fmt: skip
"""Options that README shows."""

CONTENDERS = {
    "ddp": "plain DDP",
    "powerSGD_hook 32": "torch's powerSGD_hook, rank 32",
    "static 32": "static, rank 32",
    "edgc": "edgc, defaults",
    "auto": 'edgc, `codec="auto"`',
}
"""Rows of RESULTS.md that README shows, and what it calls them."""


def all_options():
    """A table of every option: name, default, help."""
    return _options(spec.name for spec in fields(EDGCConfig))


def first_options():
    """A table of the options that matter first."""
    return _options(FIRST)


def speed():
    """GPT-2 small's rows of the first table in RESULTS.md, that of whole steps, without the ranges."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    section = text.split("### GPT-2 small")[1].split("\n| contender")[1]
    section = "| contender" + section.split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if line[:1] == "|"]
    links = [index for index, name in enumerate(rows[0]) if "bit/s" in name or name == "loopback"]
    head = ["GPT-2 small, 124 M parameters", *(rows[0][index] for index in links)]
    lines = [head, ["---", *("---:" for _ in links)]]
    found = {row[0].strip("`"): row for row in rows[2:]}
    for name, shown in CONTENDERS.items():
        lines.append([shown, *(re.sub(r" \(.*?\)", "", found[name][index]) for index in links)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


BLOCKS = {
    ("README.md", "options"): first_options,
    ("README.md", "speed"): speed,
    ("docs/options.md", "all"): all_options,
}


def with_blocks(file, text):
    """``text`` of ``file`` with its blocks made anew."""
    for (path, name), make in BLOCKS.items():
        if path == file:
            pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            text, found = re.subn(pattern, rf"\g<1>{make()}\n\g<2>", text, flags=re.DOTALL)
            assert found == 1, f"{file} has no block {name}"
    return text


def _options(names):
    specs = {spec.name: spec for spec in fields(EDGCConfig)}
    lines = ["| option | default | |", "|---|---|---|"]
    for name in names:
        spec = specs[name]
        default = "" if spec.default is None else f"`{spec.default}`"
        lines.append(f"| `{name}` | {default} | {spec.metadata['help']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for file in {path for path, _ in BLOCKS}:
        document = ROOT / file
        made = with_blocks(file, document.read_text(encoding="utf-8"))
        if "--write" in sys.argv:
            document.write_text(made, encoding="utf-8")
        elif made != document.read_text(encoding="utf-8"):
            print(f"{file} is not as its sources say: run python tests/readme_blocks.py --write")
