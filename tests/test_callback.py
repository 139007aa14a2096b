"""EDGCCallback in a real Trainer on two gloo workers."""

import json

import pytest
from ddp_jobs import same_everywhere, tiny_gpt2
from resume_jobs import Tokens, reset_accelerate

from hf_edgc import EDGCCallback, EDGCConfig

CONFIG = EDGCConfig(max_rank=4, min_rank=1, window_steps=4, entropy_every=2, min_compression_ratio=1.0)


def make_trainer(output_dir, callbacks, model=None, **options):
    from transformers import Trainer, TrainingArguments

    reset_accelerate()
    defaults = {
        "max_steps": 8, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "logging_steps": 2, "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=output_dir, **{**defaults, **options})
    model = None if "model_init" in options else model or tiny_gpt2()
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)


def outcome(callback, trainer):
    summary = callback.summary()
    equal = all(same_everywhere(parameter.detach()) for parameter in trainer.model.parameters())
    return summary["edgc_compression_ratio"], callback.state.totals.steps, equal


def ways_to_train(way, output_dir):
    callback = EDGCCallback(CONFIG, report=False)
    options = {"gradient_accumulation_steps": 2} if way == "accumulation" else {}
    if way.startswith("find_unused"):
        options["ddp_find_unused_parameters"] = way.endswith("True")
    trainer = make_trainer(output_dir, [] if way == "added later" else [callback], **options)
    if way == "added later":
        trainer.add_callback(callback)
    if way == "evaluate first":
        trainer.evaluate()
    if way == "predict first":
        trainer.predict(Tokens())
    trainer.train()
    if way == "evaluate between":
        trainer.evaluate()
    if way in ("train twice", "evaluate between"):
        trainer.train()
    return outcome(callback, trainer), trainer.state.log_history


WAYS = [
    "plain", "train twice", "evaluate first", "predict first", "evaluate between", "accumulation", "added later",
    "find_unused_True", "find_unused_False",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_hook_is_on_whatever_the_order_of_calls(run_workers, tmp_path, way):
    for (ratio, steps, equal), history in run_workers(ways_to_train, way=way, output_dir=str(tmp_path)):
        assert ratio > 2 and steps == 8 and equal
        figures = next(entry for entry in history if "loss" in entry)
        assert figures["edgc/compression_ratio"] > 2 and figures["edgc/sent_mb"] > 0
        assert figures["edgc/rank_mean"] > 0 and figures["edgc/hook_s"] > 0 and figures["edgc/entropy"] < 0
        # the norm of one worker's gradient, which averaging over workers and compression make smaller
        assert figures["edgc/grad_norm_dense"] > 0.5 * figures["grad_norm"] > 0
    records = [json.loads(line) for line in (tmp_path / "edgc_steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(8))
    assert all(record["compressed"] and record["learning_rate"] is not None for record in records[1:])


def model_init_run(output_dir):
    from transformers import Trainer, TrainingArguments

    make_trainer(output_dir, [])  # resets Accelerate's state
    callback = EDGCCallback(CONFIG, report=False)
    arguments = TrainingArguments(
        output_dir=output_dir, max_steps=5, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(args=arguments, model_init=lambda: tiny_gpt2(), train_dataset=Tokens(), callbacks=[callback])
    trainer.train()
    trainer.train()
    return outcome(callback, trainer)


def test_model_init(run_workers, tmp_path):
    for ratio, steps, equal in run_workers(model_init_run, output_dir=str(tmp_path)):
        assert ratio > 2 and steps == 5 and equal


def test_figures_reach_tensorboard(run_workers, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for entry in run_workers(reported, output_dir=str(tmp_path)):
        assert entry["edgc/compression_ratio"] > 2
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent))
    events.Reload()
    tags = {f"train/edgc/{name}" for name in FIGURES}
    assert tags <= set(events.Tags()["scalars"])
    ratios = [event.value for event in events.Scalars("train/edgc/compression_ratio")]
    assert len(ratios) == 4 and ratios[-1] == pytest.approx(entry["edgc/compression_ratio"], rel=1e-6)


FIGURES = ["compression_ratio", "rank_mean", "entropy", "sent_mb", "hook_s", "grad_norm_dense"]


def reported(output_dir):
    import os

    os.environ["TENSORBOARD_LOGGING_DIR"] = output_dir
    trainer = make_trainer(output_dir, [EDGCCallback(CONFIG, report=False)], report_to="tensorboard")
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry][-1]


def train_unwrapped(output_dir):
    trainer = make_trainer(output_dir, [EDGCCallback(CONFIG, report=False)])
    trainer.model._is_accelerate_prepared = True  # what makes Trainer skip the wrapping
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    return str(caught.value)


def test_training_without_ddp_is_refused(run_workers, tmp_path):
    for message in run_workers(train_unwrapped, output_dir=str(tmp_path)):
        assert "2 workers are about to train without DDP" in message


def too_long(output_dir):
    trainer = make_trainer(output_dir, [EDGCCallback(EDGCConfig(window_steps=9))])
    with pytest.raises(ValueError) as caught:
        trainer.train()
    return str(caught.value), trainer.state.global_step


def test_a_window_longer_than_the_run_is_refused_before_training(run_workers, tmp_path):
    for message, step in run_workers(too_long, output_dir=str(tmp_path)):
        assert "window_steps=9" in message and "8 optimizer steps" in message and step == 0


def test_contract_with_trainer_is_told_in_a_sentence():
    with pytest.raises(RuntimeError, match="must be called by a transformers Trainer"):
        EDGCCallback(CONFIG).on_init_end(None, None, None)
