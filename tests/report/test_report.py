"""Reports: what they say, and that foreign text stays text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qimeng.bench.row import append_row
from qimeng.cli import main
from qimeng.envs.steps.result import Result
from qimeng.errors import QimengError
from qimeng.report import report, result_page
from qimeng.report.plots import INK
from tests.bench.rows import row
from tests.report.conftest import HOSTILE


class Page(HTMLParser):
    """Texts by tag, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.starts: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.starts.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


@pytest.fixture
def folder(result: Result, tmp_path: Path) -> Path:
    return result.save(tmp_path / "result")


def test_a_report_says_what_the_result_is(folder: Path, result: Result) -> None:
    page = Page(report(folder))
    assert page.open == []
    assert page.of("h1") == ["a <small> one"]
    assert result.headline in page.of("p")
    headings = page.of("h2")
    assert headings[0] == "What was kept" and "Step by step" in headings and "Search tree" in headings
    assert result.verification in page.of("dd")
    assert f"qimeng replay {folder} FILE" in " ".join(page.of("pre"))
    assert not any(tag in ("img", "link", "iframe") or "src" in attrs for tag, attrs in page.starts)


def test_every_step_is_there_with_what_came_of_it(folder: Path, result: Result) -> None:
    text = report(folder)
    states = re.findall(r'<li class="(\w+)">', text)
    assert len(states) == len(result.steps)
    assert states.count("kept") == len(result.recipe) > 0
    refused = [s for s in result.steps if not s.accepted and s.evaluation is not None]
    assert states.count("refused") == len(refused) > 0
    assert text.count("Why it was refused") == len(refused)
    assert '<span class="add">' in text


def test_foreign_text_is_shown_as_text(folder: Path, result: Result) -> None:
    text = report(folder)
    assert HOSTILE not in text and "&lt;/pre&gt;&lt;script&gt;alert(1)" in text
    evil = replace(result, name=HOSTILE, source=HOSTILE, notes=(HOSTILE,), environment={"driver": HOSTILE})
    text = result_page(evil, Path(HOSTILE))
    assert HOSTILE not in text
    assert len([tag for tag, _ in Page(text).starts if tag == "script"]) == 1


def test_plots_take_their_colours_from_the_page(folder: Path) -> None:
    text = report(folder)
    assert INK not in text and "currentColor" in text
    titles = re.findall(r'<svg role="img" aria-label="([^"]+)"', text)
    assert len(titles) >= 2 and all(titles)


def test_what_was_kept_gained_what_the_result_says(result: Result) -> None:
    rows = [r for r in result.rows() if r["kept"]]
    assert [r["patch"] for r in rows] == [s.digest for s in result.recipe.steps]
    assert rows[0]["parent"] != rows[-1]["child"] == result.recipe.program
    product = 1.0
    for r in rows:
        product *= r["gain"] or 1.0
    assert result.speedup == pytest.approx(product, rel=0.05)


def test_unchecked_and_estimated_stand_in_the_first_lines(result: Result) -> None:
    unchecked = replace(result.evaluation, unchecked="it was interrupted")
    text = result_page(replace(result, evaluation=unchecked, estimated=True), Path("folder"))
    (verdict,) = re.findall(r'<p class="verdict">(.*?)</p>', text)
    assert "UNCHECKED" in verdict and "(estimated)" in verdict


def test_old_results_without_bounds_are_shown(folder: Path) -> None:
    path = folder / "result.json"
    data = json.loads(path.read_text())
    for key in ("roofline", "labels", "environment"):
        del data[key]
    path.write_text(json.dumps(data))
    assert "Roofline" not in Page(report(folder)).of("h2")


def test_a_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        row(1, 1.0),
        replace(row(2, 1.0), right=False),
        replace(row(3, 1.0), kernelbench=False, exact_fails=True),
        replace(row(4, 1.0), error=HOSTILE, right=None, candidate=None),
    ]
    for one in rows:
        append_row(path, one)
    page = Page(report(path))
    assert page.open == [] and HOSTILE not in report(path)
    assert any(t.startswith("2 of 4 problems right") for t in page.of("p"))
    flagged = " ".join(page.of("li"))
    assert "wrong in the final verification" in flagged and "PyTorch is what is off" in flagged
    assert [t for t in page.of("td") if t.startswith("level1/")] == [r.id for r in rows]


def test_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str | Path) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        return int(ended.value.code or 0)

    assert run("report", folder) == 0
    assert capsys.readouterr().out == f"written: {folder / 'report.html'}\n"
    assert run("report", folder, "--out", tmp_path / "mine.html") == 0 and (tmp_path / "mine.html").exists()
    (tmp_path / "empty.jsonl").write_text("")
    assert run("report", tmp_path / "empty.jsonl") == 2
    assert "holds no rows" in capsys.readouterr().err


def test_what_is_missing_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(QimengError, match=r"pip install 'qimeng\[report\]'"):
        report(folder)
