"""Convolutions whose windows are shifted blocks of a padded copy: in Triton's interpreter, and cross-compiled.

The cases run in processes of their own (this file as a script), as `product_cases` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.families.gemm.family import Gemm
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.staging import shiftable, under
from qimeng.device import device_named
from tests.coder.product_cases import (
    BF16,
    FP16,
    Call,
    Case,
    add,
    as_script,
    check,
    infinities,
    planned,
    rows,
    shapes,
)
from tests.interpreted import rows_of

conv, up = functional.conv2d, functional.conv_transpose2d
MOVED: dict[str, Any] = {"staged": True, "shifted": True, "packed": "b", "descriptors": True, "block_k": 16}
TF32 = {**MOVED, "precision": "tf32"}


def residual(s: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.relu(conv(x * 2, s.w, s.b, padding=1) + y) * x


@cache
def cases() -> dict[str, Case]:
    """The cases of this file."""
    found: dict[str, Case] = {}
    case = partial(add, found)
    image, weights = (2, 16, 19, 18), {"w": (20, 16, 3, 3), "b": (20,)}
    both = [TF32, {**TF32, "splits": 2}]
    case("padded", lambda s, x: conv(x, s.w, s.b, padding=1), shapes(image), both, 4e-3, **weights)
    case(
        "dilated", lambda s, x: conv(x.exp(), s.w, None, 1, 0, (1, 2)), shapes((1, 16, 30, 31)), [TF32], 4e-3, **weights
    )
    case(
        "residual",
        residual,
        shapes(image, image, dtype=FP16),
        [MOVED],
        4e-3,
        w=(16, 16, 3, 3, FP16),
        b=(16, FP16),
    )
    case(
        "groups",
        lambda s, x: conv(x, s.w, padding=1, groups=2) * 2,
        shapes((2, 32, 19, 18)),
        both,
        4e-3,
        w=(40, 16, 3, 3),
    )
    case(
        "one dimension",
        lambda s, x: functional.conv1d(x, s.w, None, 1, 2, 2),
        shapes((3, 16, 37)),
        [TF32],
        4e-3,
        w=(20, 16, 3),
    )
    case(
        "three dimensions",
        lambda s, x: functional.conv3d(x, s.w),
        shapes((1, 16, 14, 15, 16), dtype=BF16),
        [MOVED],
        2e-2,
        w=(20, 16, 2, 2, 2, BF16),
    )
    case("phases", lambda s, x: up(x, s.w, s.b, 2, 1), shapes(image), [TF32], 4e-3, w=(16, 20, 4, 4), b=(20,))
    case(
        "phases of different lengths",
        lambda s, x: functional.relu(up(x, s.w, s.b, 2, 1)),
        shapes(image),
        both,
        4e-3,
        w=(16, 20, 3, 3),
        b=(20,),
    )
    return found


@pytest.mark.parametrize("name", cases())
def test_each_case_is_read_by_shifted_blocks(name: str) -> None:
    *_, plan = cases()[name].planned
    for changes in cases()[name].schedules:
        schedule = GemmSchedule(**changes)
        assert shiftable(plan, schedule) is None
        found = under(plan, schedule)
        assert found.shift is not None and found.shape[1] > plan.shape[1] and found.shape[3] == plan.shape[3]
        assert under(plan, schedule.but(shifted=False)).shift is None


def reason(function: Callable[..., Any], *sizes: tuple[int, ...], w: tuple[int, ...], **changes: Any) -> str:
    *_, plan = planned(lambda: Call(function, w=w), shapes(*sizes))
    found = shiftable(plan, GemmSchedule(**{**TF32, **changes}))
    assert found is not None
    assert under(plan, GemmSchedule(**{**TF32, **changes})).shift is None
    return found


def test_why_windows_are_not_shifted() -> None:
    dense, large = (lambda s, x: conv(x, s.w, padding=1)), (2, 16, 19, 18)
    assert "as they are" in reason(dense, large, w=(20, 16, 3, 3), precision="bf16x6", inline="a")
    assert "no step" in reason(lambda s, x: conv(x, s.w, stride=2), large, w=(20, 16, 3, 3))
    assert "times as many positions" in reason(dense, (2, 16, 6, 7), w=(20, 16, 3, 3))
    assert "a block of 32 channels of 16" in reason(dense, large, w=(20, 16, 3, 3), block_k=32)
    assert "reduced" in reason(lambda s, x: conv(x, s.w, padding=1).sum(1), large, w=(20, 16, 3, 3))
    assert "no step" in reason(lambda s, x: conv(x, s.w, padding=1).flatten(2) * 2, large, w=(20, 16, 3, 3))


def test_lowering_tries_them_first() -> None:
    family, h200 = Gemm(), device_named("h200")
    *_, plan = cases()["padded"].planned
    wide = planned(lambda: Call(lambda s, x: conv(x, s.w, padding=1), w=(64, 32, 3, 3)), shapes((2, 32, 40, 40)))[2]
    found = family.guesses(wide, GemmSchedule(precision="ieee"), h200, "default")
    assert found[0].shifted and not all(s.shifted for s in found)
    assert {s.precision for s in found if s.shifted} == {"fp16", "tf32", "fp16x3"}
    assert not any(s.shifted for s in family.guesses(wide, GemmSchedule(), device_named("a100"), "default"))
    assert not any(s.shifted for s in family.guesses(plan, GemmSchedule(), h200, "highest")), "16 channels"


def test_values() -> None:
    check(cases(), rows(__file__, "interpret"))


def test_they_cross_compile() -> None:
    check(cases(), rows(__file__, "compile", "residual", "phases of different lengths"))


@pytest.mark.slow
def test_others_cross_compile() -> None:
    check(cases(), rows(__file__, "compile", "padded", "groups", "one dimension", "three dimensions", "phases"))


def infinite() -> None:
    """Print where results are finite, of an input with an infinity."""
    infinities(cases()["phases of different lengths"], 0, TF32, (7, 9))


def test_an_infinity_reaches_its_own_windows_alone() -> None:
    """A phase without an element of the window reads zeros, not its neighbours."""
    (found,) = rows_of(__file__, "infinite")
    assert found["same"] and found["infinite"]


if __name__ == "__main__":
    as_script(cases(), infinite)
