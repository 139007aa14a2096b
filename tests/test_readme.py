"""README.md and docs/: every fenced block runs or is parsed, links lead somewhere, generated parts are current."""

import contextlib
import functools
import os
import re
import shlex
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import TOY_MODEL, results
from ddp_jobs import tiny_gpt2
from readme_blocks import ADDRESSED, GENERATED, ROOT, address, made_anew
from report_runs import write_run
from test_commands import save_after_steps

from hf_edgc.cli import main
from hf_edgc.probe import parse as parse_probe

DOCUMENTS = ["README.md", "docs/trouble.md", "docs/multi_node.md", "docs/options.md", "notebooks/README.md"]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TOY_TRAINING = f"--max_steps 4 --config_overrides {TOY_MODEL} --tokenizer_vocab_size 300 --embedded_train_bytes 60000"


def fences():
    """(document, language, text) of every fenced block."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        found += [(document, *match) for match in FENCE.findall(text)]
    return found


# --- Python blocks, each on two workers in the names that its section takes for granted


def run_trainer_block(code, output_dir):
    import transformers
    from resume_jobs import Tokens, reset_accelerate

    reset_accelerate()
    arguments = transformers.TrainingArguments(
        output_dir, max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    names = {"Trainer": transformers.Trainer, "model": wide_gpt2(), "args": arguments, "data": Tokens()}
    exec(code, names)
    names["trainer"].train()
    return names["trainer"].callback_handler.callbacks[0].state.totals.compression_ratio


def run_accelerate_block(code, output_dir):
    import accelerate
    from resume_jobs import reset_accelerate

    reset_accelerate()
    names = {"Accelerator": functools.partial(accelerate.Accelerator, cpu=True)}
    exec(code, names)
    model = wide_gpt2()
    model, optimizer = names["accelerator"].prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, names["accelerator"].backward)
    return names["plugin"].state.totals.compression_ratio


def run_ddp_block(code, output_dir):
    model = wide_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "ddp": torch.nn.parallel.DistributedDataParallel(model),
        "optimizer": optimizer,
        "scaler": SimpleNamespace(get_scale=lambda: 1.0),
    }
    exec(code, names)
    train(names["ddp"], optimizer, torch.Tensor.backward)
    return names["state"].totals.compression_ratio


def wide_gpt2():
    """Wide enough for the README's default rank to save bytes."""
    return tiny_gpt2(n_embd=256)


def train(model, optimizer, backward):
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(3):
        backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


PYTHON = {"EDGCCallback(": run_trainer_block, "EDGCPlugin(": run_accelerate_block, "edgc_hook)": run_ddp_block}


@pytest.mark.parametrize("mark", PYTHON)
def test_python_blocks_compress_on_two_workers(run_workers, tmp_path, mark):
    (code,) = [text for _, language, text in fences() if language == "python" and mark in text]
    for ratio in run_workers(PYTHON[mark], code=code, output_dir=str(tmp_path)):
        assert ratio > 1.3


# --- Commands: a line of a block goes to the first entry that its beginning fits


def environment():
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return {key: value for key, value in {**os.environ, **settings}.items() if key not in ("RANK", "WORLD_SIZE")}


def call(words, folder=ROOT):
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def make(words, tmp_path):
    """make itself, with the environment at hand instead of .venv; the run at toy size, the tests only as a command."""
    (tmp_path / "ready").touch()
    given = [f"READY={tmp_path / 'ready'}", f"BIN={Path(sys.executable).parent}"]
    if words[1] == "test":
        assert "-m pytest" in call([*words, *given, "--dry-run"])
        return
    assert words[1] == "run"
    call([*words, *given, f"OUTPUT_DIR={tmp_path / 'out'}", f"RUN_OPTIONS={TOY_TRAINING} --warmup_steps 1"])
    assert results(tmp_path / "out")["edgc_compression_ratio"] > 1
    assert (tmp_path / "out" / "edgc_report.html").exists()


def report(words, tmp_path):
    for word in words[2:]:
        write_run(tmp_path / word)
    with contextlib.chdir(tmp_path):
        assert main(words[1:]) == 0
        assert list(Path(words[2]).glob("*.html"))


def inspect(words, tmp_path):
    """Runs below, on state of two workers."""
    assert words == INSPECT


def probe(words, tmp_path):
    """As it stands, where it starts all workers; else its options are parsed."""
    if words[0] == "torchrun":
        assert "break-even" in call([sys.executable, "-m", "torch.distributed.run", *words[1:]])
    else:
        launch_options(words)
        parse_probe(words[words.index("probe") + 1 :])


def script(words, tmp_path):
    """Needs the Hub, GPUs or a cluster: its options are parsed, the launcher's by accelerate, the script's by ours."""
    ours = words[words.index("run_clm_edgc.py") + 1 :]
    launch_options(words)
    code = "import sys; from hf_edgc.clm.command_line import parse; print(parse(sys.argv[1:]).compression.codec)"
    (codec,) = call([sys.executable, "-c", code, *ours, "--output_dir", str(tmp_path), "--use_cpu", "true"]).split()
    assert codec == (ours[ours.index("--codec") + 1] if "--codec" in ours else "low_rank")


def launch_options(words):
    from accelerate.commands.launch import launch_command_parser

    assert words[:2] == ["accelerate", "launch"]
    numbers = [re.sub(r"\$\(\(.*?\)\)|\$\w+", "2", word) for word in words[2:]]
    known = launch_command_parser().parse_args(numbers)
    assert (ROOT / known.config_file).is_file()


def slurm(words, tmp_path):
    assert words[:3] == ["srun", "bash", "-c"]
    script(shlex.split(words[3].replace("$((8 * SLURM_NNODES))", "16")), tmp_path)


def setting(words, tmp_path):
    assert re.fullmatch(r"\w+=.+", words[1])


def activate(words, tmp_path):
    """The script that `make setup` has python make, in an environment of this Python."""
    assert f"VENV := {words[1].split('/')[0]}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    venv.create(tmp_path / ".venv", symlinks=True)
    told = call(["bash", "-c", f"{shlex.join(words)} && command -v python"], tmp_path)
    assert told.strip() == str(tmp_path / ".venv" / "bin" / "python")


INSPECT = ["hf-edgc", "inspect", "out/checkpoint-500"]

COMMANDS = {
    "make": make,
    "hf-edgc report": report,
    "hf-edgc inspect": inspect,
    "torchrun": probe,
    "accelerate launch --config_file accelerate_configs/multi_node.yaml --machine_rank 1 -m hf_edgc probe": probe,
    "accelerate launch": script,
    "srun": slurm,
    "export": setting,
    "source": activate,
}


def commands():
    """(document, words) of every command in a bash block, a continued line being one; what two blocks say, once."""
    found = {}
    for document, language, text in fences():
        if language == "bash":
            lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
            found |= {tuple(words): document for words in lines if words}
    return [(document, list(words)) for words, document in found.items()]


@pytest.mark.timeout(250)
@pytest.mark.parametrize(("document", "words"), commands(), ids=[" ".join(words)[:60] for _, words in commands()])
def test_commands(document, words, tmp_path):
    line = " ".join(words)
    handlers = [handler for start, handler in COMMANDS.items() if line.startswith(start)]
    assert handlers, f"{document}: no entry in COMMANDS for {line}"
    handlers[0](words, tmp_path)


def test_inspect(run_workers, tmp_path, monkeypatch, capsys):
    run_workers(save_after_steps, folder=str(tmp_path / INSPECT[2]))
    monkeypatch.chdir(tmp_path)
    assert main(INSPECT[1:]) == 0
    assert "phase compress" in capsys.readouterr().out


# --- That nothing is left out


def test_every_block_is_accounted_for():
    kinds = Counter(language for _, language, _ in fences())
    assert set(kinds) == {"bash", "python", "text"}
    assert kinds["python"] == len(PYTHON)
    for _, language, text in fences():
        if language == "python":
            assert sum(mark in text for mark in PYTHON) == 1


def test_the_table_in_readme_is_the_script_s():
    from hf_edgc.clm.results import Facts, summary_rows

    (shown,) = [text for _, language, text in fences() if language == "text"]
    figures = {
        "train_runtime": 1.0, "train_loss": 1.0, "edgc_dense_bytes": 2, "edgc_sent_bytes": 1, "edgc_hook_s": 1.0,
        "edgc_compression_ratio": 2.0, "edgc_final_rank": 4, "perplexity": 2.0, "eval_nll": 0.7, "eval_tokens": 9,
    }  # fmt: skip
    names = [name for name, _ in summary_rows(figures, Facts("text", 1, 1, 2, 1, 1, Path("out")))]
    assert re.findall(r"^│ (\w[\w ]*?) +│", shown, re.MULTILINE) == names


@pytest.mark.parametrize("file", GENERATED)
def test_generated_parts_are_as_their_sources_say(file):
    assert (ROOT / file).read_text(encoding="utf-8") == made_anew(file), "run `make blocks`"


@pytest.mark.parametrize("file", ADDRESSED)
def test_the_project_has_one_address(file):
    """A badge and a cell that clones in each notebook, one line in CITATION.cff."""
    found = re.findall(r"github(?:\.com)?/([\w.-]+/[\w.-]+)", (ROOT / file).read_text(encoding="utf-8"))
    assert len(found) == (2 if file.endswith(".ipynb") else 1)
    assert {f"https://github.com/{name}" for name in found} == {address()}


def anchors(path):
    """What GitHub calls the headings of a document."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in re.findall("^#+ (.*)", text, re.M)
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for name, target in re.findall(r"\[([^\]]*)\]\(([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        assert path.exists(), target
        assert not heading or heading in anchors(path), target
        if name.startswith("test_") and not name.endswith(".py"):
            assert f"def {name}(" in path.read_text(encoding="utf-8"), name
    for picture in re.findall(r'<img src="([^"]*)"', text):
        assert ((ROOT / document).parent / picture).is_file(), picture
