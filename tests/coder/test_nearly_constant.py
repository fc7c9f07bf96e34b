"""Normalizations of numbers that hardly differ: their mean is off by little more than its own rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.triton.accumulate import corrected
from qimeng.device import device_named
from qimeng.family import covering
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.program.program import load_source
from qimeng.spec.origin import FunctionModule
from tests.coder.test_shared_rows import HEADER

CASES = {
    "rows in registers": (lambda x: functional.layer_norm(x, (3000,), eps=1e-12), (64, 3000)),
    "long rows": (lambda x: functional.layer_norm(x, (300_000,), eps=1e-12), (8, 300_000)),
    "groups of planes": (lambda x: functional.group_norm(x, 4, eps=1e-12), (4, 16, 254, 254)),
}
DEVIATION = 2.0**-13


def nearly_constant(shape: tuple[int, ...]) -> Tensor:
    """A constant a row plus two values around it."""
    constant = torch.rand(shape[0], *[1] * (len(shape) - 1)) + 0.5
    return constant + DEVIATION * torch.randint(0, 2, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_mean_is_off_by_little_more_than_its_rounding(case: str) -> None:
    function, shape = CASES[case]
    graph = capture(lambda: FunctionModule(function), lambda: (torch.empty(shape),))
    region = make_region(graph, [n.name for n in graph.ops()])
    family, plan = covering(region)
    made = TemplateCoder().print(region, family.default(plan, device_named("h200"), "default"))
    call = getattr(load_source(HEADER + made.source, f"constant_{len(shape)}_{shape[-1]}"), made.entry)
    torch.manual_seed(0)
    x = nearly_constant(shape)
    (found,) = call(x.cuda())
    off = (found.cpu().double() - function(x.double())).abs().max() * DEVIATION / 2
    assert off < 1.5 * torch.finfo(torch.float32).eps, off


def corrected_parts(x: Tensor, off: float) -> tuple[Tensor, Tensor]:
    """Mean and sum of squares of `x` after the correction of a mean that is off."""
    names = {"s_count": torch.tensor(float(len(x))), "s_mean": x.mean() + off}
    names["s_d"] = x - names["s_mean"]
    names["s_m2"] = (names["s_d"] ** 2).sum()
    triton = type("tl", (), {"sum": torch.sum, "abs": torch.abs, "where": torch.where})
    triton.maximum = lambda a, b: torch.clamp(a, min=b)
    exec("\n".join(corrected("s", "tl.sum(s_d)")), {"tl": triton}, names)
    return names["s_mean"], names["s_m2"]


def test_what_the_correction_does_to_a_mean_that_is_off() -> None:
    x = torch.tensor([0.7, 0.7, 0.7, 0.7001])
    mean, m2 = corrected_parts(x, 1e-6)
    assert abs(mean.double() - x.double().mean()) < 6e-8
    assert m2.double() == pytest.approx(((x.double() - x.double().mean()) ** 2).sum().item(), rel=1e-2)


@pytest.mark.parametrize("largest", [-3.39e38, 4e19, float("inf"), float("nan")])
def test_squares_that_overflow_stay_infinite(largest: float) -> None:
    x = torch.tensor([largest, 1.0, 2.0, 3.0])
    mean, m2 = corrected_parts(x, 1e30 if abs(largest) > 1e30 else 0.0)
    assert not m2.isfinite() and (mean.isfinite() or not x.isfinite().all())
