from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.bench.row import RowError, append_row
from qimeng.bench.tables import VIEWS, render
from qimeng.interfaces import Timing
from tests.bench.rows import row


def test_tables_replace_what_stands_between_the_markers(tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", row(1, 1.0))
    append_row(tmp_path / "rows.jsonl", row(3, None, family="gemm"))
    text = "before\n<!-- bench:speed rows.jsonl -->\nold\n<!-- /bench -->\nafter\n"
    once = render(text, tmp_path)
    assert "old" not in once
    assert "| pointwise and reduction | 1 | 2.00 | 2.00 | 1.00 | 4.00 | 50 % | 100 % |" in once
    assert "| gemm | 0 of 1 | – |" in once
    assert once.startswith("before\n") and once.endswith("after\n")
    assert render(once, tmp_path) == once


def test_ids_of_which_nothing_else_is_said_are_shown_in_short(tmp_path: Path) -> None:
    for number in (1, 2, 3, 7):
        append_row(tmp_path / "rows.jsonl", replace(row(number, 1.0), random=True))
    text = render("<!-- bench:exceptions rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| random operators | level1/1-3,7 |" in text


def test_the_best_mode_has_columns_where_several_were_timed(tmp_path: Path) -> None:
    timed = row(1, 1.0)
    assert timed.compiled is not None and timed.compiled_best is not None
    modes = {"default": timed.compiled, "reduce-overhead": timed.compiled_best}
    append_row(tmp_path / "rows.jsonl", replace(timed, compiled_modes=modes))
    text = render("<!-- bench:speed rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| pointwise and reduction | 1 | 2.00 | 2.00 | 1.00 | 2.50 | 0.80 | 4.00 | 50 % | 100 % |" in text


def test_rows_where_torch_compile_is_outside_the_budget_are_counted_apart(tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", row(1, 1.0))
    append_row(tmp_path / "rows.jsonl", row(2, 4.0, compiled_wrong={"default": "max error 1"}))
    text = render("<!-- bench:speed rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "where it keeps to the error budget" in text
    assert "| pointwise and reduction | 2 | 1.00 | 2.00 | 0.50 | 1.00 |" in text


def test_a_part_of_a_suite_is_held_against_the_best_that_pytorch_gets_right(tmp_path: Path) -> None:
    modes = {"default": Timing(1.0), "max-autotune": Timing(0.5)}
    append_row(tmp_path / "rows.jsonl", row(1, 1.0, compiled_modes=modes))
    append_row(tmp_path / "rows.jsonl", row(2, 1.0, compiled_modes=modes, compiled_wrong={"max-autotune": "max"}))
    append_row(tmp_path / "rows.jsonl", row(3, 4.0, seconds={"total": 40.0, "baselines": 10.0}, generated_share=0.2))
    append_row(tmp_path / "rows.jsonl", row(4, 1.0, group="level2"))
    append_row(tmp_path / "rows.jsonl", row(5, None, group="level2"))
    text = render("<!-- bench:parts rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| level1 | default, float32 | NVIDIA H200 | 3 | 3 | 1.26 | 0.50 | 0.50 | 67 % | 10 |" in text
    assert "| level2 | default, float32 | NVIDIA H200 | 2 | 1 | 2.00 | 1.00 | 2.00 | 50 % | 10 |" in text


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_copes_with_results_and_failures(view: str, tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", row(1, 1.0))
    append_row(tmp_path / "rows.jsonl", row(2, None))
    text = render(f"<!-- bench:{view} rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1


def test_an_unknown_view_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="no table called 'nothing'"):
        render("<!-- bench:nothing a.jsonl -->\n<!-- /bench -->", tmp_path)
