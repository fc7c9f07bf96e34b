"""Reports in headless Chromium: no errors, nothing too wide, tables sort, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from qimeng.bench.row import append_row
from qimeng.envs.steps.result import Result
from qimeng.report import report
from tests.bench.rows import row

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000"
).split()

FRAME = """<!doctype html><title>frame</title><pre id="found"></pre>
<iframe id="page" width="{width}" height="900" style="border:0"></iframe>
<script>
const page = document.getElementById("page"), errors = [];
page.srcdoc = {text};
page.addEventListener("load", () => {{
  const inside = page.contentWindow, body = page.contentDocument;
  inside.addEventListener("error", (event) => errors.push(event.message));
  const column = () => [...body.querySelectorAll("table[data-sortable] tbody tr")].map((r) => r.cells[0].textContent);
  const orders = [column()];
  const button = body.querySelectorAll("table[data-sortable] th button")[4];
  if (button) {{
    button.focus();
    for (let i = 0; i < 2; i++) {{ body.activeElement.click(); orders.push(column()); }}
  }}
  document.getElementById("found").textContent = JSON.stringify({{
    wide: body.documentElement.scrollWidth - {width},
    focused: button ? body.activeElement === button : null,
    sorted: button ? button.parentElement.getAttribute("aria-sort") : null,
    background: inside.getComputedStyle(body.body).backgroundColor,
    orders, errors,
  }});
}});
</script>"""


def looked_at(text: str, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What a browser finds of a page."""
    assert CHROMIUM is not None
    path = folder / "frame.html"
    path.write_text(FRAME.format(width=width, text=json.dumps(text).replace("</", "<\\/")))
    flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=60
    )
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    made: dict[str, Any] = json.loads(unescape(found))
    return made


@pytest.mark.parametrize("width", [1280, 390])
def test_a_result_is_readable(result: Result, tmp_path: Path, width: int) -> None:
    found = looked_at(report(result.save(tmp_path / "result")), tmp_path, width, dark=False)
    assert found["errors"] == [] and found["wide"] <= 0


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_run_is_readable_and_its_table_sorts(tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "rows.jsonl"
    for number, ms in ((1, 2.0), (2, 0.5), (3, 1.0)):
        append_row(path, row(number, ms))
    found = looked_at(report(path), tmp_path, width, dark)
    assert found["errors"] == [] and found["wide"] <= 0
    assert found["orders"] == [
        ["level1/1", "level1/2", "level1/3"],
        ["level1/1", "level1/3", "level1/2"],
        ["level1/2", "level1/3", "level1/1"],
    ]
    assert found["focused"] is True and found["sorted"] == "descending"
    channels = [int(n) for n in re.findall(r"\d+", str(found["background"]))[:3]]
    assert max(channels) < 60 if dark else min(channels) > 200
