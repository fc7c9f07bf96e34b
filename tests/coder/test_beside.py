"""A product that is a part of a concatenation: tiles without any of its columns walk no depth, and the rest is copied.

The cases run in processes of their own (this file as a script), as `product_cases` says.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.families.gemm.family import Gemm
from qimeng.coder.template.families.gemm.positions import columns_read
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import device_named
from tests.coder.product_cases import FLAT, Call, Case, add, as_script, check, printed, rows, shapes

IMAGE, OTHERS = (2, 16, 9, 10), ((2, 40, 9, 10), (2, 70, 9, 10))
COPIED: dict[str, Any] = {"staged": True, "packed": "b", "precision": "fp16x3", "block_k": 16}
READ = {"first": (0, 24), "between": (40, 64), "last": (110, 134), "linear": (64, 96)}
"""Columns of the product of each case."""


def beside(place: int) -> Any:
    def function(s: Call, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        parts = [functional.relu(y) for y in others]
        parts.insert(place, functional.conv2d(x, s.w, s.b, padding=1))
        return torch.cat(parts, 1)

    return function


@cache
def cases() -> dict[str, Case]:
    """The cases of this file."""
    found: dict[str, Case] = {}
    case = partial(add, found)
    weights = {"w": (24, 16, 3, 3), "b": (24,)}
    for place, name in enumerate(("first", "between", "last")):
        schedules = [{}, {"splits": 2}, {"persistent": True, "group_m": 1}, COPIED]
        case(name, beside(place), shapes(IMAGE, *OTHERS), schedules, 4e-5, **weights)
    case(
        "linear",
        lambda s, x, y, z: torch.cat([y, functional.linear(x, s.w), z * 2], -1),
        shapes((70, 48), (70, 64), (70, 96)),
        [{}, {**FLAT, "precision": "tf32"}],
        4e-3,
        w=(32, 48),
    )
    return found


@pytest.mark.parametrize("name", cases())
def test_which_columns_are_read(name: str) -> None:
    case = cases()[name]
    assert columns_read(case.planned[2]) == READ[name]
    text = printed(case, 0, {})[3].source
    low, high = READ[name]
    assert (f"(col0 + BN <= {low})" in text) == (low >= 32) and (f"(col0 >= {high})" in text) == (name != "last")


@pytest.mark.parametrize("name", cases())
def test_tiles_are_no_wider_than_what_is_read(name: str) -> None:
    plan, h200, (low, high) = cases()[name].planned[2], device_named("h200"), READ[name]
    start = Gemm().default(plan, h200, "default")
    found = [start, *Gemm().guesses(plan, start, h200, "default")]
    assert len(found) > 2 and {s.block_n for s in found} == {power_of_two(high - low)}


def test_a_product_alone_is_read_whole() -> None:
    found: dict[str, Case] = {}
    add(found, "alone", lambda s, x: functional.conv2d(x, s.w) * 2, shapes(IMAGE), [{}], w=(40, 16, 3, 3))
    assert (
        columns_read(found["alone"].planned[2]) == (0, 40) and "(col0 " not in printed(found["alone"], 0, {})[3].source
    )


def test_values() -> None:
    check(cases(), rows(__file__, "interpret"))


def test_they_cross_compile() -> None:
    check(cases(), rows(__file__, "compile", "between", "linear"))


if __name__ == "__main__":
    as_script(cases(), lambda: None)
