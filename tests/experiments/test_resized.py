"""Problems at other sizes: which sizes change, and the table beside the problems as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.resized import main, odd, one, resized
from qimeng.bench.row import Row, read_rows

CONVOLUTION = """import torch


class Model(torch.nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.convolution = torch.nn.Conv2d(channels, 64, 3, groups=groups)

    def forward(self, x):
        return self.convolution(x)


batch, channels, groups, side = 16, 96, 8, 100


def get_inputs():
    return [torch.rand(batch, channels, side, side)]


def get_init_inputs():
    return [channels, groups]
"""


def test_sizes_become_primes_where_the_module_accepts_them() -> None:
    assert "(16, 72, 8, 73)" in odd(CONVOLUTION)  # channels stay a multiple of the groups: nine eights


def test_only_the_first_dimension_becomes_one() -> None:
    assert "(1, 96, 8, 100)" in one(CONVOLUTION)


def test_a_square_has_no_first_dimension_of_its_own() -> None:
    square = CONVOLUTION.replace("rand(batch, channels, side, side)", "rand(side, channels, side, side)")
    assert "(16, 96, 8, 100)" in one(square)


def test_files_are_written_below_a_folder_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "level2").mkdir(parents=True)
    (tmp_path / "in" / "level2" / "7_Some.py").write_text(CONVOLUTION)
    main(tmp_path / "in", tmp_path / "out", "odd,one", "*")
    written = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.py"))
    assert written == ["odd/level2/7_Some.py", "one/level2/7_Some.py"]
    assert "one: level2/7_Some: 16 to 1" in capsys.readouterr().out


def test_the_table_tells_the_share_of_the_gain_that_is_kept() -> None:
    stored = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_level1.jsonl"
    row = next(r for r in read_rows(stored) if r.eager and r.candidate)
    assert row.eager is not None
    timing = row.eager

    def timed(suite: str, id: str, gain: float) -> Row:
        eager, candidate = replace(timing, device_ms=gain), replace(timing, device_ms=1.0)
        return replace(row, suite=suite, id=id, eager=eager, candidate=candidate)

    rows = [timed("kernelbench", "level1/3", 3.0), timed("odd", "level1/3_Any", 2.0)]
    assert "| odd | float32 | 1 of 1 | 1 | 3.00 | 2.00 | 0.50 | 2.00 |" in resized(rows)
