"""The script, launched as a user launches it: what it trains, writes and prints, and how it refuses."""

import json
import math
import os
import pickle
from pathlib import Path

import pytest
from cli_helpers import TOY, launch, records, results
from ddp_jobs import tiny_gpt2
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_edgc.corpus import train_byte_level_bpe

STEPS = 8


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that the processes of pytest-xdist have in common."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cli"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(shared):
    return shared / "cache"


@pytest.fixture(scope="session")
def default_run(shared, cache):
    """Two workers, the embedded text, a new model; a checkpoint half-way. Launched once, also under xdist."""
    folder = shared / "default-run"
    words = [*TOY, "--embedded_train_bytes", "60000", "--cache_dir", cache, "--output_dir", folder]
    words += ["--max_steps", STEPS, "--save_steps", STEPS // 2, "--logging_steps", 2, "--max_rank", "8"]
    words += ["--per_device_train_batch_size", "2", "--max_eval_samples", "5"]
    outcome = shared / "default-run.pickle"
    with FileLock(shared / "default-run.lock"):
        if not outcome.exists():
            outcome.write_bytes(pickle.dumps(launch(*words)))
    run = pickle.loads(outcome.read_bytes())
    assert run.code == 0, run.err
    return run, folder, words


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number} of a text\n" for number in range(300)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, text_file):
    """A model and its tokenizer as save_pretrained leaves them."""
    folder = tmp_path_factory.mktemp("model")
    tiny_gpt2(vocab_size=300).save_pretrained(folder)
    train_byte_level_bpe([text_file.read_text()], 300, folder / "cache").save_pretrained(folder)
    return folder


def test_default_run_trains_two_workers_and_compresses(default_run):
    _, folder, _ = default_run
    written = results(folder)
    # Dense bytes of a step are 4 for each parameter, only when gradients were really exchanged.
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert written["edgc_dense_bytes"] == STEPS * 4 * model.num_parameters()
    assert 0 < written["edgc_sent_bytes"] < written["edgc_dense_bytes"] / 2
    ratio = written["edgc_dense_bytes"] / written["edgc_sent_bytes"]
    assert written["edgc_compression_ratio"] == pytest.approx(ratio)
    assert 1 <= written["edgc_final_rank"] <= 8
    assert written["train_runtime"] > 0 and written["edgc_hook_s"] > 0


def test_default_run_records_every_step(default_run):
    _, folder, _ = default_run
    made = records(folder)
    assert [record["step"] for record in made] == list(range(STEPS))
    assert sum(record["sent_bytes"] for record in made) == results(folder)["edgc_sent_bytes"]
    assert any(record["compressed"] and record["rank"] > 0 for record in made)
    assert any(record["entropy"] is not None for record in made)


def test_default_run_measures_perplexity(default_run):
    _, folder, _ = default_run
    written = results(folder)
    assert written["eval_tokens"] == 5 * (32 - 1)  # blocks x predicted tokens, none counted twice on two workers
    assert written["perplexity"] == pytest.approx(math.exp(written["eval_nll"]))
    assert 1 < written["perplexity"] < 2 * 300  # an untrained model has about as many as there are tokens
    assert written["eval_loss"] == pytest.approx(written["eval_nll"], rel=0.05)


def test_default_run_writes_a_model_that_loads(default_run):
    _, folder, _ = default_run
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 300
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"


def test_default_run_leaves_a_report_and_a_model_card(default_run):
    run, folder, _ = default_run
    page, written = (folder / "edgc_report.html").read_text(), results(folder)
    assert f"{written['perplexity']:,.2f}" in page and "data:image/png" in page
    assert run.err.count("run report: ") == 1  # on the first worker, once the perplexity was known
    card = (folder / "README.md").read_text()
    assert f"(compression ratio {written['edgc_compression_ratio']:.2f})" in card
    assert f"perplexity: {written['perplexity']:.4g}" in card


def test_default_run_says_what_it_did(default_run):
    run, folder, _ = default_run
    written = results(folder)
    assert run.out.count("doing both") == 1
    assert run.out.count("text: standard library of Python") == 1
    for part in ("workers", "perplexity", f"{written['perplexity']:.2f}", "compression ratio", "written to"):
        assert part in run.out
    assert f"{STEPS}/{STEPS}" in run.err  # the progress bar
    for noise in ("Warning", "warning", "loss_type", "Traceback", "terminate called"):
        assert noise not in run.err + run.out


def test_resumes_from_a_checkpoint(default_run, tmp_path):
    _, folder, words = default_run
    half = folder / f"checkpoint-{STEPS // 2}"
    run = launch(*words, "--output_dir", tmp_path, "--resume_from_checkpoint", half)
    assert run.code == 0, run.err
    assert [record["step"] for record in records(tmp_path)] == list(range(STEPS // 2, STEPS))
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == STEPS
    logged = [entry["step"] for entry in state["log_history"] if "loss" in entry]
    assert logged == list(range(2, STEPS + 1, 2))  # those before the checkpoint came with it
    before, after = results(folder)["perplexity"], results(tmp_path)["perplexity"]
    assert after == pytest.approx(before, rel=0.02)


def test_text_file_trains_and_evaluates(text_file, cache, tmp_path):
    words = [*TOY, "--train_file", text_file, "--cache_dir", cache, "--output_dir", tmp_path, "--mode", "static"]
    words += ["--num_train_epochs", 1, "--rank", "2", "--eval_strategy", "epoch", "--save_strategy", "no"]
    run = launch(*words)
    assert run.code == 0, run.err
    written = results(tmp_path)
    assert written["edgc_final_rank"] == 2
    assert written["edgc_sent_bytes"] < written["edgc_dense_bytes"]
    assert written["eval_tokens"] % 31 == 0 and written["perplexity"] > 1
    assert str(text_file) in "".join(part.strip() for part in run.out.replace("│", "").splitlines())


def test_local_model_folder_and_a_file_of_arguments(text_file, model_folder, cache, tmp_path):
    """Evaluation only, on the kind of file and arguments that a program would write; one worker."""
    (tmp_path / "arguments.json").write_text(
        json.dumps(
            {
                "model_name_or_path": str(model_folder),
                "validation_file": str(text_file),
                "block_size": 32,
                "do_eval": True,
                "cache_dir": str(cache),
                "output_dir": str(tmp_path / "out"),
            }
        )
    )
    run = launch(tmp_path / "arguments.json", workers=1)
    assert run.code == 0, run.err
    written = results(tmp_path / "out")
    assert 1 < written["perplexity"] < 2 * 300
    assert "edgc_sent_bytes" not in written and "doing both" not in run.out
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_local_model_folder_trains(text_file, model_folder, cache, tmp_path):
    words = ["--model_name_or_path", model_folder, "--train_file", text_file, "--cache_dir", cache]
    words += ["--output_dir", tmp_path, "--max_steps", "3", "--block_size", "32", "--do_train"]
    run = launch(*words, "--save_strategy", "no")
    assert run.code == 0, run.err
    written = results(tmp_path)
    assert "perplexity" not in written
    assert 0 < written["edgc_sent_bytes"] < written["edgc_dense_bytes"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path).transformer.wte.weight
    start = AutoModelForCausalLM.from_pretrained(model_folder).transformer.wte.weight
    assert trained.shape == start.shape and 0 < (trained - start).abs().max() < 0.01  # 3 steps of at most 5e-5


def refused(run, *parts):
    """One message, nothing trained, a quick end with an exit code that is not 0 and no traceback of the script."""
    assert run.code != 0
    assert len(run.errors) == 1, run.err
    assert [part for part in parts if part not in run.errors[0]] == []
    assert 'run_clm_edgc.py", line' not in run.err
    assert "it/s" not in run.err
    assert run.wall_s < 60


REFUSALS = {
    "short text": (
        ["--train_file", "SHORT", "--block_size", "64"],
        ["tokens", "block_size=64", "largest usable block"],
    ),
    "large block": (["--block_size", "65"], ["block_size=65", "64 positions"]),
    "empty file": (["--train_file", "EMPTY"], ["empty.txt", "is empty"]),
    "unknown value": (["--mode", "fastest"], ["--mode", "'fastest'", "edgc", "static", "none"]),
    "missing validation": (
        ["--train_file", "SHORT", "--do_train", "--do_eval", "--validation_split_percentage", "0"],
        ["no text to evaluate on", "validation_file"],
    ),
    "missing validation file": (["--validation_file", "missing.txt"], ["validation_file='missing.txt'"]),
    "hub name": (
        ["--config_overrides", "", "--model_name_or_path", "gpt2"],
        ["model_name_or_path='gpt2'", "local folder", "hf download gpt2 --local-dir"],
    ),
    "long window": (["--max_steps", "5", "--window_steps", "6"], ["window_steps=6", "5 optimizer steps"]),
    "long warm-up": (
        ["--max_steps", "5", "--warmup_fraction", "0.9", "--warmup_max_fraction", "0.9"],
        ["warmup_fraction=0.9", "5 optimizer steps"],
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_refusals(name, cache, tmp_path):
    words, parts = REFUSALS[name]
    (tmp_path / "short.txt").write_text("one line\nand another\n", encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    places = {"SHORT": tmp_path / "short.txt", "EMPTY": tmp_path / "empty.txt"}
    words = [places.get(word, word) for word in words]
    base = [*TOY, "--embedded_train_bytes", "60000", "--cache_dir", cache, "--output_dir", tmp_path / "out"]
    refused(launch(*base, *words, workers=1), *parts)
    assert not list(Path(tmp_path / "out").rglob("*.safetensors"))


def test_refusal_on_two_workers_is_said_once_and_ends_both(cache, tmp_path):
    words = [*TOY, "--embedded_train_bytes", "60000", "--cache_dir", cache, "--output_dir", tmp_path]
    run = launch(*words, "--max_steps", "5", "--window_steps", "6")
    refused(run, "window_steps=6", "5 optimizer steps")
    assert "exitcode  : 2" in run.err  # the launcher's report of the worker that it saw end first


def test_workers_that_would_train_alone_are_refused(cache, tmp_path):
    words = [*TOY, "--embedded_train_bytes", "60000", "--cache_dir", cache, "--output_dir", tmp_path]
    run = launch(*words, "--use_cpu", "false", CUDA_VISIBLE_DEVICES="")
    refused(run, "started 2 processes", "--use_cpu")
