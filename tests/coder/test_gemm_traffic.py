"""What lowering tries where operands are unaligned, or where reading them binds the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from qimeng.actions import kind_named
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.gemm.plan import GemmPlan, plan_gemm
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.sweeps import (
    BIAS_OF_512,
    VERY_LONG_SHARE,
    budget,
    default_schedule,
    guesses,
    promotion,
    shared_bytes,
)
from qimeng.coder.template.families.gemm.traffic import inline_sides, never_copied, packed_sides
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import family_of, refusal
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.spec.origin import FunctionModule

H200 = DEVICES["h200"]
FP32, BF16 = torch.float32, torch.bfloat16


Function = Callable[[torch.Tensor], torch.Tensor]


class Product(torch.nn.Module):
    """x @ y, or x @ w.T where there is a weight; `before` is done to x first."""

    def __init__(self, weight: tuple[int, int] | None, dtype: torch.dtype, before: Function):
        super().__init__()
        self.before = before
        self.w = None if weight is None else torch.nn.Parameter(torch.empty(weight, dtype=dtype))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.before(x)
        return torch.nn.functional.linear(x, self.w) if y is None else x @ y


def found(
    *shapes: tuple[int, ...],
    dtype: torch.dtype = FP32,
    weight: tuple[int, int] | None = None,
    before: Function = lambda x: x,
) -> GemmPlan:
    with torch.device("meta"):
        made = tuple(torch.empty(s, dtype=dtype) for s in shapes)
        graph = capture(lambda: Product(weight, dtype, before), lambda: made)
    return plan_gemm(make_region(graph, [n.name for n in graph.ops()]))


def tried(of: GemmPlan, mode: str = "default") -> list[GemmSchedule]:
    """What lowering tries beside the plain schedule, all of which fits the device."""
    schedules = guesses(of, default_schedule(of, H200, mode), H200, mode)
    assert all(refusal(family_of(s), of, s, H200) is None for s in schedules)
    assert len(schedules) < 8
    return schedules


def test_half_operands_are_packed_only_where_rows_are_not_aligned() -> None:
    assert {s.packed for s in tried(found((1000, 2949), (2949, 3001), dtype=BF16))} == {"ab"}
    assert {s.packed for s in tried(found((1000, 2952), (2952, 3001), dtype=BF16))} == {"b"}
    assert {s.packed for s in tried(found((1000, 2952), (2952, 3008), dtype=BF16))} == {""}
    assert {s.packed for s in tried(found((1000, 2949), dtype=BF16, weight=(3008, 2949)))} == {"ab"}


def test_half_operands_that_are_computed_are_computed_once() -> None:
    gate = found((4096, 1024), dtype=BF16, weight=(4096, 1024), before=torch.nn.functional.gelu)
    assert {s.packed for s in tried(gate)} == {"a"}


def test_joined_operands_are_no_windows() -> None:
    halves = found(
        (512, 8192), weight=(8192, 8192), before=lambda x: torch.cat((torch.tanh(x[:, :4096]), x[:, 4096:]), 1)
    )
    assert never_copied(halves) == "" and {s.inline for s in tried(halves)} == {""}


def test_half_products_start_from_large_tiles_as_well() -> None:
    schedules = tried(found((4096, 4096), (4096, 4096), dtype=BF16))
    assert {(s.block_m, s.block_n, s.stages) for s in schedules} >= {(128, 256, 4), (256, 128, 4)}


def test_the_action_packs_what_is_unaligned() -> None:
    half = found((1000, 2949), (2949, 3008), dtype=BF16)
    assert half.packable == "a"
    (schedule,) = kind_named("layout").rewrite(default_schedule(half, H200, "default"), half, H200, "pack")
    assert schedule.packed == "a"


@pytest.mark.parametrize(("mode", "other"), [("default", "bf16x3"), ("high", "tf32")])
def test_where_reading_binds_the_main_loop_splits_what_it_reads(mode: str, other: str) -> None:
    schedules = tried(found((256, 500000), (500000, 256)), mode)
    assert {s.precision for s in schedules} == {other, "fp16x3" if mode == "default" else "fp16"}
    assert any(s.inline == "ab" for s in schedules) and any(not s.inline for s in schedules if s.precision != other)
    for s in schedules:
        assert s.splits * -(-256 // s.block_m) * -(-256 // s.block_n) >= H200.sms
        depth = -(-500000 // s.splits)
        assert not s.inline or s.promote == 0 or depth <= s.promote, "no second accumulator"


@pytest.mark.parametrize("depth", [65536, 131072, 500000, 524288])
def test_the_bias_of_very_long_sums_takes_a_part_of_their_budget(depth: int) -> None:
    plan = found((256, depth), (depth, 256))
    for cat, most in ((False, VERY_LONG_SHARE), (True, 2 * VERY_LONG_SHARE)):
        every = promotion(plan, GemmSchedule(precision="fp16x3", cat=cat))
        assert 0 < every * BIAS_OF_512 / 512 <= most * budget(plan)


def test_planes_of_short_windows_are_tried_with_less_bias_as_well() -> None:
    with torch.device("meta"):
        made = torch.empty(128, 8, 256, 256), torch.empty(64, 8, 3, 3)
        graph = capture(lambda: FunctionModule(functional.conv2d), lambda: made)
    plan = plan_gemm(make_region(graph, [n.name for n in graph.ops()]))
    schedules = guesses(plan, default_schedule(plan, H200, "default"), H200, "default")
    first, *_, last = [s for s in schedules if s.precision in ("bf16x6", "fp16x3")]
    assert last == first.but(promote=32) and last.numerics != first.numerics
    assert all(s.promote != 32 for s in tried(found((4096, 72), (72, 64))))


def test_where_arithmetic_binds_planes_are_packed() -> None:
    for mode in ("default", "high"):
        schedules = tried(found((4096, 4096), (4096, 4096)), mode)
        assert not any(s.inline for s in schedules) and len({s.precision for s in schedules}) == 1


def test_what_binds_follows_from_the_device() -> None:
    deep = found((256, 500000), (500000, 256))
    assert inline_sides(deep, H200, "fp16x3") == "ab"
    assert inline_sides(deep, replace(H200, bandwidth_gbs=50000.0), "fp16x3") == ""
    assert inline_sides(found((16, 512), (512, 16)), H200, "fp16x3") == "", "lost among launches"


def test_three_bf16_products_are_tried_only_at_depths_that_forgive_them() -> None:
    assert "bf16x3" not in {s.precision for s in tried(found((256, 32768), (32768, 256)))}


def test_small_operands_are_packed_for_tf32() -> None:
    tall = found((65536, 2048), (2048, 768))
    assert packed_sides(tall, "", "tf32") == "b" and packed_sides(tall, "", "ieee") == ""
    assert inline_sides(tall, H200, "tf32") == "a" and inline_sides(tall, H200, "fp16") == ""


@pytest.fixture(scope="module")
def compilers() -> Compilers:
    return Compilers(shared_server(), H200)


@pytest.mark.slow
def test_kernels_that_read_once_hold_all_in_registers(compilers: Compilers) -> None:
    """Of TF32 two blocks fit a multiprocessor; sums of small products and scales take the registers of the second."""
    of = found((256, 500000), (500000, 256))
    coder = TemplateCoder()
    chosen = [s for mode in ("default", "high") for s in tried(of, mode) if (s.block_m, s.block_n) == (128, 128)]
    assert {s.precision for s in chosen} == {"fp16x3", "bf16x3", "fp16", "tf32"}
    chosen = [s for s in chosen if s.inline or s.precision == "tf32"]
    jobs = [job_of(of.region, coder.print(of.region, s)) for s in chosen]
    for schedule, compiled in zip(chosen, compilers.compile(jobs), strict=True):
        assert compiled.error is None, schedule
        main = next(k for k in compiled.kernels if k.name.endswith("_product"))
        assert main.warpgroup and not main.spills and main.registers is not None, schedule
        if schedule.precision == "tf32":
            assert 2 * main.registers * main.threads <= H200.registers_per_sm, schedule
            assert 2 * (main.shared_bytes + 1024) <= H200.shared_per_sm, schedule
        assert main.shared_bytes == pytest.approx(shared_bytes(of, schedule), rel=0.01)


@pytest.mark.parametrize(
    ("channels", "tried"), [(8, {"ieee", "tf32", "bf16x6", "fp16x3"}), (128, {"ieee", "tf32", "fp16", "fp16x3"})]
)
def test_convolutions_are_tried_in_full_precision_too(channels: int, tried: set[str]) -> None:
    shapes = ((8, channels, 128, 128), (64, channels, 3, 3))
    graph = capture(lambda: FunctionModule(torch.nn.functional.conv2d), lambda: tuple(torch.empty(s) for s in shapes))
    plan = plan_gemm(make_region(graph, [n.name for n in graph.ops()]))
    start = default_schedule(plan, H200, "default")
    assert {s.precision for s in (start, *guesses(plan, start, H200, "default"))} == tried
