"""The run report in headless Chromium: loads, shows every picture, fits a desktop and a phone."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import LINK, write_run

from hf_edgc.report import write_report
from hf_edgc.report.figures import PICTURES

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = os.environ.get("EDGC_SCREENSHOTS")
"""Where they go; `make browser` sets it, and then a missing browser is a failure."""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and SCREENSHOTS is None, reason="no chromium here: `make browser` installs it and runs this"
)

WIDTHS = {"desktop": 1280, "phone": 390}

MEASURE = """
<pre id="found"></pre>
<script>
function measure() {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  document.querySelector("iframe").height = root.scrollHeight;
  const shown = [...page.images].map(image => {
    const box = image.getBoundingClientRect();
    return {name: image.closest("figure")?.id, pixels: image.naturalWidth, width: box.width, right: box.right};
  });
  const size = parseFloat(page.defaultView.getComputedStyle(page.body).fontSize);
  const found = {images: shown, overflow: root.scrollWidth - root.clientWidth, title: page.title, size: size};
  document.getElementById("found").textContent = JSON.stringify(found);
}
</script>
"""
"""Runs in a page around the report, which itself may run nothing. Headless windows are never as narrow as a phone."""


def chromium(*words):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    done = subprocess.run([CHROMIUM, *flags, *words], capture_output=True, text=True, timeout=90, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console


def look(page, width, folder):
    """What a reader sees at ``width`` pixels, what the console says; leaves a screenshot where they are asked for."""
    text = html.escape(page.read_text(encoding="utf-8"))
    frame = f'<iframe width="{width}" height="800" style="border:0" onload="measure()" srcdoc="{text}"></iframe>'
    around = folder / f"{page.stem}_{width}.html"
    around.write_text(f"<!DOCTYPE html><body style='margin:0'>{MEASURE}{frame}", encoding="utf-8")
    dom, console = chromium("--virtual-time-budget=10000", "--dump-dom", around.as_uri())
    if SCREENSHOTS is not None:
        shot = Path(SCREENSHOTS) / f"{page.stem}_{width}.png"
        shot.parent.mkdir(parents=True, exist_ok=True)
        height = 3600 if width > 600 else 5200
        chromium(f"--window-size={max(width, 500)},{height}", f"--screenshot={shot.resolve()}", around.as_uri())
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1])), console


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("runs", [1, 2])
def test_every_picture_is_seen(tmp_path, device, runs):
    folders = [write_run(tmp_path / "run", link=LINK), write_run(tmp_path / "static", mode="static")][:runs]
    found, console = look(write_report(folders, tmp_path), WIDTHS[device], tmp_path)
    assert console == []
    assert {image["name"] for image in found["images"]} == {picture.name for picture in PICTURES}
    for image in found["images"]:
        assert image["pixels"] >= 900 and image["width"] >= 300 and image["right"] <= WIDTHS[device]
    assert found["overflow"] == 0 and found["size"] >= 16
    assert found["title"].startswith("EDGC run report: run")


def test_a_page_that_is_broken_is_told(tmp_path):
    """The check itself: a picture that does not load, a script that the policy stops, a line that is too wide."""
    page = write_report([write_run(tmp_path / "run")])
    broken = page.with_name("broken.html")
    text = page.read_text(encoding="utf-8").replace("data:image/png;base64,", "data:image/png;base64,AAAA", 1)
    wide = "<script>document.title = 'run'</script><div style='width: 2000px'>wide</div></main>"
    broken.write_text(text.replace("</main>", wide), encoding="utf-8")
    found, console = look(broken, 390, tmp_path)
    assert found["images"][0]["pixels"] == 0 and found["overflow"] > 1000
    assert any("Content Security Policy" in line for line in console) and found["title"] != "run"
