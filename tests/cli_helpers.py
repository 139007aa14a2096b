"""Launching the script as a user does, at toy size."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "run_clm_edgc.py"
CONFIG = {1: "single_gpu.yaml", 2: "cpu_2proc.yaml"}

TOY_MODEL = "n_embd=64,n_head=2,n_layer=2,n_positions=64"
TOY = ["--config_overrides", TOY_MODEL, "--tokenizer_vocab_size", "300", "--block_size", "32"]


@dataclass(frozen=True)
class Run:
    """What came out of a launch."""

    code: int
    out: str
    err: str
    wall_s: float

    @property
    def errors(self):
        """Messages of the script itself, each with its lines joined."""
        lines, messages = self.err.splitlines(), []
        for number, line in enumerate(lines):
            if line.startswith("error: "):
                rest = []
                for following in lines[number + 1 :]:
                    # The paragraph ends where the launcher begins to speak: with a log line or its traceback.
                    if not following or re.match(r"[EWI]\d{4} |Traceback|\[|error: ", following):
                        break
                    rest.append(following)
                messages.append(" ".join([line, *rest]))
        return messages


def launch(*words, workers=2, timeout_s=120, **environment):
    """Run the script through ``accelerate launch`` with the repository's configuration for so many workers."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(REPOSITORY / "accelerate_configs" / CONFIG[workers]), str(SCRIPT)]
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    start = time.monotonic()
    done = subprocess.run(
        [*command, *map(str, words)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def results(output_dir):
    """``all_results.json``."""
    return json.loads((Path(output_dir) / "all_results.json").read_text(encoding="utf-8"))


def records(output_dir):
    """``edgc_steps.jsonl``."""
    lines = (Path(output_dir) / "edgc_steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
