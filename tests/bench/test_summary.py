import json
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.bench.row import Row, RowError, Settings, StepRow, append_row, read_rows
from qimeng.bench.summary import group_of, summarize
from qimeng.bench.tables import exceptions_of
from qimeng.interfaces import Timing
from tests.bench.rows import HERE, row


def test_a_row_survives_the_round_trip(tmp_path: Path) -> None:
    rows = (row(1, 1.0), row(2, None))
    for r in rows:
        append_row(tmp_path / "deep" / "rows.jsonl", r)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows


def test_a_half_written_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, row(1, 1.0))
    with open(path, "a") as out:
        out.write(row(2, 1.0).to_json()[:50])
    assert [r.id for r in read_rows(path)] == ["level1/1"]
    append_row(path, row(3, 1.0))
    assert [r.id for r in read_rows(path)] == ["level1/1", "level1/3"]


def test_a_later_row_of_the_same_run_replaces_the_earlier(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for r in (row(1, None), row(1, 1.0), row(1, 1.5, settings=Settings(mode="high"))):
        append_row(path, r)
    assert [(r.settings.mode, r.error) for r in read_rows(path)] == [("default", None), ("high", None)]


def test_a_row_with_a_level_and_a_number_is_read_as_one_with_an_id(tmp_path: Path) -> None:
    """As rows of November 2026 have them; a run with their problems goes on from them."""
    data = json.loads(row(7, 1.0).to_json())
    del data["id"], data["suite"], data["group"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"level": 1, "number": 7, **data}) + "\n")
    assert read_rows(tmp_path / "rows.jsonl") == (row(7, 1.0),)


def test_what_is_no_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"level": 1}\n')
    with pytest.raises(RowError, match="not a row"):
        read_rows(tmp_path / "rows.jsonl")
    with pytest.raises(RowError, match="cannot read"):
        read_rows(tmp_path / "none.jsonl")


def test_figures_by_hand() -> None:
    rows = [
        row(1, 1.0),
        row(2, 0.5, family="reduction", generated_share=0.25),
        row(3, 2.2, peak_bytes=150),
        row(4, None),
    ]
    (s,) = summarize(rows)
    assert s.problems == 4
    assert s.fast == {"fast_0": 0.75, "fast_1": 0.5, "fast_1.2": 0.5, "fast_2": 0.25}
    assert s.fast_compile == {"fast_1": 0.25, "fast_1.2": 0.25, "fast_2": 0.0}
    assert s.kernelbench_right == 1.0
    assert (s.half_generated, s.median_generated) == (0.5, 1.0)
    assert s.slowest == ("level1/3", pytest.approx(2 / 2.2))
    assert s.too_slow == ("level1/3",)
    assert s.memory_heavy == {"level1/3": 1.5}
    assert s.failed == {"level1/4": "broke"}
    assert s.roofline_fraction == pytest.approx(0.5)
    assert (s.median_seconds, s.median_evaluations) == (10.0, 4.0)
    assert s.seconds_split == {"compile": 4.0, "time": 2.0}
    (g,) = s.groups
    assert (g.group, g.problems, g.timed) == ("pointwise and reduction", 4, 3)
    assert (g.half_generated, g.median_seconds, g.median_evaluations) == (0.5, 10.0, 4.0)
    assert g.compile_best_over_eager == pytest.approx(2.5)
    assert g.over_eager == pytest.approx((2 * 4 * 2 / 2.2) ** (1 / 3))
    assert g.compile_over_eager == pytest.approx(2)
    assert g.over_compile == pytest.approx((1 * 2 / 2.2) ** (1 / 3))
    assert g.roofline_over_eager == pytest.approx(4)
    assert g.roofline_fraction == pytest.approx(0.5)


def test_what_each_kind_of_action_did() -> None:
    steps = (
        StepRow("tiling", "taller", True, "passed", 1.5, 4),
        StepRow("tiling", "wider", True, "passed", 0.9, 4),
        StepRow("tiling", "wider", False, "compile"),
        StepRow("fusion", "", True),
        StepRow("stop"),
    )
    (s,) = summarize([row(1, 1.0, steps=steps)])
    tiling, fusion = s.kinds
    assert (tiling.kind, tiling.tried) == ("tiling", 3)
    assert tiling.accepted == pytest.approx(2 / 3)
    assert tiling.gained == pytest.approx(1 / 3)
    assert (tiling.median_gain, tiling.best_gain) == (pytest.approx(1.2), 1.5)
    assert (fusion.kind, fusion.accepted, fusion.median_gain) == ("fusion", 1.0, None)


def test_runs_devices_and_estimates_are_never_mixed() -> None:
    estimate = Timing(1.0, estimated=True)
    rows = [
        row(1, 1.0),
        row(1, 1.0, settings=Settings(mode="high")),
        row(2, 1.0, candidate=estimate, eager=estimate, compiled=None),
        row(3, 1.0, settings=Settings(planner="random")),
    ]
    summaries = summarize(rows)
    assert [(s.problems, s.estimated) for s in summaries] == [(1, False), (1, False), (1, True), (1, False)]


def test_a_measured_time_is_never_divided_by_an_estimated_one() -> None:
    assert row(1, 1.0, candidate=Timing(1.0, estimated=True)).speedup is None


def test_groups() -> None:
    assert group_of(row(1, 1.0, family="gemm")) == "gemm"
    assert group_of(row(1, 1.0, family="gemm", collapsed="triangular output")) == "gemm, collapsed"
    assert group_of(row(1, 1.0, family="gemm", random=True)) == "random operators"
    assert group_of(row(1, None, family="")) == "not captured"


def test_modes_and_dtypes_of_one_file_are_summed_up_apart() -> None:
    rows = [
        row(n, 1.0, settings=Settings(mode=mode, dtype=dtype))
        for n, mode, dtype in (
            (1, "default", "float32"),
            (1, "high", "float32"),
            (1, "default", "bfloat16"),
            (2, "default", "bfloat16"),
        )
    ]
    found = [(s.mode, s.dtype, s.problems) for s in summarize(rows)]
    assert found == [("default", "float32", 1), ("high", "float32", 1), ("default", "bfloat16", 2)]


def test_a_problem_counts_once_in_a_run() -> None:
    nowhere = replace(HERE, device="", driver="")
    modes = Settings(compile_modes=("default", "max-autotune"))
    again = row(1, 0.5, settings=modes, compiled_modes={"default": Timing(1.0), "max-autotune": Timing(0.5)})
    rows = [row(1, 1.0), row(2, None, environment=nowhere), again, row(1, None, environment=nowhere)]
    (s,) = summarize(rows)
    assert s.problems == 2 and s.failed == {"level1/2": "broke"}
    assert s.groups[0].over_eager == pytest.approx(4)
    assert s.compile_modes == {"default": pytest.approx(2), "max-autotune": pytest.approx(4)}


def test_problems_that_a_reader_should_know_of() -> None:
    rows = [
        row(1, 1.0, random=True),
        row(2, 2.2, kernelbench=False, eager_unstable=True),
        row(3, None, degenerate="zeros pass"),
        row(4, 1.0, peak_bytes=150, compiled_wrong={"default": "max error 1"}),
        row(5, 1.0, right=False, error="gate program: wrong"),
    ]
    (s,) = summarize(rows)
    assert [g.problems for g in s.groups if g.group == "degenerate"] == [1]
    assert exceptions_of(s) == {
        "not right": ["level1/3: broke", "level1/5: gate program: wrong"],
        "right, but not by KernelBench's rule": ["level1/2"],
        "eager run twice fails KernelBench's rule": ["level1/2"],
        "torch.compile is outside the error budget": ["level1/4"],
        "degenerate": ["level1/3: zeros pass"],
        "random operators": ["level1/1"],
        "below 0.98 of eager": ["level1/2"],
        "above 1.1 x eager's memory": ["level1/4 (1.50 x)"],
    }


def test_seconds_are_those_without_baselines_where_a_row_tells() -> None:
    rows = [row(1, 1.0, seconds={"total": 40.0, "optimize": 20.0, "baselines": 20.0, "check": 3.0})]
    (s,) = summarize(rows)
    assert s.median_seconds == 20.0
    assert s.seconds_split == {"baselines": 20.0, "check": 3.0}


def test_rows_written_before_all_modes_were_recorded_can_be_read() -> None:
    data = json.loads(row(1, 1.0).to_json())
    del data["compiled_modes"], data["settings"]["compile_seconds"]
    assert Row.from_json(json.dumps(data)) == row(1, 1.0)
