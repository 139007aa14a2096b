"""Every notebook, executed at toy size from its first cell to its last, and clean in git."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]

TOY = {
    "01_quickstart.ipynb": {
        "ROOT": str(ROOT),
        "STEPS": 8,
        "MODEL": "n_embd=32,n_head=2,n_layer=1,n_positions=32",
        "TEXT_BYTES": 60_000,
    },
    "02_trainer_callback.ipynb": {"STEPS": 12},
    "03_entropy_and_rank.ipynb": {"STEPS": 24, "WIDTH": 32, "TEXT_BYTES": 60_000},
}
LEFT_BEHIND = {
    "01_quickstart.ipynb": ["runs/edgc_comparison.html", "runs/edgc/edgc_report.html", "runs/dense/all_results.json"],
    "02_trainer_callback.ipynb": ["out/edgc_report.html", "out/edgc_steps.jsonl"],
    "03_entropy_and_rank.ipynb": [],
}
PICTURES = {"01_quickstart.ipynb": 4, "02_trainer_callback.ipynb": 4, "03_entropy_and_rank.ipynb": 3}


def read(name):
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


def test_none_is_left_out():
    assert sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")) == sorted(TOY)


@pytest.mark.parametrize("name", TOY)
def test_kept_without_outputs_and_opens_in_colab(name):
    book = read(name)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert re.search(
        rf"colab.research.google.com/github/[^/]+/hf_edgc/blob/main/notebooks/{name}", book.cells[0].source
    )
    assert "%pip install" in code[0].source and 'google.colab" in sys.modules' in code[0].source
    assert [cell.metadata.get("tags") for cell in code].count(["parameters"]) == 1


def with_values(source, values):
    """The cell tagged ``parameters`` with other values; each must be there."""
    for name, value in values.items():
        source, found = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value!r}  ", source, flags=re.MULTILINE)
        assert found == 1, f"no parameter {name}"
    return source


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", TOY)
def test_runs_from_the_first_cell_to_the_last(name, tmp_path, monkeypatch):
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    for key, value in {**settings, "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": ""}.items():
        monkeypatch.setenv(key, value) if value else monkeypatch.delenv(key, raising=False)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    book = read(name)
    for cell in book.cells:
        if cell.metadata.get("tags") == ["parameters"]:
            cell.source = with_values(cell.source, TOY[name])
    NotebookClient(book, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[name]
    assert [path for path in LEFT_BEHIND[name] if not (tmp_path / path).is_file()] == []
    told = "".join(output.get("text", "") for output in outputs)  # a program that fails in a cell does not end it
    assert "Traceback" not in told and "error:" not in told, told
