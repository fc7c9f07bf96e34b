"""Advice: each sentence appears where its measurement calls for it, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from qimeng.coder.llm.advice import advise, occupancy, warps_of
from qimeng.device import DEVICES
from qimeng.graph.capture import capture
from qimeng.graph.region import Region
from qimeng.interfaces import Evaluation, Gate, Resources, Timing
from qimeng.program.program import Implementation, Program

H200 = DEVICES["h200"]
MATMUL = Implementation("triton", "tl.dot(a, b); k[(1,)](num_warps=8)", "k")
ROWS = Implementation("triton", "k[(1,)](num_warps=4)", "k")


def one_region(module: type[torch.nn.Module], *shapes: tuple[int, ...]) -> Region:
    return Program.start(capture(module, lambda: tuple(torch.empty(s) for s in shapes))).regions[0]


class Product(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture(scope="module")
def product() -> Region:
    return one_region(Product, (4096, 4096), (4096, 4096))


@pytest.fixture(scope="module")
def double() -> Region:
    return one_region(Double, (8192, 8192))


def measured(region: Region, ms: float, resources: Resources | None = None, estimated: bool = False) -> Evaluation:
    timing = Timing(ms, calls=20, estimated=estimated)
    return Evaluation(Gate.PASSED, timing=timing, resources=resources, region_ms={region.id: ms, "other": ms})


def test_nothing_measured_nothing_said(double: Region) -> None:
    assert advise(None, double, ROWS, H200) == ()
    assert advise(Evaluation(Gate.PASSED), double, ROWS, H200) == ()


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (0.115, "97 % of the memory bandwidth: nothing but moving fewer bytes"),
        (0.2, "56 % of the memory bandwidth: wider loads"),
        (1.0, "only 11 % of the memory bandwidth"),
        (0.004, "4.0 microseconds, no more than a launch costs"),
    ],
)
def test_share_of_the_bandwidth(double: Region, ms: float, words: str) -> None:
    found = advise(measured(double, ms), double, ROWS, H200)
    assert found[0] == "The region takes 50 % of the program's time."
    assert len(found) == 2 and words in found[1]


def test_estimates_say_so(double: Region) -> None:
    assert advise(measured(double, 1.0, estimated=True), double, ROWS, H200)[0].startswith("By an estimate")


def test_products(product: Region) -> None:
    slow = advise(measured(product, 10.0), product, MATMUL, H200)
    assert any("products run at 21 % of the peak rate: larger tiles" in a for a in slow)
    assert any("little is left" in a for a in advise(measured(product, 2.5), product, MATMUL, H200))
    assert any("does not use tl.dot" in a for a in advise(None, product, ROWS, H200))
    assert not any("tl.dot" in a for a in slow)


def test_registers_and_occupancy(double: Region) -> None:
    spilling = advise(measured(double, 1.0, Resources(255, 128, 0, 1)), double, ROWS, H200)
    assert any("spills 128 B" in a for a in spilling)
    full = advise(measured(double, 1.0, Resources(240, 0, 0, 1)), double, ROWS, H200)
    assert any("240 of 255 registers" in a for a in full)
    shared = advise(measured(double, 1.0, Resources(32, 0, 200_000, 1)), double, ROWS, H200)
    assert any("6 % of an SM's warps can be resident, limited by shared memory: fewer stages" in a for a in shared)
    assert len(advise(measured(double, 1.0, Resources(32, 0, 0, 1)), double, ROWS, H200)) == 2


def test_occupancy_is_the_tightest_limit() -> None:
    assert occupancy(Resources(None, None, 0, 1), 4, H200) is None
    assert occupancy(Resources(32, 0, 0, 1), 4, H200) == (100, "registers")
    assert occupancy(Resources(128, 0, 0, 1), 8, H200) == (25, "registers")
    assert warps_of("k[g](x)") == 4 and warps_of("num_warps=2, num_warps = 16") == 16
