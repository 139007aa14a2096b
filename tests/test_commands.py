"""``hf-edgc`` and what its commands say: report, inspect, --version, and how they refuse."""

import shutil
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from ddp_jobs import tiny_gpt2
from report_runs import write_run

from hf_edgc import EDGCConfig, EDGCState, __version__, edgc_hook
from hf_edgc.checkpoint import save_state
from hf_edgc.cli import main
from hf_edgc.inspection import inspect_checkpoint

CONFIG = EDGCConfig(max_rank=4, min_rank=1, window_steps=4, entropy_every=1, min_compression_ratio=1.0)


def save_after_steps(folder, steps=3, **options):
    """Train a tiny GPT-2 for ``steps`` steps and save its state; the errors' norms of this worker, by name."""
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(tiny_gpt2())
    state = EDGCState(EDGCConfig(**{**CONFIG.to_dict(), **options}), ddp.module.named_parameters())
    ddp.register_comm_hook(state, edgc_hook)
    tokens = torch.arange(32).reshape(2, 16) % 60 + torch.distributed.get_rank()
    for _ in range(steps):
        ddp(input_ids=tokens, labels=tokens).loss.backward()
    save_state(state, folder)
    return {name: float(error.norm()) for name, error in state.reducer.feedback.errors.items()}, state.totals.sent_bytes


def test_inspect_shows_what_was_saved(run_workers, tmp_path, capsys):
    (first, sent), (second, _) = run_workers(save_after_steps, folder=str(tmp_path))
    (state,) = inspect_checkpoint(tmp_path)
    assert (state.phase, state.header["step"], state.header["workers"]) == ("compress", 3, 2)
    assert {matrix.name for matrix in state.matrices} == set(first) == set(second)
    for matrix in state.matrices:
        assert matrix.error_norms == pytest.approx((first[matrix.name], second[matrix.name]))
        assert 1 <= matrix.rank <= 4 and len(matrix.shape) == 2
    assert main(["inspect", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for part in ("step 3", "phase compress", "workers 2", f"sent {sent / 1e6:,.1f} MB", "mode edgc"):
        assert part in told
    assert all(matrix.name[-12:] in told for matrix in state.matrices)


def test_inspect_knows_a_warm_up_and_no_error_feedback(run_workers, tmp_path, capsys):
    run_workers(save_after_steps, folder=str(tmp_path), steps=1, mode="static", rank=2, error_feedback=False)
    (state,) = inspect_checkpoint(tmp_path)
    assert state.rank == 2 and all(matrix.error_norms == () and matrix.rank == 2 for matrix in state.matrices)
    assert main(["inspect", str(tmp_path)]) == 0 and "none" in capsys.readouterr().out


def damaged(folder):
    path = next(folder.glob("*worker_1*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged, "checksum does not match"),
        (lambda folder: next(folder.glob("*worker_0*")).unlink(), "worker_0.safetensors"),
        (lambda folder: next(folder.glob("*shared*")).unlink(), "holds no EDGC state"),
        (lambda folder: next(folder.glob("*shared*")).write_text("?"), "can't be read"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_inspect_names_what_is_wrong(run_workers, tmp_path, capsys, damage, message):
    run_workers(save_after_steps, folder=str(tmp_path / "saved"), steps=1)
    damage(tmp_path / "saved")
    assert main(["inspect", str(tmp_path / "saved")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_inspect_of_a_file_says_that_it_is_one(tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    assert main(["inspect", str(tmp_path / "model.safetensors")]) == 2
    assert "is no folder" in " ".join(capsys.readouterr().err.split())


def test_report_prints_where_the_page_is(tmp_path, capsys):
    folders = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    assert main(["report", *folders, "--output_dir", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "edgc_comparison.html")
    assert (tmp_path / "out" / "edgc_comparison" / "loss.png").exists()


def test_report_names_what_is_wrong(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report"], ["inspect"], [], ["compare", "x"], ["inspect", "x", "--fast"]])
def test_a_wrong_command_line_ends_with_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "usage: hf-edgc" in capsys.readouterr().err


def test_the_console_script_and_the_module_are_this_command():
    (script,) = entry_points(group="console_scripts", name="hf-edgc")
    assert script.load() is main
    done = subprocess.run([sys.executable, "-m", "hf_edgc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"hf-edgc {__version__}"
