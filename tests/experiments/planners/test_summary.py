"""Figures, tables and pictures of replays, from rows made by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.planners.picture import draw
from experiments.planners.replay import Method, ReplayRow, append_replay
from experiments.planners.summary import AT, RESAMPLES, advantages, bootstrap, bootstrap_median, planners, summarize
from experiments.tables import render
from qimeng.errors import QimengError

GOOD, BAD = Method("good", "heuristic", "mcts"), Method("bad", "random")


def row(spec: str, method: Method, gains: dict[int, float], seed: int = 0) -> ReplayRow:
    """Log-gain from each evaluation in `gains` on; the best known is 1."""
    curve = tuple(max((g for n, g in gains.items() if n <= i), default=0.0) for i in range(1, 41))
    return ReplayRow(spec, spec, "loss", method, seed, curve, 1.0, 120, 0.5, 40, 50, "stop", "", 0.1, "h200", False)


def rows() -> list[ReplayRow]:
    found = []
    for i in range(6):
        found += [row(f"s{i}", GOOD, {3: 0.5, 8 + i: 1.0})]
        found += [row(f"s{i}", BAD, {10: 0.2 * seed, 30: 1.0 if i < 2 else 0.5}, seed) for seed in range(3)]
    return found


def test_figures_are_means_over_specs_with_intervals() -> None:
    good, bad = summarize(rows())
    assert (good.method, good.specs, good.runs, bad.runs) == (GOOD, 6, 6, 18)
    assert [round(good.shares[n].value, 3) for n in AT] == [0.5, 0.75, 1.0, 1.0]
    assert [round(bad.shares[n].value, 3) for n in AT] == [0.0, 0.2, 0.2, round(2 / 3, 3)]
    for f in (*good.shares.values(), *bad.shares.values()):
        assert f.low <= f.value <= f.high
    assert good.shares[10].low < 0.75 < good.shares[10].high and good.shares[5].low == good.shares[5].high
    assert good.needed.value == 10.5 and bad.needed.value == 40  # misses count as 40
    assert good.missed == 0 and bad.missed == pytest.approx(4 / 6)


def test_a_table_computes_the_intervals_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr("experiments.planners.summary.bootstrap", lambda values: made.append(1) or bootstrap(values))
    planners(rows())
    assert len(made) == 2 * len(AT)
    good, _ = summarize(rows())
    assert len(good.curve) == 40 and [good.curve[n - 1] for n in AT] == list(good.shares.values())


def test_only_specs_that_all_methods_have_are_compared() -> None:
    good, bad = summarize([*rows(), row("s9", GOOD, {1: 1.0})])
    assert good.specs == bad.specs == 6


def test_estimates_stand_apart() -> None:
    estimated = [replace(r, estimated=True) for r in rows()]
    found = summarize([*rows(), *estimated])
    assert [(f.method.label, f.estimated) for f in found] == [
        ("good", False),
        ("bad", False),
        ("good", True),
        ("bad", True),
    ]
    assert "h200, estimated" in planners(estimated) and "measured" not in planners(estimated)


def test_advantages_are_paired_by_spec() -> None:
    found = advantages(rows(), GOOD)
    assert set(found) == {BAD}
    assert found[BAD][5].value == pytest.approx(0.5) and found[BAD][5].low == pytest.approx(0.5)
    assert found[BAD][40].value == pytest.approx(1 / 3) and found[BAD][40].low >= 0


def test_intervals_shrink_with_more_specs() -> None:
    few, many = bootstrap([0.0, 1.0] * 3), bootstrap([0.0, 1.0] * 60)
    assert few.value == many.value == 0.5
    assert few.high - few.low > 2 * (many.high - many.low) > 0


def test_tables_in_documents_are_made_from_rows(tmp_path: Path) -> None:
    for r in rows():
        append_replay(tmp_path / "rows.jsonl", r)
    text = render("<!-- bench:planners rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| h200, measured | good | 6 | 50 % (50 … 50) |" in text and "| 10 (" in text
    assert render(text, tmp_path) == text


def test_a_picture_has_a_line_for_each_method(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra report")
    draw(rows(), tmp_path / "all.svg")
    draw(rows(), tmp_path / "one.svg", only=["good"])
    text = (tmp_path / "all.svg").read_text()
    assert text.startswith("<?xml") and len(text) > len((tmp_path / "one.svg").read_text())
    draw(rows(), tmp_path / "again.svg")
    for bad in ([*rows(), *(replace(r, estimated=True) for r in rows())], rows()):
        with pytest.raises(QimengError, match="one device"):
            draw(bad, tmp_path / "no.svg", only=[] if len(bad) > len(rows()) else ["nobody"])


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(QimengError, match=r"pip install 'qimeng\[report\]'"):
        draw(rows(), tmp_path / "no.svg")


def test_the_interval_of_a_median_is_over_whole_groups() -> None:
    groups = [[1.0, 2.0, 9.0], [3.0], [4.0, 4.0]]
    by_hand = [
        np.median([n for i in pick for n in groups[i]])
        for pick in np.random.default_rng(0).integers(0, 3, (RESAMPLES, 3))
    ]
    found = bootstrap_median(groups)
    assert found.value == 3.5 and (found.low, found.high) == tuple(np.quantile(by_hand, [0.025, 0.975]))
