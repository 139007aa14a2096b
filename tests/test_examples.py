"""The example loop and Accelerate's launchers for notebooks, as a user starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def start(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, env=ENVIRONMENT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def launch_loop(*arguments):
    launcher = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/cpu_2proc.yaml",
    )
    return start(*launcher, "examples/accelerate_loop.py", *arguments)


def test_the_accelerate_loop_saves_and_resumes(tmp_path):
    first = launch_loop("--output_dir", str(tmp_path), "--steps", "8")
    assert float(re.search(r"\(([\d.]+) x less\)", first)[1]) > 5
    assert sorted(path.name for path in (tmp_path / "state").glob("edgc*")) == [
        "edgc_0_shared.safetensors",
        "edgc_0_step_4_worker_0.safetensors",
        "edgc_0_step_4_worker_1.safetensors",
    ]
    again = launch_loop("--output_dir", str(tmp_path), "--steps", "8", "--resume")
    assert "after 8 steps" in again


@pytest.mark.parametrize("launcher", ["notebook", "debug"])
def test_launchers_for_notebooks(tmp_path, launcher):
    start(sys.executable, "tests/launcher_script.py", launcher, str(tmp_path))
    results = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert len(results) == 2
    assert all(workers == "2" and float(ratio) > 5 for workers, ratio in results)
