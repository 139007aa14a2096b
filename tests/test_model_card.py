"""The section that EDGC adds to the README.md that Trainer writes."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_runs import LINK

from hf_edgc.config import EDGCConfig
from hf_edgc.model_card import section
from hf_edgc.records import Totals
from hf_edgc.run_info import RunInfo

TOTALS = Totals(steps=1000, compressed_steps=1000, sent_bytes=10**8, dense_bytes=10**9, hook_s=5.0)


def info(link=None, **options):
    matrices = [{"name": "wte.weight", "rows": 8, "cols": 8, "max_rank": 2}]
    return RunInfo("0.2.0", 4, 50, EDGCConfig(**options).to_dict(), matrices, [], link)


def test_section_says_what_was_used_and_what_came_out():
    log = [{"eval_perplexity": 70.0}, {"eval_perplexity": 62.447}, {"loss": 1.0}]
    text = section(info(link=LINK, max_rank=8, exclude=["*wpe*"]), TOTALS, 4.0, log)
    for part in (
        "4 data-parallel workers with hf_edgc 0.2.0", "EDGCConfig(max_rank=8, exclude=['*wpe*'])", "final rank 4;",
        "100.0 MB in 1,000 steps instead of 1,000.0 MB (compression ratio 10.00)", "perplexity: 62.45",
        "the link has 94 Mbit/s",
    ):  # fmt: skip
        assert part in text


def test_section_leaves_out_what_was_not_measured():
    text = section(info(mode="none"), TOTALS, 0.0, [{"eval_loss": 4.5}])
    assert "evaluation loss: 4.5" in text and "none (dense)" in text
    assert "perplexity" not in text and "the link has" not in text


def trained_card(output_dir, push):
    """Train, then write the card as a user does: twice, or by way of an upload that only looks at it."""
    import transformers.trainer
    from test_callback import CONFIG, make_trainer

    from hf_edgc import EDGCCallback

    callback = EDGCCallback(CONFIG, report=False)
    trainer = make_trainer(output_dir, [callback])
    trainer.train()
    uploaded = []
    if push:
        readme = Path(output_dir) / "README.md"
        trainer.init_hf_repo = lambda **_: setattr(trainer, "hub_model_id", "someone/model")
        before = transformers.trainer.hf_api
        api = SimpleNamespace(upload_folder=lambda **_: uploaded.append(readme.read_text()))
        transformers.trainer.hf_api = lambda: api
        try:
            trainer.push_to_hub()
        finally:
            transformers.trainer.hf_api = before
    else:
        trainer.create_model_card(tags="text")
        trainer.create_model_card(tags="text")
    return uploaded, callback.summary()["edgc_compression_ratio"]


@pytest.mark.parametrize("push", [False, True])
def test_trainer_writes_the_section_once_and_before_the_upload(run_workers, tmp_path, push):
    (uploaded, ratio), (uploaded_by_second, _) = run_workers(trained_card, output_dir=str(tmp_path), push=push)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---") and "## Training procedure" in text  # Trainer's own part
    assert text.count("### Gradient compression") == 1
    assert re.search(r"ratio ([\d.]+)\)", text)[1] == f"{ratio:.2f}" and ratio > 2
    assert uploaded == ([text] if push else []) and uploaded_by_second == []
