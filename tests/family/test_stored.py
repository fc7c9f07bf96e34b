"""Schedules come back from recipes and stores, also those of the one class that had the fields of all families."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.errors import ReplayError
from qimeng.family import Schedule, schedule_from_data
from qimeng.interfaces.records import implementation_from_data

FLAT = {
    "form": "resident", "block_p": 1, "block_r": 1024, "splits": 1, "lag": 1, "per_sm": 1, "block_m": 128,
    "block_n": 128, "block_k": 64, "group_m": 8, "warps": 4, "stages": 3, "precision": "ieee", "cat": False,
    "promote": 0, "packed": "", "inline": "", "persistent": False, "descriptors": False, "fast": False,
}  # fmt: skip
"""What version 0 wrote for every schedule, whatever its family."""


@pytest.mark.parametrize(
    "schedule",
    [TileSchedule("wave", block_r=8192, lag=8, per_sm=3), GemmSchedule(block_m=64, precision="fp16x3", packed="a")],
    ids=str,
)
def test_what_is_stored_comes_back(schedule: Schedule) -> None:
    assert schedule_from_data(asdict(schedule)) == schedule
    changed = {k: v for k, v in asdict(schedule).items() if v != FLAT.get(k)}
    assert schedule_from_data({**FLAT, **changed}) == schedule, "the fields of other families say nothing"


def test_an_older_one_without_the_last_fields_loads() -> None:
    older = {k: v for k, v in FLAT.items() if k not in ("fast", "inline")}
    assert schedule_from_data({**older, "family": "gemm", "block_k": 32}) == GemmSchedule(block_k=32)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"family": "banded", "block": 3},
            "no family 'banded' \\(known: .*irregular.*, recurrent, gemm, attention, scan, tile\\); install",
        ),
        ({**FLAT, "family": "tile", "depth": 3}, "of the family 'tile' has no field 'depth'"),
        ({"block_p": 1}, "no family ''"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(data: dict[str, object], words: str) -> None:
    stored = {
        "language": "triton", "source": "", "entry": "f", "prepare": "", "prepare_inputs": [], "schedule": data,
    }  # fmt: skip
    with pytest.raises(ReplayError, match=words):
        implementation_from_data(stored)
