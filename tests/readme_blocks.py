"""The generated parts of the documents and notebooks: python tests/readme_blocks.py --write (make blocks)."""

import configparser
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
    "static 32": "static, rank 32, float32",
    "edgc": "edgc, float32 factors",
    "auto": 'edgc, `codec="auto"`',
}
"""Rows of RESULTS.md that README shows, and what it calls them."""

UNKNOWN_OWNER = "OWNER"
"""Stands in setup.cfg's url as long as the project has no public address."""


def all_options():
    """A table of every option: name, default, help."""
    return _options(spec.name for spec in fields(EDGCConfig))


def first_options():
    """A table of the options that matter first."""
    return _options(FIRST)


def run():
    """What `make run` printed at its end, and what the same run without compression adds to it."""
    default, dense = (
        (ROOT / "docs" / "run" / f"{name}.txt").read_text(encoding="utf-8") for name in ("default", "dense")
    )
    ratio, with_edgc, without = (
        _figure(default, "compression ratio"),
        _figure(default, "perplexity"),
        _figure(dense, "perplexity"),
    )
    return (
        f"```text\n{default}```\n\n"
        'The same run without compression, `make run OUTPUT_DIR=runs/dense RUN_OPTIONS="--mode none"`, has perplexity\n'
        f"{without:.2f}: here {ratio:.1f} times fewer bytes cost {100 * (with_edgc / without - 1):.1f} % of perplexity."
    )


def when():
    """For each link: step time of GPT-2 small without and with compression, and whether EDGC's defaults help there."""
    found = _step_times("GPT-2 small")
    links = [column for column in found["ddp"] if "bit/s" in column or column == "loopback"]
    lines = [["link", *CONTENDERS.values(), "does EDGC help?"], ["---", *("---:" for _ in CONTENDERS), "---"]]
    for link in links:
        times = [_median(found[name][link]) for name in CONTENDERS]
        lines.append([link, *times, _verdict(found["edgc"][link])])
    edges = [_step_times(model)["edgc"]["break-even"] for model in ("GPT-2 small", "GPT-2 of 16.8 M")]
    return _table(lines) + f"\n\nBreak-even: {edges[0]} here, and {edges[1]} for a GPT-2 of 16.8 M parameters."


def quality():
    """For each size of bench_quality: what the default costs in perplexity at each share of the bytes."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").split("\n## Quality")[1].split("\n## ")[0]
    lines = [["model", "bytes of dense", "perplexity over dense", "over PowerSGD at equal bytes", "seeds"]]
    lines.append(["---", *["---:"] * 4])
    for size in text.split("\n### ")[1:]:
        model = re.match(r"[^:]*: (.*? parameters), (.*? steps)", size)
        for row in _rows(size, "setup"):
            if re.fullmatch(r"edgc-\d+x?", row["setup"]):
                static = f"{row['to static']}, {row['than static']}" if row["to static"] else ""
                lines.append(
                    [", ".join(model.groups()), row["bytes of dense"], row["over dense"], static, row["seeds"]]
                )
    return _table(lines)


def address():
    """Where the project is on the web, setup.cfg's url."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    return settings["metadata"]["url"]


def badges():
    """Whether the notebooks can be opened from the web, and how."""
    if UNKNOWN_OWNER in address():
        return (
            "The Colab badges and the cells that install lead nowhere yet: the project has no public address. Until\n"
            "then, run the notebooks from a clone."
        )
    return "Each opens in Colab by the badge at its top; its first cell installs the project there."


def with_address(text):
    """``text`` with the project's address where another one stands."""
    owner_and_name = address().removeprefix("https://github.com/")
    return re.sub(r"(github(?:\.com)?/)[\w.-]+/hf_edgc\b", rf"\g<1>{owner_and_name}", text)


BLOCKS = {
    ("README.md", "options"): first_options,
    ("README.md", "run"): run,
    ("README.md", "when"): when,
    ("README.md", "quality"): quality,
    ("docs/options.md", "all"): all_options,
    ("notebooks/README.md", "badges"): badges,
}

ADDRESSED = ("CITATION.cff", *(f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))))
"""Files that hold the project's address."""

GENERATED = sorted({file for file, _ in BLOCKS} | set(ADDRESSED))


def made_anew(file):
    """The text of ``file`` as its sources say."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for (path, name), make in BLOCKS.items():
        if path == file:
            pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            text, found = re.subn(pattern, rf"\g<1>{make()}\n\g<2>", text, flags=re.DOTALL)
            assert found == 1, f"{file} has no block {name}"
    return with_address(text) if file in ADDRESSED else text


def _options(names):
    specs = {spec.name: spec for spec in fields(EDGCConfig)}
    lines = [["option", "default", ""], ["---", "---", "---"]]
    for name in names:
        spec = specs[name]
        default = "" if spec.default is None else f"`{spec.default}`"
        lines.append([f"`{name}`", default, spec.metadata["help"]])
    return _table(lines)


def _table(lines):
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _step_times(model):
    """Cells of the table of whole steps in RESULTS.md, by contender and column."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    return {row["contender"]: row for row in _rows(text.split(f"\n### {model}")[1], "contender")}


def _rows(text, first):
    """Rows, as dicts by column, of the first table in ``text`` whose first column is called ``first``."""
    table = text[text.index(f"\n| {first} |") + 1 :].split("\n\n")[0]
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def _figure(summary, name):
    return float(re.search(rf"{name} +│ ([\d.]+)", summary)[1])


def _median(cell):
    return re.sub(r" \(.*\)", "", cell)


def _verdict(cell):
    """Of ``ratio (lowest..highest)`` over plain DDP: only a range that leaves 1 out says something."""
    ratio, lowest, highest = map(float, re.fullmatch(r"([\d.]+) \(([\d.]+)\.\.([\d.]+)\)", cell).groups())
    if highest < 1:
        return f"yes, {1 / ratio:.1f} times as fast"
    return f"no, {100 * (ratio - 1):.0f} % slower" if lowest > 1 else "no clear difference"


if __name__ == "__main__":
    for file in GENERATED:
        document = ROOT / file
        made = made_anew(file)
        if "--write" in sys.argv:
            document.write_text(made, encoding="utf-8")
        elif made != document.read_text(encoding="utf-8"):
            print(f"{file} is not as its sources say: run python tests/readme_blocks.py --write")
