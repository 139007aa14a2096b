"""The run report: what it reads, what it computes, the page, and that a Trainer leaves one."""

import base64
import io
import json
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from report_runs import LINK, NAMES, record, write_run

from hf_edgc.report import RunError, read_run, write_report
from hf_edgc.report.figures import PICTURES
from hf_edgc.report.run import read_runs
from hf_edgc.report.series import error_over_gradient, rank_groups, saved_bytes, thinned, window_means
from hf_edgc.report.tables import configuration, link, results

DRAW = {picture.name: picture.draw for picture in PICTURES}


class Page(HTMLParser):
    """What a browser would load and show: tags with their attributes, pictures by the figure they are in, text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.pictures, self.text, self._figure = [], {}, "", None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "figure":
            self._figure = attributes["id"]
        if tag == "img":
            kind, data = attributes["src"].split(",", 1)
            assert kind == "data:image/png;base64"
            self.pictures[self._figure] = base64.b64decode(data, validate=True)

    def handle_data(self, data):
        self.text += data


def test_the_page_holds_every_picture_and_needs_nothing_from_outside(tmp_path):
    folder = write_run(tmp_path / "run", link=LINK)
    path = write_report([folder])
    assert path == folder / "edgc_report.html"
    page = Page(path)
    assert set(page.pictures) == set(DRAW)
    for name, data in page.pictures.items():
        assert (folder / "edgc_report" / f"{name}.png").read_bytes() == data
        image = Image.open(io.BytesIO(data)).convert("RGB")
        assert image.width >= 900
        assert len(image.getcolors(2**24)) > 20, f"{name} is empty"
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"} == set()
    for _, attributes in page.tags:
        assert not any(key.startswith("on") or key in ("href", "srcset") for key in attributes)
        assert "http" not in attributes.get("src", "") and "url(" not in attributes.get("style", "")
    for told in ("compression ratio", "10.00", "410.00", "93.8 Mbit/s", "400 ms", "0.3, 0.2 MB", "max_rank", "12.0 s"):
        assert told in page.text


def test_a_name_is_shown_and_not_run(tmp_path):
    path = write_report([write_run(tmp_path / "<script>alert(1)<b>")], tmp_path)
    page = Page(path)
    assert "<script>alert(1)<b>" in page.text
    assert not {"script", "b"} & {tag for tag, _ in page.tags}


def test_several_runs_are_drawn_over_each_other(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", mode="static", rank=4)]
    path = write_report(folders, tmp_path / "out")
    assert path == tmp_path / "out" / "edgc_comparison.html"
    runs = read_runs(folders)
    for name in set(DRAW) - {"rank_map"}:
        legend = DRAW[name](runs).axes[0].get_legend()
        assert {"a", "b"} <= {text.get_text() for text in legend.get_texts()}, name
    panels = [axes.get_title() for axes in DRAW["rank_map"](runs).axes]
    assert panels[:2] == ["a", "b"]
    rows = dict(results(runs))
    assert rows["mode"] == ["edgc", "static"] and rows["synchronized steps"] == ["40", "40"]
    changed = {name: values for name, values, differs in configuration(runs) if differs}
    assert changed == {"mode": ["edgc", "static"], "rank": ["none", "4"]}


def test_runs_whose_folders_share_a_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / "a" / "out"), write_run(tmp_path / "b" / "out")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_window_means_start_with_each_phase(tmp_path):
    phases = ["warmup"] * 5 + ["compress"] * 25
    made = [record(step, phase=phase, entropy=float(step)) for step, phase in enumerate(phases)]
    run = read_run(write_run(tmp_path / "run", records=made, window_steps=10, warmup_fraction=0.1))
    assert window_means(run, "entropy") == [(0, 4, 2.0), (5, 14, 9.5), (15, 24, 19.5), (25, 29, 27.0)]


def test_series_are_what_the_records_say(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert saved_bytes(run).tolist() == [900 * (step + 1) for step in range(40)]
    steps, ratios = error_over_gradient(run, "error_norm")
    assert steps.tolist() == [0, 10, 20, 30] and ratios.tolist() == [0.5, 5.5, 10.5, 15.5]
    labels, table, span = rank_groups(run)
    assert labels == ["wte", "h.*.attn.c_attn (3)", "h.*.mlp.c_fc (3)"]  # all names end in .weight
    # Ranks are 1 to 7 in the order of NAMES: wte, then attn and mlp by turns.
    assert table.shape == (3, 40) and table[:, 0].tolist() == [1, 4, 5] and span == (0, 39)
    assert len(NAMES) == 7


def test_long_curves_are_thinned_to_means():
    steps = np.arange(1000.0)
    values = np.where(steps % 2 == 0, steps, np.nan)
    few_steps, few = thinned(steps, values, 50)
    assert few.shape == (50,) and np.array_equal(few_steps, few)
    assert few.mean() == pytest.approx(np.nanmean(values))
    assert thinned(steps, values, 500)[1].tolist() == list(range(0, 1000, 2))


def test_a_run_that_was_killed_is_reported_up_to_its_last_whole_line(tmp_path):
    folder = write_run(tmp_path / "run", log=False)
    checkpoint = folder / "checkpoint-20"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 20, "loss": 5.0}]}))
    with (folder / "edgc_steps.jsonl").open("a") as file:
        file.write('{"step": 40, "pha')
    run = read_run(folder)
    assert len(run.records) == 40 and run.notes[0].startswith("Line 41 of edgc_steps.jsonl is no record")
    assert run.logged("loss")[1].tolist() == [5.0]
    page = Page(write_report([folder]))
    assert "Line 41" in page.text and "perplexity" not in page.pictures
    assert "Not measured, so not drawn: Perplexity." in page.text


def test_a_run_without_compression_has_no_ranks_to_draw(tmp_path):
    made = [record(step, phase="off", compressed=False, rank=0.0, ranks=(), entropy=None) for step in range(5)]
    run = read_run(write_run(tmp_path / "run", records=made, mode="none"))
    assert DRAW["rank"]([run]) is None and DRAW["rank_map"]([run]) is None and DRAW["entropy"]([run]) is None
    assert DRAW["step_bytes"]([run]) is not None


def test_records_under_another_name_are_found(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "edgc_steps.jsonl").rename(folder / "mine.jsonl")
    path = write_report([folder / "mine.jsonl"])
    assert path == folder / "edgc_report.html" and "step_bytes" in Page(path).pictures


def test_every_fact_of_the_link_has_a_row(tmp_path):
    runs = read_runs([write_run(tmp_path / "auto", link=LINK), write_run(tmp_path / "other")])
    rows = dict(link(runs))
    assert len(rows) == len(LINK) and all(values[1] == "-" for values in rows.values())
    assert rows["compressed, a step waits"][0] == "30 ms" and rows["max_rank set by it"][0] == "none"


def test_bytes_of_a_run_without_link_or_info(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "edgc_run.json").unlink()
    run = read_run(folder)
    assert "edgc_run.json is missing" in run.notes[0]
    assert link([run]) == [] and configuration([run]) == [] and DRAW["rank_map"]([run]) is None


def only_records(folder, content):
    folder.mkdir()
    (folder / "edgc_steps.jsonl").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.mkdir(), "holds no run: none of edgc_steps.jsonl, "),
        (lambda folder: only_records(folder, b""), "holds no run: edgc_steps.jsonl is empty"),
        (lambda folder: only_records(folder, b'{"step": 0, "x'), "Line 1 of edgc_steps.jsonl is no record"),
        (lambda folder: only_records(folder, b'{"step": 0}'), "Line 1 of edgc_steps.jsonl is no record"),
        (lambda folder: only_records(folder, b"[1]"), "Line 1 of edgc_steps.jsonl is no record"),
        (lambda folder: only_records(folder, b"\xff\xfe\x00"), "Line 1 of edgc_steps.jsonl is no record"),
        (lambda folder: (write_run(folder) / "trainer_state.json").write_text("{"), "trainer_state.json is damaged"),
        (lambda folder: (write_run(folder) / "all_results.json").write_text("[]"), "all_results.json is damaged"),
        (lambda folder: (write_run(folder) / "edgc_run.json").write_text('{"old": 1}'), "edgc_run.json is not what"),
    ],
)
def test_what_holds_no_run_is_named(tmp_path, damage, message):
    damage(tmp_path / "run")
    with pytest.raises(RunError, match=message):
        write_report([tmp_path / "run"])


def trained(output_dir, report=True, matplotlib=True, **options):
    from test_callback import CONFIG, make_trainer

    from hf_edgc import EDGCCallback, EDGCConfig
    from hf_edgc.logs import get_logger

    lines = []
    logger = get_logger()
    logger.addFilter(lambda entry: lines.append(entry.getMessage()) or True)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("hf_edgc.report")}
    before = sys.modules.get("matplotlib")
    try:
        if not matplotlib:
            sys.modules["matplotlib"] = None
        config = EDGCConfig(**{**CONFIG.to_dict(), **options})
        make_trainer(
            output_dir, [EDGCCallback(config, report=report)], eval_strategy="steps", eval_steps=4, max_steps=12
        ).train()
    finally:
        logger.filters.pop()
        sys.modules |= hidden
        if not matplotlib:
            sys.modules.pop("matplotlib")
        if before is not None:
            sys.modules["matplotlib"] = before
    return [line for line in lines if "report" in line]


def test_trainer_leaves_a_report_in_its_output_folder(run_workers, tmp_path):
    first, second = run_workers(trained, output_dir=str(tmp_path))
    assert first == [f"run report: {tmp_path / 'edgc_report.html'}"] and second == []
    assert set(Page(tmp_path / "edgc_report.html").pictures) == set(DRAW)
    run = read_run(tmp_path)
    assert run.info.workers == 2 and len(run.info.matrices) == len(run.records[0]["ranks"])
    assert run.info.matrices[0]["name"] == "transformer.wte.weight"
    assert {tensor["reason"] for tensor in run.info.dense} == {"fewer than two dimensions"}
    assert run.info.config["max_rank"] == 4 and run.info.window_steps == 4
    assert run.logged("eval_loss")[0].tolist() == [4, 8, 12]


def test_trainer_reports_what_auto_decided(run_workers, tmp_path):
    run_workers(trained, output_dir=str(tmp_path), codec="auto")
    run = read_run(tmp_path)
    assert set(run.info.link) == set(LINK)
    page = Page(tmp_path / "edgc_report.html")
    assert "Link, and what was decided" in page.text and f"codec auto, step {run.info.link['step']}" in page.text


def test_without_matplotlib_training_ends_well_and_says_so(run_workers, tmp_path):
    first, second = run_workers(trained, output_dir=str(tmp_path), matplotlib=False)
    assert first == ["No run report: matplotlib is not installed (pip install hf_edgc[report])."] and second == []
    assert len(read_run(tmp_path).records) == 12 and not (tmp_path / "edgc_report.html").exists()


def test_a_report_that_fails_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    from hf_edgc.logs import get_logger
    from hf_edgc.recording import write_report_if_possible

    monkeypatch.setattr(get_logger(), "propagate", True)
    folder = write_run(tmp_path / "run")
    (folder / "edgc_report").write_text("in the way")
    write_report_if_possible(folder)
    assert "No run report: FileExistsError" in caplog.text


def test_the_report_can_be_turned_off(run_workers, tmp_path):
    assert run_workers(trained, output_dir=str(tmp_path), report=False) == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edgc_run.json", "edgc_steps.jsonl"]
