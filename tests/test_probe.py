"""``hf-edgc probe``: what it computes from given times, and started on two workers as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import REPOSITORY, TOY_MODEL

from hf_edgc.clm.arguments import ModelArguments
from hf_edgc.clm.errors import UsageError
from hf_edgc.config import EDGCConfig
from hf_edgc.cost import CodecCost, CostModel, Link
from hf_edgc.layout import build_layout
from hf_edgc.probe import main, model_on_meta, rows, verdict

CONFIG = EDGCConfig(max_rank=2)
LAYOUT = build_layout([("w", (1000, 1000)), ("b", (1000,))], CONFIG)


def costs(bytes_per_s):
    return CostModel(Link(1e-3, bytes_per_s), LAYOUT.matrices, [4_000_000], 4000, [CodecCost(0.0, 0.005)], 4)


def test_a_slow_link_pays():
    """10 MB/s: dense takes 1 + 400.4 ms; rank 2 computes 10 ms and sends 12 and 8 kB: 10 + 1 + 1.2 + 1 ms."""
    found = dict(rows(costs(1e7), LAYOUT, CONFIG, 4, ModelArguments()))
    assert found["bytes a step"] == "0.0 MB instead of 4.0 MB" and found["compression ratio"] == "200.20"
    assert found["dense exchange"] == "401 ms" and found["compressed exchange"] == "13 ms, 10 of them computing"
    assert found["link"] == "80 Mbit/s, 1.00 ms" and found["workers"] == "4"
    assert verdict(costs(1e7), CONFIG) == (
        "Compression pays on this link: 97% less time a synchronization, with 1 of 1 matrices compressed."
    )


def test_a_fast_link_does_not():
    """10 GB/s: dense takes 1.4 ms, compression computes 10. Equal at (4.004 - 0.012) MB / (10 + 1 ms) = 363 MB/s."""
    found = dict(rows(costs(1e10), LAYOUT, CONFIG, 4, ModelArguments()))
    assert "does not pay" in verdict(costs(1e10), CONFIG)
    assert found["break-even"] == "2,903 Mbit/s"


def test_a_model_is_built_without_weights():
    model = model_on_meta(ModelArguments(config_overrides=TOY_MODEL))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert "lm_head.weight" not in dict(model.named_parameters())  # tied: synchronized once


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Start the probe on all workers: torchrun --standalone --nproc_per_node 2"),
        (["--max_ranks", "3"], "unknown argument --max_ranks"),
        (["--max_rank", "0"], "max_rank=0 is not allowed"),
    ],
)
def test_refusals(words, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=re.escape(message)):
        main(words)


def launch(*words):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*launcher, "-m", "hf_edgc", "probe", *words],
        capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=Path(__file__).parent,
    )  # fmt: skip


def test_two_workers_measure_and_answer_once():
    done = launch("--config_overrides", TOY_MODEL, "--max_rank", "4", "--min_compression_ratio", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("EDGC probe") == 1
    assert re.search(r"link +│ [\d,]+ Mbit/s, \d+\.\d\d ms", done.stdout)
    assert float(re.search(r"compression ratio +│ ([\d.]+)", done.stdout)[1]) > 2
    assert done.stdout.count("Compression pays on this link") + done.stdout.count("Compression does not pay") == 1


def test_a_model_that_is_not_there_is_named_once():
    done = launch("--model_name_or_path", "gpt2")
    assert done.returncode != 0 and done.stderr.count("error: model_name_or_path='gpt2' could not be loaded") == 1
