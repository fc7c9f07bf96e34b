"""Sorts of rows: what is covered and refused, what is printed, and values in the interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import uncovered
from qimeng.program.program import Program
from tests.interpreted import rows_of
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, start_of


class Call(nn.Module):
    """A function of the rows."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def lowered(function: Callable[[Tensor], Any], x: Tensor) -> Program:
    program = start_of(KernelSpec.from_module(Call(function), (x,)))
    return after(program, action_of(program, "lowering"))


def sort(x: Tensor) -> Any:
    return tuple(torch.sort(x, dim=-1))


def test_the_printed_kernel(golden: Callable[[str, str], None]) -> None:
    program = lowered(lambda x: tuple(torch.topk(x, 20)), torch.randn(40, 300))
    golden("sort.py.txt", program.implementation(program.called[0]).source)


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (sort, torch.randn(4, 5000), "rows of 5000 elements; a program holds 4096"),
        (sort, torch.randint(0, 9, (4, 50)), "64 bits"),
        (sort, torch.randn(50, 4).t(), "side by side"),
    ],
    ids=["long", "int64", "strided"],
)
def test_what_is_not_covered_says_why(function: Callable[[Tensor], Any], x: Tensor, reason: str) -> None:
    (region,) = start_of(KernelSpec.from_module(Call(function), (x,))).called
    assert reason in str(uncovered(region))


def test_few_of_the_largest_are_left_to_the_family_tile() -> None:
    program = lowered(lambda x: tuple(torch.topk(x, 3)), torch.randn(40, 300))
    schedule = program.schedule(program.called[0])
    assert schedule is not None and schedule.family == "tile"


def test_tunings_keep_rows_whole_and_threads_busy() -> None:
    program = lowered(sort, torch.randn(400, 60))
    found = {str(a) for a in legal_actions(program, CONTEXT) if a.kind in ("tiling", "pipeline")}
    region = program.called[0].id
    assert {f"tiling taller {region}", f"pipeline warps {region}"} <= found


@pytest.mark.parametrize("length", [100, pytest.param(4096, marks=pytest.mark.slow)])
def test_it_compiles_without_spills(length: int, tmp_path: Path) -> None:
    program = lowered(sort, torch.randn(64, length))
    (region,) = program.called
    job = job_of(region, program.implementation(region))
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job])
    assert found.error is None and [k.spills for k in found.kernels] == [0]


# -- values, in a process of its own where Triton interprets


def odd(*shape: int) -> Tensor:
    """Numbers of which many are equal, with infinities, both zeros and NaN."""
    torch.manual_seed(0)
    x = torch.randint(-3, 4, shape).float() / 2
    x.view(-1)[::7], x.view(-1)[3::11], x.view(-1)[5::13], x.view(-1)[1::9] = -0.0, float("inf"), -float("inf"), nan
    return x


nan = float("nan")


CASES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "sort": (sort, torch.randn(3, 70)),
    "descending": (lambda x: tuple(torch.sort(x, dim=-1, descending=True)), torch.randn(9, 64)),
    "stable": (lambda x: tuple(torch.sort(x, stable=True, dim=-1)), odd(3, 70)),
    "stable, descending": (lambda x: tuple(torch.sort(x, stable=True, dim=-1, descending=True)), odd(3, 70)),
    "columns": (lambda x: tuple(torch.sort(x, stable=True, dim=1)), odd(3, 40, 5)),
    "places": (lambda x: torch.argsort(x, dim=-1, stable=True), odd(9, 33)),
    "values": (lambda x: torch.sort(x, dim=0).values, odd(50, 6)),
    "largest": (lambda x: tuple(torch.topk(x, 9)), torch.randn(3, 70)),
    "smallest": (lambda x: tuple(torch.topk(x, 20, largest=False)), torch.randn(3, 70)),
    "halves": (lambda x: tuple(torch.sort(x, stable=True, dim=-1)), odd(3, 70).half()),
    "bytes": (lambda x: tuple(torch.sort(x, stable=True, dim=-1)), torch.arange(140).view(2, 70).to(torch.uint8) * 7),
    "int32": (lambda x: tuple(torch.topk(x, 6)), torch.randperm(140).view(2, 70).to(torch.int32) - 70),
    "one element": (sort, torch.randn(7, 1)),
}
QUICK = ["stable, descending", "columns", "largest", "int32"]


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Whether values, their signs and places are those of PyTorch."""
    function, x = CASES[name]
    program = lowered(function, x)
    assert program.schedule(program.called[0]).family == "sort"  # type: ignore[union-attr]
    model, wanted = program.load().Model(), function(x)
    pairs = zip(*((y,) if isinstance(y, Tensor) else y for y in (model(x), wanted)), strict=True)
    for found, y in pairs:
        same = torch.equal(found.nan_to_num(9.0), y.nan_to_num(9.0)) and found.stride() == y.stride()
        if y.is_floating_point() and "stable" in name:
            same &= torch.equal(found.signbit(), y.signbit())
        yield {"case": name, "same": same and found.dtype is y.dtype}


def check(names: list[str]) -> None:
    found = rows_of("-m", "tests.vocabulary.irregular.test_sort", *names)
    assert {row["case"] for row in found} == set(names)
    assert all(row["same"] for row in found), found


def test_quick_values() -> None:
    check(QUICK)


@pytest.mark.slow
def test_other_values() -> None:
    check([name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    from qimeng.envs.estimate.interpreter import mend

    mend()
    for one in sys.argv[1:]:
        for row in rows(one):
            print(json.dumps(row), flush=True)
