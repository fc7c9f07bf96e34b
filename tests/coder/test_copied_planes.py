"""Convolutions whose padded copy holds planes, and few channels: in Triton's interpreter, and cross-compiled.

The cases run in processes of their own (this file as a script), as `product_cases` says.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.families.gemm.family import Gemm
from qimeng.coder.template.families.gemm.moves import moves
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.families.gemm.staging import few_channels, shiftable, stageable, under
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
    printed,
    rows,
    shapes,
)
from tests.interpreted import rows_of

conv, up = functional.conv2d, functional.conv_transpose2d
PLANES: dict[str, Any] = {"staged": True, "packed": "b", "precision": "bf16x6", "block_k": 32}
TF32: dict[str, Any] = {"staged": True, "packed": "b", "precision": "tf32", "block_k": 32}
SCALED: dict[str, Any] = {**PLANES, "precision": "fp16x3"}
ONE: dict[str, Any] = {**PLANES, "precision": "fp16"}
HALF: dict[str, Any] = {"staged": True, "packed": "b", "block_k": 32}
EXACT, COARSE = 3e-6, 4e-3


def after_exp(s: Any, x: torch.Tensor) -> torch.Tensor:
    return conv(x.exp(), s.w.abs().log(), s.b, 2, 1) * 2


@cache
def cases() -> dict[str, Case]:
    """The cases of this file."""
    found: dict[str, Case] = {}
    case = partial(add, found)
    image = (2, 3, 19, 18)
    forms = [PLANES, {**PLANES, "descriptors": True}, {**PLANES, "cat": True, "block_n": 64}, {**PLANES, "splits": 2}]
    case("three channels", lambda s, x: conv(x, s.w, s.b, 2, 3), shapes(image), forms, EXACT, w=(20, 3, 7, 7), b=(20,))
    case("scaled", lambda s, x: conv(x, s.w, s.b, 2, 3), shapes(image), [SCALED], EXACT, w=(20, 3, 7, 7), b=(20,))
    case("one plane", lambda s, x: conv(x, s.w, s.b, 1, 1), shapes(image), [ONE], COARSE, w=(20, 3, 3, 3), b=(20,))
    case(
        "what planes lose",
        lambda s, x: conv(x, s.w, s.b, 1, 1).relu(),
        shapes((3, 3, 9, 10), spread=True),
        [SCALED, ONE, {**SCALED, "splits": 2}],
        COARSE,
        w=(20, 3, 3, 3),
        b=(20,),
    )
    scaled = {"shifted": True, "descriptors": True, "block_m": 64}
    case(
        "moved and lost",
        lambda s, x: conv(x, s.w, None, 1, 1) * 2,
        shapes((3, 32, 19, 18), spread=True),
        [{**SCALED, **scaled}, {**ONE, **scaled}],
        COARSE,
        w=(20, 32, 3, 3),
    )
    case(
        "gathered and lost",
        lambda s, x: conv(x[:, s.i], s.w, None, 1, 1),
        shapes((2, 32, 19, 18), spread=True),
        [SCALED, {**SCALED, **scaled}],
        COARSE,
        w=(20, 32, 3, 3),
        i=torch.arange(31, -1, -1),
    )
    case(
        "phases lost",
        lambda s, x: up(x, s.w, s.b, 2, 1),
        shapes((2, 32, 19, 18), spread=True),
        [{**SCALED, **scaled}, SCALED],
        COARSE,
        w=(32, 20, 3, 3),
        b=(20,),
    )
    case("three in tf32", lambda s, x: conv(x, s.w, None, 1, 1), shapes(image), [TF32], COARSE, w=(20, 3, 3, 3))
    case(
        "three in bf16",
        lambda s, x: conv(x, s.w, None, 1, 1),
        shapes(image, dtype=BF16),
        [HALF],
        2e-2,
        w=(20, 3, 3, 3, BF16),
    )
    case(
        "two in fp16",
        lambda s, x: functional.conv1d(x, s.w, None, 1, 2, 2),
        shapes((3, 2, 37), dtype=FP16),
        [HALF],
        4e-3,
        w=(20, 2, 5, FP16),
    )
    volume = (2, 5, 8, 9, 10)
    case("volumes", lambda s, x: functional.conv3d(x, s.w).tanh(), shapes(volume), [PLANES], EXACT, w=(12, 5, 3, 2, 3))
    case("prologues", after_exp, shapes(image), [PLANES, TF32], COARSE, w=(20, 3, 3, 3), b=(20,))
    case("with nothing", lambda s, x: up(x, s.w, None, 2, 1, 0, 1, 2), shapes(image), [PLANES], EXACT, w=(3, 20, 3, 3))
    weights = torch.full((16, 8, 1, 1), float("nan"), dtype=BF16)
    weights[:, :3] = torch.randn(16, 3, 1, 1)
    case(
        "weights beside others",
        lambda s, x: conv(x, s.w[:, :3], padding=1, stride=2),
        shapes(image, dtype=BF16),
        [{"staged": True, "descriptors": True}],
        2e-2,
        w=weights,
    )
    case("phases", lambda s, x: up(x, s.w, s.b, 2, 1), shapes(image), [PLANES], EXACT, w=(3, 20, 3, 3), b=(20,))
    whole = (2, 32, 19, 18)
    moved = {**PLANES, "shifted": True, "descriptors": True}
    case("moved", lambda s, x: conv(x, s.w, padding=1), shapes(whole), [PLANES, moved], EXACT, w=(20, 32, 3, 3))
    case("moved phases", lambda s, x: up(x, s.w, None, 2, 1), shapes(whole), [moved], EXACT, w=(32, 20, 3, 3))
    case(
        "groups",
        lambda s, x: conv(x, s.w, padding=1, groups=2) * 2,
        shapes(whole),
        [PLANES],
        EXACT,
        w=(40, 16, 3, 3),
    )
    return found


@pytest.mark.parametrize("name", cases())
def test_the_copy_is_what_tensor_cores_take(name: str) -> None:
    *_, plan = cases()[name].planned
    for changes in cases()[name].schedules:
        schedule = GemmSchedule(**changes)
        found = under(plan, schedule)
        held = found.nest.sources[found.a.loads[0].param]
        assert held.dtype == (scheme_of(plan, schedule).dtype if found.a.split else plan.dtype)
        assert found.a.split == (schedule.precision in ("bf16x6", "fp16x3", "fp16") and not plan.half)
        assert held.shape[-1] % 4 == 0 and (found.shift is not None) == schedule.shifted


def test_what_cannot_be_filled_up() -> None:
    one = planned(lambda: Call(lambda s, x: conv(x, s.w), w=(8, 1, 3, 3)), shapes((2, 1, 9, 9)))[2]
    groups = planned(lambda: Call(lambda s, x: conv(x, s.w, groups=2), w=(8, 3, 3, 3)), shapes((2, 6, 9, 9)))[2]
    assert "no multiple of 4" in str(stageable(one))
    assert "3 neighbouring elements" in str(stageable(groups))


@pytest.mark.parametrize(
    ("function", "size", "parameters"),
    [
        (lambda s, x: conv(x, s.w.exp().view(8, 3, 3, 3)), (2, 3, 9, 8), {"w": (216,)}),
        (lambda s, x: conv(x[s.i].view(2, 3, 9, 8), s.w), (6, 9, 8), {"w": (8, 3, 3, 3), "i": torch.arange(6)}),
        (
            lambda s, x: conv((x.reshape(6, 72) * torch.arange(6)[:, None]).view(2, 3, 9, 8), s.w),
            (2, 3, 9, 8),
            {"w": (8, 3, 3, 3)},
        ),
    ],
    ids=["weights", "gathered", "numbered"],
)
def test_channels_inside_another_dimension_are_not_filled_up(function: Any, size: Any, parameters: Any) -> None:
    """More channels would move what lies outside them in memory, or its number."""
    plan = planned(lambda: Call(function, **parameters), shapes(size))[2]
    assert "3 neighbouring elements" in str(stageable(plan))


def test_few_channels_are_those_that_a_result_sums_over() -> None:
    one = planned(lambda: Call(lambda s, x: conv(x, s.w), w=(8, 1, 11, 11)), shapes((2, 1, 19, 19)))[2]
    parts = Call(lambda s, x: conv((x.view(2, 4, 4, 9, 9) * s.v).flatten(1, 2), s.w), v=(4, 1, 1), w=(8, 16, 3, 3))
    sixteen = planned(lambda: parts, shapes((2, 16, 9, 9)))[2]
    assert few_channels(one) and not few_channels(sixteen)


def test_unpacked_windows_are_split_by_the_main_loop() -> None:
    *_, plan = cases()["three channels"].planned
    (found,) = moves()["layout"].schedules(plan, GemmSchedule(**PLANES), "unpack", device_named("h200"))
    assert not found.staged and found.inline == "a"


def test_too_large_a_copy_holds_no_planes() -> None:
    large = planned(lambda: Call(lambda s, x: conv(x, s.w), w=(8, 3, 3, 3)), shapes((100, 3, 1400, 1400)))[2]
    assert not under(large, GemmSchedule(**PLANES)).a.split
    found = Gemm().guesses(large, GemmSchedule(), device_named("h200"), "default")
    assert all(s.inline == "a" for s in found if s.precision == "bf16x6")


@pytest.mark.parametrize("mode", ["default", "high"])
@pytest.mark.parametrize("channels", [3, 16])
def test_windows_are_not_scaled_one_by_one(channels: int, mode: str) -> None:
    """Where a copy would be too large for planes, lowering tries those that need no scale."""
    size = (3600 // channels, channels, 1400, 1400)
    large = planned(lambda: Call(lambda s, x: conv(x, s.w), w=(8, channels, 3, 3)), shapes(size))[2]
    found = Gemm().guesses(large, GemmSchedule(), device_named("h200"), mode)
    assert found and not any(scheme_of(large, s).scaled for s in found)


def test_lowering_tries_planes_first_where_cudnn_computes_in_fp32() -> None:
    def first(channels: int) -> GemmSchedule:
        size = (2, channels, 40, 40)
        plan = planned(lambda: Call(lambda s, x: conv(x, s.w, padding=1), w=(64, channels, 3, 3)), shapes(size))[2]
        return Gemm().guesses(plan, GemmSchedule(), device_named("h200"), "default")[0]

    assert first(3).precision == "fp16x3" and first(3).staged and not first(3).inline
    assert first(64).precision == "fp16", "as many digits as TF32, at twice its rate"


def test_blocks_of_planes_are_moved() -> None:
    *_, plan = cases()["moved"].planned
    assert shiftable(plan, GemmSchedule(**PLANES)) is None
    assert "as they are" in str(shiftable(plan, GemmSchedule(**{**PLANES, "inline": "a"})))


def test_what_is_read_through_a_guard_of_another_kind_is_not_computed_on() -> None:
    """Else the product's left operand would come from registers, which `shared_bytes` and `waits` do not count on."""
    source = printed(cases()["with nothing"], 0, TF32)[3].source
    assert "a0 = " in source and "a0 = tl.where(" not in source


def test_values() -> None:
    check(cases(), rows(__file__, "interpret"))


def test_they_cross_compile() -> None:
    check(cases(), rows(__file__, "compile", "three channels"))


@pytest.mark.slow
def test_others_cross_compile() -> None:
    names = [name for name in cases() if name != "three channels"]
    check(cases(), rows(__file__, "compile", *names))


def infinite() -> None:
    """Print where results are finite, of an input with an infinity."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    moved = {"shifted": True, "descriptors": True, "block_m": 64}
    infinities(cases()["three channels"], 0, PLANES, (7, 9))
    infinities(cases()["scaled"], 0, SCALED, (7, 9))
    infinities(cases()["one plane"], 0, ONE, (7, 9))
    infinities(cases()["phases lost"], 0, {**ONE, **moved}, (7, 9))


def test_an_infinity_reaches_its_own_windows_alone() -> None:
    """Channels that fill up are zero, and so are their weights."""
    found = rows_of(__file__, "infinite")
    assert len(found) == 4 and all(row["same"] and row["infinite"] for row in found), found


if __name__ == "__main__":
    as_script(cases(), infinite)
