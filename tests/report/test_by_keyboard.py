"""Reports in headless Chromium by keyboard alone: Tab reaches each control in order, Enter opens and sorts."""

from __future__ import annotations

from pathlib import Path

import pytest

from qimeng.bench.row import append_row
from qimeng.envs.steps.result import Result
from qimeng.report import report
from tests.bench.rows import row
from tests.report.keyboard import Page, opened
from tests.report.test_in_browser import CHROMIUM

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()

CONTROLS = "const controls = () => [...document.querySelectorAll('a, button, summary, [tabindex=\"0\"]')]"
SHOWN = "controls().flatMap((e, i) => e.checkVisibility() ? [i] : [])"
OUTLINE = "(({outlineStyle: s, outlineWidth: w}) => s + ' ' + w)(getComputedStyle(document.activeElement))"


def walked(page: Page) -> list[int]:
    """The controls that Tab reaches from here to the end, by their places; each must show that it has the focus."""
    places: list[int] = []
    while True:
        page.press("Tab")
        place = page.ask("controls().indexOf(document.activeElement)")
        if place < 0 or place in places:
            return places
        assert page.ask(OUTLINE) == "solid 3px"
        places.append(place)


def test_a_result_is_read_by_keyboard(result: Result, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(report(result.save(tmp_path / "result")))
    with opened(tmp_path / "page.html", CHROMIUM, FLAGS) as page:
        page.ask(CONTROLS)
        shown = page.ask(SHOWN)
        assert walked(page) == shown and len(shown) > 5
        page.ask("document.activeElement.blur()")
        page.ask("window.scrollTo(0, 0), document.querySelector('.skip').focus()")
        page.press("Enter")
        assert page.ask("document.activeElement.id") == "main"
        for _ in range(20):  # to the first step with a difference
            page.press("Tab")
            if page.ask("document.activeElement.textContent") == "What changed in the kernels":
                break
        page.press("Enter")
        assert page.ask("document.activeElement.parentElement.open") is True
        page.press("Tab")
        assert page.ask("document.activeElement.getAttribute('aria-label')") == "What changed in the kernels"


def test_a_run_is_sorted_by_keyboard(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    for number, ms in ((1, 2.0), (2, 0.5), (3, 1.0)):
        append_row(tmp_path / "rows.jsonl", row(number, ms))
    (tmp_path / "page.html").write_text(report(tmp_path / "rows.jsonl"))
    with opened(tmp_path / "page.html", CHROMIUM, FLAGS) as page:
        page.ask(CONTROLS)
        shown = page.ask(SHOWN)
        assert walked(page) == shown
        page.ask("document.querySelectorAll('[data-sortable] button')[3].focus()")
        page.press("Tab")
        orders = []
        for key in ("Enter", " "):
            page.press(key)
            orders.append(
                page.ask("[...document.querySelectorAll('[data-sortable] tbody tr')].map(r => r.cells[0].textContent)")
            )
        assert orders == [["level1/1", "level1/3", "level1/2"], ["level1/2", "level1/3", "level1/1"]]
        assert page.ask("document.activeElement.textContent") == "over eager"
