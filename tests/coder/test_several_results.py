"""Regions whose results lie along different axes: one kernel computes and stores them all.

The interpreter must be chosen before triton is imported, so that the cases run in one process of their own (this file
as a script), which prints a JSON row a case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.graph.region import Region, merge
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.interpreted import rows_of

torch.manual_seed(0)
X, Y, W = torch.randn(32, 64), torch.randn(64), torch.randn(64, 16)
IMAGES = torch.randn(2, 4, 6, 6)


def product_with(*dims: int) -> Callable[..., Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return y, *(y.sum(dim) for dim in dims)

    return function


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = {
    "a vector and a matrix": (lambda x, y: (y.relu(), x + y.relu()), (X, Y), "tile"),
    "a matrix and its transpose": (lambda x: (x * 2, (x + 1).t().contiguous()), (X,), "tile"),
    "rows and their sums": (lambda x: (x * 2, x.sum(1)), (X,), "tile"),
    "columns and their sums": (lambda x: (x * 2, x.sum(0)), (X,), "tile"),
    "weights and the logarithm of their sum": (lambda x: (x.softmax(1), x.logsumexp(1)), (X,), "tile"),
    "centred images and their means": (
        lambda x: (x - x.mean((2, 3), keepdim=True), x.mean((2, 3))),
        (IMAGES,),
        "tile",
    ),
    "the largest and where they are": (lambda x: x.max(1), (X,), "tile"),
    "a product and the sums of its rows": (product_with(1), (X, W), "gemm"),
    "a product and the sums of its columns": (product_with(0), (X, W), "gemm"),
    "running sums and the whole ones": (lambda x: (x.cumsum(1), x.sum(1)), (X,), "scan"),
}
"""Function, inputs and the family that prints the kernel."""

REFUSED = {
    "sums of rows and of columns": (lambda x: (x.sum(0), x.sum(1)), (X,), "reductions over different axes"),
    "a product, sums of its rows and of its columns": (product_with(0, 1), (X, W), "not over all rows or all columns"),
}
"""What stays in several kernels: function, inputs and words of the reason."""


def whole(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> tuple[Program, Region]:
    """The program as one region."""
    program = Program.start(capture_spec(KernelSpec.from_function(function, inputs), verify=False))
    if len(program.called) > 1:
        program = program.with_regions(merge(program.regions, [r.id for r in program.called]))
    (region,) = program.called
    return program, region


def lowered(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Program:
    """The program as one generated kernel."""
    program, region = whole(function, inputs)
    request = Request(program, Action("lowering", (region.id,)), device_named("h200"), "highest")
    return TemplateCoder().write(request).apply(program, 0)


def main() -> None:
    """Print a row a case: the family, and for each result the largest error over the largest value."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    torch.set_num_threads(1)
    for name, (function, inputs, _) in CASES.items():
        program = lowered(function, inputs)
        schedule = program.implementation(program.called[0]).schedule
        with torch.no_grad():
            found, expected = program.load().Model()(*inputs), function(*(x.double() for x in inputs))
        errors = [
            float((y.double() - r.double()).abs().max() / r.double().abs().max())
            for y, r in zip(found, expected, strict=True)
        ]
        alike = all(y.shape == r.shape and y.stride() == r.stride() for y, r in zip(found, expected, strict=True))
        family = schedule.family if schedule is not None else ""
        print(json.dumps({"case": name, "family": family, "errors": errors, "alike": alike}), flush=True)


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in once("several_results", lambda: rows_of(__file__))}


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_stores_results_of_several_axes(rows: dict[str, dict[str, Any]], case: str) -> None:
    row = rows[case]
    assert row["family"] == CASES[case][2] and len(row["errors"]) == 2
    assert row["alike"] and max(row["errors"]) < 1e-5, row


@pytest.mark.parametrize("case", REFUSED)
def test_sums_along_both_axes_stay_apart(case: str) -> None:
    function, inputs, words = REFUSED[case]
    _, region = whole(function, inputs)
    assert words in (TemplateCoder().can_implement(region) or "")


if __name__ == "__main__":
    main()
