"""benchmarks/RESULTS.md is what its records say, and links are refused politely."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")


def generated(records, output):
    command = [sys.executable, str(BENCHMARKS / "results.py"), "--records", str(records), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (output / "RESULTS.md").read_text(encoding="utf-8"), done.stdout.split()


def test_results_are_generated_from_the_records(tmp_path):
    text, written = generated(BENCHMARKS / "records", tmp_path)
    assert text == RESULTS, "run make results"
    plots = [path for path in map(Path, written) if path.suffix == ".png"]
    assert len(plots) >= 4 and all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    assert all(f"plots/{path.name}" in RESULTS for path in plots)


def test_sections_without_records_are_left_out(tmp_path):
    (tmp_path / "records").mkdir()
    text, written = generated(tmp_path / "records", tmp_path)
    assert "##" not in text and len(written) == 1


@pytest.mark.parametrize("rate", ["fast", "0mbit"])
def test_a_rate_that_is_none_is_refused(rate):
    command = [
        sys.executable,
        str(BENCHMARKS / "bench_step.py"),
        "--models",
        "17m",
        "--links",
        rate,
        "--output",
        "none",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # The rate is named, or that root or tc is missing: one line, whoever runs this.
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
