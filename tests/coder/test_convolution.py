"""Convolutions through the GEMM family: in Triton's interpreter, cross-compiled, and what is printed.

The interpreter must be chosen before triton is imported, so the cases run in processes of their own (this file as a
script), as `product_cases` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.families.gemm.family import Gemm
from qimeng.coder.template.families.gemm.moves import moves
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.staging import stageable
from qimeng.device import device_named
from qimeng.errors import IllegalAction
from tests.coder.product_cases import (
    BF16,
    FP16,
    Call,
    Case,
    add,
    as_script,
    check,
    infinities,
    measured,
    planned,
    printed,
    rows,
    shapes,
)
from tests.interpreted import rows_of

conv = functional.conv2d
PRECISIONS = [{"precision": p} for p in ("ieee", "tf32x3")]


def dense(s: Call, x: torch.Tensor) -> torch.Tensor:
    return conv(x, s.w, s.b, padding=1)


def channels_last(s: Call, x: torch.Tensor) -> torch.Tensor:
    return conv(x, s.w, padding=1)


def block(s: Call, x: torch.Tensor) -> torch.Tensor:
    y = conv(x * s.scale[:, None, None] + 1, s.w, s.b, padding=1)
    return functional.relu(y * s.out[:, None, None] + x)


@cache
def cases() -> dict[str, Case]:
    """The cases of this file."""
    found: dict[str, Case] = {}
    case = partial(add, found)
    weights = {"w": (20, 5, 3, 3), "b": (20,)}
    case("padded", dense, shapes((2, 5, 9, 8)), PRECISIONS, **weights)
    case(
        "padded, tf32",
        dense,
        shapes((2, 5, 9, 8)),
        [{"precision": "tf32"}, {"precision": "tf32", "packed": "b"}],
        4e-3,
        **weights,
    )
    planes = [{"precision": p, "inline": "a", "packed": "b"} for p in ("fp16x3", "bf16x6")]
    case(
        "padded, planes",
        dense,
        shapes((2, 5, 9, 8)),
        [*planes, dict(planes[1], splits=2), dict(planes[1], promote=32)],
        6e-6,
        **weights,
    )
    case("whole copies of windows", dense, shapes((2, 5, 9, 8)), [{"precision": "fp16x3"}], 6e-6, **weights)
    case(
        "strides and dilation",
        lambda s, x: conv(x, s.w, None, (2, 1), (0, 2), (1, 2)),
        shapes((3, 5, 9, 8)),
        [*PRECISIONS, {"splits": 2}],
        w=(20, 5, 3, 2),
    )
    case("no padding", lambda s, x: conv(x, s.w), shapes((2, 4, 7, 8)), PRECISIONS, w=(20, 4, 3, 3))
    case(
        "groups",
        lambda s, x: conv(x, s.w, s.b, 1, 1, 1, 2),
        shapes((2, 6, 9, 8)),
        PRECISIONS,
        expect={"batch": 2},
        w=(20, 3, 3, 3),
        b=(20,),
    )
    case("one by one", lambda s, x: conv(x, s.w), shapes((2, 6, 9, 8)), PRECISIONS, w=(20, 6, 1, 1))
    case("one by one, stride", lambda s, x: conv(x, s.w, stride=2), shapes((2, 6, 9, 8)), PRECISIONS, w=(20, 6, 1, 1))
    case("one image", lambda s, x: conv(x, s.w, padding="same"), shapes((1, 6, 9, 8)), PRECISIONS, w=(20, 6, 3, 4))
    case(
        "one dimension",
        lambda s, x: functional.conv1d(x, s.w, None, 1, 2, 2),
        shapes((2, 6, 30)),
        PRECISIONS,
        w=(20, 6, 3),
    )
    case(
        "three dimensions",
        lambda s, x: functional.conv3d(x, s.w, None, 1, 1),
        shapes((2, 3, 5, 6, 4)),
        PRECISIONS,
        w=(17, 3, 3, 3, 3),
    )
    case(
        "prologue",
        lambda s, x: conv(torch.exp(x), s.w, padding=1),
        shapes((2, 5, 9, 8)),
        [{}, {"splits": 2}],
        w=(20, 5, 3, 3),
    )
    case(
        "block",
        block,
        shapes((2, 5, 9, 8)),
        [{}, {"splits": 2}],
        1e-4,
        w=(5, 5, 3, 3),
        b=(5,),
        scale=(5,),
        out=(5,),
    )
    case(
        "sums of channels",
        lambda s, x: conv(x, s.w, padding=1).sum(1),
        shapes((2, 5, 9, 8)),
        [{}],
        3e-5,
        w=(20, 5, 3, 3),
    )
    case(
        "channels last",
        channels_last,
        lambda: tuple(x.to(memory_format=torch.channels_last) for x in shapes((2, 8, 9, 8))()),
        PRECISIONS,
        w=(20, 8, 3, 3),
    )
    copies: list[dict[str, Any]] = [
        {"staged": True},
        {"staged": True, "precision": "fp16x3", "packed": "b", "inline": "a"},
        {"staged": True, "splits": 2},
    ]
    wide = {"w": (20, 8, 3, 3), "b": (20,)}
    rounded = [{"staged": True, "precision": "tf32", "packed": "b"}]
    case("copied", dense, shapes((2, 8, 6, 7)), copies, **wide)
    case("copied, tf32", dense, shapes((2, 8, 6, 7)), rounded, 4e-3, **wide)
    case(
        "copied with a prologue",
        lambda s, x: conv(x.exp(), s.w, s.b, (2, 1), (1, 2), (1, 2)) * 2,
        shapes((2, 8, 9, 7)),
        copies,
        1e-5,
        **wide,
    )
    case(
        "copied, groups",
        lambda s, x: conv(x, s.w, padding=1, groups=2)[:, :, 1:] * 2,
        shapes((2, 8, 6, 7)),
        copies[1:],
        w=(20, 4, 3, 3),
    )
    case(
        "copied, transposed",
        lambda s, x: functional.conv_transpose2d(x, s.w, None, (4, 6), (1, 2), (1, 0), 1, (2, 4)),
        shapes((2, 8, 4, 3)),
        copies[::2],
        w=(8, 10, 3, 5),
    )
    case(
        "copied, transposed, odd",
        lambda s, x: functional.conv_transpose2d(x, s.w, None, 2, 1),
        shapes((1, 4, 4, 3)),
        [{}, {"staged": True}, {"staged": True, "packed": "b", "block_k": 16}],
        w=(4, 10, 3, 3),
    )
    case(
        "copied, half",
        lambda s, x: conv(x.relu(), s.w, s.b, padding=1),
        shapes((2, 8, 6, 7), dtype=FP16),
        [copies[0], {"staged": True, "packed": "b"}],
        2e-3,
        w=(20, 8, 3, 3, FP16),
        b=(20, FP16),
    )
    transposed = functional.conv_transpose2d
    both = [{}, {"packed": "b"}]
    shallow = [{"block_k": 16}, {"block_k": 16, "packed": "b", "splits": 2}]
    up = {"w": (5, 20, 3, 3), "b": (20,)}
    case("transposed", lambda s, x: transposed(x, s.w, s.b), shapes((2, 5, 6, 7)), both, **up)
    case(
        "transposed, phases",
        lambda s, x: transposed(x, s.w, s.b, 2, 1),
        shapes((2, 5, 6, 7)),
        both,
        expect={"batch": 4, "m": 84, "k": 20},
        w=(5, 20, 4, 4),
        b=(20,),
    )
    case(
        "transposed, output padding", lambda s, x: transposed(x, s.w, s.b, 2, 1, 1), shapes((2, 5, 6, 7)), shallow, **up
    )
    case(
        "transposed, phases of different lengths",
        lambda s, x: functional.relu(transposed(x, s.w, s.b, 2, 1)),
        shapes((2, 5, 6, 7)),
        [*both, *shallow],
        1e-5,
        **up,
    )
    case(
        "transposed, groups and dilation",
        lambda s, x: transposed(x.exp(), s.w, None, (3, 2), (1, 2), (1, 0), 2, (2, 3)),
        shapes((2, 6, 6, 7)),
        [both[1], shallow[0]],
        w=(6, 10, 3, 2),
    )
    case(
        "transposed, stride and dilation of one factor",
        lambda s, x: transposed(x, s.w, None, (4, 6), (1, 2), (1, 0), 1, (2, 4)),
        shapes((2, 6, 4, 3)),
        [both[0], shallow[1]],
        w=(6, 10, 3, 5),
    )
    deep = functional.conv_transpose3d
    case(
        "transposed, three dimensions",
        lambda s, x: deep(x, s.w, None, 2, 1),
        shapes((1, 4, 3, 3, 4)),
        shallow,
        w=(4, 17, 3, 3, 3),
    )
    edge = functional.pad
    case(
        "reflected",
        lambda s, x: conv(edge(x, (1, 1, 1, 1), "reflect"), s.w, s.b),
        shapes((2, 5, 6, 7)),
        both,
        **weights,
    )
    case(
        "padded twice",
        lambda s, x: conv(edge(x, (1, 2, 1, 1), value=0.5), s.w, padding=1),
        shapes((2, 5, 6, 7)),
        both,
        w=(20, 5, 3, 3),
    )
    case(
        "of a join",
        lambda s, x, y: conv(torch.cat([x * 2, y], 1), s.w, padding=1),
        shapes((2, 5, 6, 7), (2, 4, 6, 7)),
        both,
        w=(20, 9, 3, 3),
    )
    case(
        "resized",
        lambda s, x: conv(functional.interpolate(x, scale_factor=2), s.w, padding=1),
        shapes((2, 5, 6, 7)),
        both,
        w=(20, 5, 3, 3),
    )
    case(
        "cropped residual",
        lambda s, x: conv(x, s.w) + x.exp()[:, :, 1:-1, 1:-1],
        shapes((2, 5, 6, 7)),
        both,
        1e-5,
        w=(5, 5, 3, 3),
    )
    case(
        "pixels shuffled",
        lambda s, x: functional.pixel_shuffle(conv(x, s.w), 2).relu(),
        shapes((2, 5, 6, 7)),
        both,
        1e-5,
        w=(16, 5, 3, 3),
    )
    case(
        "patches",
        lambda s, x: conv(x, s.w, s.b, stride=4).flatten(2).transpose(1, 2) + s.p,
        shapes((2, 3, 16, 16)),
        both,
        1e-5,
        w=(24, 3, 4, 4),
        b=(24,),
        p=(16, 24),
    )
    case(
        "half",
        dense,
        shapes((2, 5, 9, 8), dtype=FP16),
        [{}, {"packed": "b"}],
        2e-3,
        w=(20, 5, 3, 3, FP16),
        b=(20, FP16),
    )
    case(
        "half prologue",
        lambda s, x: conv(functional.silu(x), s.w, padding=1),
        shapes((2, 5, 9, 8), dtype=BF16),
        [{}],
        2e-2,
        w=(20, 5, 3, 3, BF16),
    )
    return found


QUICK = (
    "copied with a prologue",
    "padded, planes",
    "groups",
    "transposed, phases of different lengths",
    "reflected",
    "half",
)


def test_quick_cases_in_the_interpreter() -> None:
    check(cases(), rows(__file__, "interpret", *QUICK))


@pytest.mark.slow
def test_other_cases_in_the_interpreter() -> None:
    check(cases(), rows(__file__, "interpret", *[name for name in cases() if name not in QUICK]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(cases()))
def test_case_on_the_gpu(name: str) -> None:
    for number, changes in enumerate(cases()[name].schedules):
        found = measured(cases()[name], number, changes, "cuda")
        limit = max(found["limit"], 4e-3 if changes.get("precision") == "tf32" else 0.0)
        assert found["error"] <= limit, (changes, found)


def infinite() -> None:
    """Print where results are finite, of an input with an infinity."""
    case = cases()["copied, transposed, odd"]
    for number, changes in enumerate(case.schedules):
        infinities(case, number, changes, (1, 1))


def test_an_infinity_meets_only_its_own_weights() -> None:
    found = rows_of(__file__, "infinite")
    assert [row["same"] for row in found] == [True] * 3, found
    assert all(row["infinite"] for row in found)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("padded", {"precision": "tf32", "packed": "b"}),
        ("prologue", {}),
        ("channels last", {"splits": 2}),
        ("transposed, phases of different lengths", {}),
        ("copied with a prologue", {"staged": True, "precision": "tf32", "packed": "b"}),
    ],
)
def test_what_is_printed(name: str, changes: dict[str, Any], golden: Callable[[str, str], None]) -> None:
    implementation = printed(cases()[name], 0, changes)[-1]
    golden(f"convolution_{name.replace(',', '').replace(' ', '_')}.txt", implementation.source)


def test_what_the_plan_says_of_windows() -> None:
    plan = cases()["padded"].planned[2]
    assert (plan.shape, plan.packable) == ((1, 144, 20, 45), "b")
    assert (plan.a.k_major, plan.a.computed, plan.a.repeats) == (False, True, 9.0)
    last = cases()["channels last"].planned[2]
    assert last.a.k_major and last.a.aligned
    assert last.nest.axes.size(last.k[-1]) == 8, "channels innermost, where memory runs along them"
    one = cases()["one by one"].planned[2]
    assert not one.a.computed and one.a.repeats == 1


def test_quick_cases_cross_compile() -> None:
    check(cases(), rows(__file__, "compile", "padded, planes", "transposed, phases of different lengths"))


def test_tf32_is_legal_where_eager_takes_it() -> None:
    precision, h200 = moves()["precision"], device_named("h200")
    plan = cases()["padded"].planned[2]
    precision.check(plan, GemmSchedule(), "tf32", h200, "default")
    with pytest.raises(IllegalAction, match="keeps 11 bits"):
        precision.check(plan, GemmSchedule(), "tf32", h200, "highest")
    _, _, linear = planned(lambda: Call(lambda s, x: functional.linear(x, s.w), w=(36, 50)), shapes((40, 50)))
    with pytest.raises(IllegalAction, match="keeps 11 bits"):
        precision.check(linear, GemmSchedule(), "tf32", h200, "default")


def test_lowering_tries_tf32_of_a_copy_and_of_the_tensor() -> None:
    family, h200 = Gemm(), device_named("h200")
    planes = {"fp16x3", "bf16x6"}
    for name, staged, exactly, allowed in (
        ("copied", {True, False}, planes, planes | {"tf32"}),
        ("groups", {False}, {"fp16x3"}, {"bf16x6", "tf32"}),
    ):
        plan = cases()[name].planned[2]
        start = family.default(plan, h200, "default")
        found = family.guesses(plan, start, h200, "default")
        assert start.precision == "ieee" and {s.precision for s in found} == allowed
        assert {s.staged for s in found} == staged
        exact = family.guesses(plan, start, h200, "highest")
        assert {s.precision for s in exact} == exactly and {s.staged for s in exact} == staged
        in_loop = [s.inline == "a" for s in exact if s.precision == "bf16x6"]
        assert in_loop == sorted(in_loop, reverse=True), "three planes of a copy were slower on an H200"
        assert all(s.staged for s in exact if s.inline != "a"), "windows are never packed one by one"


def test_lowering_tries_the_precision_of_fp32_last_where_eager_may_take_tf32() -> None:
    family, h200 = Gemm(), device_named("h200")
    plan = cases()["one by one"].planned[2]
    start = family.default(plan, h200, "default")
    found = {mode: [s.precision for s in family.guesses(plan, start, h200, mode)] for mode in ("default", "high")}
    assert found["default"][0] == "fp16" and found["default"][-1] == "fp16x3", "cuDNN may compute in fp32"
    assert "fp16x3" not in found["high"], "every product takes TF32"
    assert family.unmeasured(plan, h200, "default").precision == "fp16"
    assert family.unmeasured(plan, h200, "highest").precision == "fp16x3"


def test_phases_are_written_side_by_side() -> None:
    assert cases()["transposed, phases"].planned[2].interleaved
    assert not cases()["groups"].planned[2].interleaved and not cases()["padded"].planned[2].interleaved


def test_tf32_is_not_tried_again_where_it_was_refused() -> None:
    _, region, plan = cases()["padded"].planned
    family, h200 = Gemm(), device_named("h200")
    lowered = GemmSchedule(precision="tf32")
    assert ("precision", "tf32") in family.intents(region, None, h200, "default")
    for schedule in (lowered.but(precision="bf16x6"), lowered.but(precision="ieee")):
        offered = ("precision", "tf32") in family.intents(region, schedule, h200, "default")
        assert offered == (schedule.precision == "ieee")
    assert "bf16x6" in {s.precision for s in family.guesses(plan, GemmSchedule(), h200, "default")}


def test_layout_says_why_windows_are_not_packed() -> None:
    layout, h200 = moves()["layout"], device_named("h200")
    assert stageable(cases()["copied"].planned[2]) is None
    assert "3 neighbouring elements" in stageable(cases()["groups"].planned[2])
    assert "one element" in stageable(cases()["one by one"].planned[2])
    _, _, plan = planned(lambda: Call(lambda s, x, w: conv(x, w)), shapes((2, 1, 9, 8), (20, 1, 2, 2)))
    with pytest.raises(IllegalAction, match="2 neighbouring elements"):
        layout.check(plan, GemmSchedule(), "pack", h200, "default")
    (packed,) = layout.schedules(cases()["copied"].planned[2], GemmSchedule(), "pack", h200)
    assert packed.staged and packed.packed == "b"
    (back,) = layout.schedules(cases()["copied"].planned[2], packed, "unpack", h200)
    assert back == GemmSchedule()


@pytest.mark.slow
def test_other_cases_cross_compile() -> None:
    """Every second one, for time's sake; the interpreter and a GPU run all of them."""
    check(cases(), rows(__file__, "compile", *[name for name in cases() if name not in QUICK][::2]))


if __name__ == "__main__":
    as_script(cases(), infinite)
