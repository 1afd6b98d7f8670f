"""A run's page in a browser: nothing is blocked or missing, pictures are not blank, phones need not scroll sideways.

The tests use Debian's Chromium in headless mode. An outer page has the report in frames of several widths, measures it
and writes the results into itself, because the report runs no scripts.
"""

import json
import os
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cupynet.reporting.page import write_page
from tests.support.run_folders import finished, summary

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REASON = "" if CHROMIUM else "there is no Chromium: apt-get install chromium"
# .ci/run reports if it could not install Chromium
pytestmark = pytest.mark.skipif(bool(REASON) and "CUPYNET_TEST_BROWSER" not in os.environ, reason=REASON)
WIDTHS = (320, 390, 1280)


class Found(NamedTuple):
    """Measurements at each width, and messages of the console."""

    frames: list[dict[str, Any]]
    console: list[str]


FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=5000",
    "--window-size=1400,1000",
)  # fmt: skip
MEASURE = """
<!DOCTYPE html><meta charset="utf-8"><title>m</title>
%s
<pre id="found"></pre>
<script>
function shows(image) {  // whether not all of its pixels are alike
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return pixels.some((value, at) => value !== pixels[at %% 4]);
}
window.addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const d = frame.contentDocument;
    return {
      width: d.documentElement.clientWidth, needs: d.documentElement.scrollWidth,
      charts: [...d.querySelectorAll(".chart svg")].map(chart => {
        const width = chart.getBoundingClientRect().width, zoom = width / chart.viewBox.baseVal.width;
        const sizes = [...chart.querySelectorAll("text")].map(
          text => zoom * parseFloat(frame.contentWindow.getComputedStyle(text).fontSize));
        return {width: width, paths: chart.querySelectorAll("path").length, text: Math.min(...sizes)};
      }),
      pictures: [...d.images].map(i => i.complete && i.naturalWidth > 0 && i.width > 0 && shows(i)),
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""


def measured(page: Path) -> Found:
    assert CHROMIUM is not None, REASON
    frames = "".join(
        f'<iframe src="{page.as_uri()}" width="{width}" height="900" style="border:0"></iframe>' for width in WIDTHS
    )
    outer = page.with_name("outer.html")
    outer.write_text(MEASURE % frames)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", outer.as_uri()],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    text = done.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    assert text, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Found(json.loads(unescape(text)), console)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the measurements of a page with long names and many classes."""
    names = ["a class with a very long name that goes on and on" + str(index) for index in range(20)]
    counts = [[900 if row == column else (row * column) % 7 for column in range(20)] for row in range(20)]
    test = summary()["test"] | {"confusion": counts}
    folder = finished(
        tmp_path_factory.mktemp("browser"), class_names=names, test=test, synchronizer="word" * 40, advice="x" * 300
    )
    return measured(write_page(folder)[0])


def test_a_report_in_a_browser_has_no_errors_and_does_not_scroll_sideways_on_small_screens(found: Found) -> None:
    assert found.console == []
    for name in ("width", "needs"):
        assert [each[name] for each in found.frames] == list(WIDTHS)


def test_charts_and_pictures_in_a_browser_are_not_blank(found: Found) -> None:
    for at in found.frames:
        assert len(at["charts"]) == 6
        for chart in at["charts"]:
            assert chart["width"] > 0.7 * min(at["width"], 560) and chart["paths"] > 8
            assert chart["text"] >= (9.5 if at["width"] >= 390 else 7.5)
        assert len(at["pictures"]) == 3 and all(at["pictures"])
