"""Whole computations as one kernel each, at values where a fused kernel could give another result than PyTorch.

The interpreter must be chosen before triton is imported, so that the cases run in one process of their own (this file
as a script), which prints a JSON row a case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.graph.region import merge
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.interpreted import rows_of

LARGE = torch.tensor([88.5, 89.0, 89.2, -89.3, 3.0, 0.1, -0.0, 20.0])
ROWS = torch.linspace(-3, 3, 32).view(4, 8)

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "sinh near overflow": (torch.sinh, (LARGE,)),
    "cosh near overflow": (torch.cosh, (LARGE,)),
    "half in the middle": (lambda x: (x.half() * 3).float() + x, (ROWS,)),
    "half chain": (lambda x: ((x.half() * 3 + 0.1) * 0.7).float(), (ROWS,)),
    "half constant": (lambda x: x + torch.arange(8, dtype=torch.float16) / 3, (ROWS,)),
    "signs of numbers": (
        lambda x: torch.copysign(x, torch.full_like(x, -2.0)) + torch.round(torch.full_like(x, 0.3)),
        (ROWS,),
    ),
    "rest of a quotient": (
        lambda x, w: (x * w / w) % 1.0,
        (torch.round(ROWS * 100), torch.arange(3.0, 31.0, 7)[:, None]),
    ),
    "deviation of large numbers, by several programs": (
        lambda x: x.std(0),
        (torch.arange(455.0).mul(0.618034).remainder(1).view(65, 7) * 4 + 1e6,),
    ),
    "bfloat16 sum in the middle": (lambda x: (x.bfloat16() * 0.1).exp().float().sum(-1), (ROWS,)),
}
"""Function and inputs."""


def ends_replaced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Reads whether a fixed position is one of those replaced."""
    y = x.slice_scatter(x[..., 5:6], -1, 0, 1)
    return torch.nn.functional.conv1d(y.slice_scatter(y[..., 1:2], -1, 7, 8), w)


def spread_out(x: torch.Tensor, places: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Places in a tensor, read where a window of a transposed convolution has an element."""
    return torch.nn.functional.conv_transpose1d(x.index_select(2, places), w, stride=2)


KERNELS = torch.linspace(-1, 1, 20).view(2, 5, 2)
CASES["ends replaced before a convolution"] = (ends_replaced, (ROWS.view(2, 2, 8), KERNELS.transpose(0, 1)))
CASES["gathered before a transposed convolution"] = (
    spread_out,
    (ROWS[:2, :6].view(1, 2, 6), torch.tensor([5, 0, 1, 2, 3, 4]), KERNELS),
)


def fused(spec: KernelSpec) -> Program:
    """The program with as few regions as the coder can have, each generated where it can be."""
    device, coder = device_named("h200"), TemplateCoder()
    program, more = Program.start(capture_spec(spec)), True
    while more:
        legal = (a for a in legal_actions(program, Context(device, coder)) if a.kind == "fusion")
        more = next(legal, None)
        program = coder.write(Request(program, more, device)).apply(program, 0) if more else program
    for region in program.regions:
        if coder.can_implement(region) is None and not program.implementation(region).generated:
            program = coder.write(Request(program, Action("lowering", (region.id,)), device)).apply(program, 0)
    return program


def overwritten(x: torch.Tensor) -> torch.Tensor:
    """Reads the position of a row that is a number."""
    y = x.exp()
    y[..., -1] = 0.5
    y[0] += 1
    return y


CASES["overwritten in part"] = (overwritten, (ROWS,))

APART = ("half in the middle", "half chain")
"""Cases that are also run with every number of their operators in a first region."""


def in_two(spec: KernelSpec, first: int) -> Program:
    """The program with its first operators in one generated region and the others in another."""
    device, coder = device_named("h200"), TemplateCoder()
    program = Program.start(capture_spec(spec))
    names = [r.id for r in program.regions]
    regions = program.regions
    for ids in (names[:first], names[first:]):
        regions = merge(regions, ids) if len(ids) > 1 else regions
    program = program.with_regions(regions)
    for region in program.regions:
        program = coder.write(Request(program, Action("lowering", (region.id,)), device)).apply(program, 0)
    return program


def exactly(x: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers in float64."""
    return x.double() if x.is_floating_point() else x


def test_what_a_product_gathers_by_is_read_within_its_tensor() -> None:
    spec = KernelSpec.from_function(lambda x, i, w: x[i] @ w, (ROWS, torch.tensor([2, 0, 1]), ROWS.T.contiguous()))
    loads = [line for line in fused(spec).source.splitlines() if "= tl.load(x1_ptr" in line]
    assert loads and all("mask=" in line for line in loads), loads


def programs() -> Iterator[tuple[str, str, Program]]:
    """Name of a row, case and program."""
    for name, (function, inputs) in CASES.items():
        spec = KernelSpec.from_function(function, inputs)
        yield name, name, fused(spec)
        if name in APART:
            for first in range(1, len(Program.start(capture_spec(spec, verify=False)).regions)):
                yield f"{name}, {first} apart", name, in_two(spec, first)


def main() -> None:
    """Print a row a program: how many regions, and the largest relative error against float64."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    torch.set_num_threads(1)
    for row, case, program in programs():
        function, inputs = CASES[case]
        with torch.no_grad():
            y, r = program.load().Model()(*inputs), function(*map(exactly, inputs))
        error = ((y.double() - r).abs() / r.abs().clamp(min=1e-30)).max().item()
        print(json.dumps({"case": row, "regions": len(program.regions), "error": error}), flush=True)


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in once("fused_values", lambda: rows_of(__file__))}


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_gives_what_pytorch_gives(rows: dict[str, dict[str, Any]], case: str) -> None:
    assert rows[case]["regions"] == 1 and rows[case]["error"] < 4e-6, rows[case]


def test_roundings_to_half_types_do_not_depend_on_regions(rows: dict[str, dict[str, Any]]) -> None:
    apart = {name: row for name, row in rows.items() if "apart" in name}
    assert len(apart) == 7 and all(row["regions"] == 2 for row in apart.values())
    assert max(row["error"] for row in apart.values()) < 4e-6, apart


def test_float8_is_written_and_read() -> None:
    spec = KernelSpec.from_function(lambda x: x.to(torch.float8_e4m3fn).float() * 2, (ROWS,))
    regions = Program.start(capture_spec(spec)).regions
    assert [TemplateCoder().can_implement(r) for r in regions] == [None, None, None]


def test_dimensions_of_what_has_none_are_left_to_pytorch() -> None:
    spec = KernelSpec.from_function(lambda x, i: x.gather(0, i) * 2, (torch.tensor(2.0), torch.tensor(0)))
    regions = {r.label(): r for r in Program.start(capture_spec(spec)).regions}
    assert "a tensor that has none" in (TemplateCoder().can_implement(regions["gather"]) or "")


if __name__ == "__main__":
    main()
