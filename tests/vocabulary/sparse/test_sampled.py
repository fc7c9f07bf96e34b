"""Products under masks that buffers hold: what is found and refused, and values in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
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
from qimeng.family import covering
from qimeng.interfaces import Request
from qimeng.program.program import Program
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, start_of
from tests.vocabulary.sparse.changed_masks import check, row_of, run

SLOW = pytest.mark.slow
ROWS, COLUMNS, DEPTH = 150, 100, 70


def wanted(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """A corner, a few single elements, and one column."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[:20, :10] = True
    mask[140, 70] = mask[70, 3] = True
    return mask


class Product(nn.Module):
    """A product under a mask, written in one of several ways."""

    def __init__(self, form: str):
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.register_buffer("mask", wanted())
        if form in ("all", "none"):
            self.get_buffer("mask").fill_(form == "all")
        self.register_buffer("factor", wanted() * torch.randn(ROWS, COLUMNS))
        self.linear = nn.Linear(DEPTH, COLUMNS)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        mask, factor = self.get_buffer("mask"), self.get_buffer("factor").to(x.dtype)
        if self.form == "factor":
            return (x @ y) * factor
        if self.form in ("where", "all", "none"):
            return torch.where(mask, torch.relu(x @ y), 0.0)
        if self.form == "filled":
            return (x @ y).masked_fill(~mask, -1e4) + 1
        if self.form == "bool":
            return x @ y * mask
        if self.form == "layer":
            return torch.tanh(self.linear(x)) * factor
        return torch.where(mask, torch.stack([x, x + 1]) @ y, 0.0)


FORMS = ("factor", "where", "filled", "bool", "layer", "batch")


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(ROWS, DEPTH).to(dtype), torch.randn(DEPTH, COLUMNS).to(dtype)


def lowered(form: str, dtype: torch.dtype = torch.float32) -> Program:
    program = start_of(KernelSpec.from_module(Product(form).to(dtype), inputs(dtype)))
    while (fusion := next((a for a in legal_actions(program, CONTEXT) if a.kind == "fusion"), None)) is not None:
        program = after(program, fusion)
    region = next(r for r in program.called if covering(r)[0].name in ("sampled", "gemm"))
    action = next(a for a in legal_actions(program, CONTEXT) if a.kind == "lowering" and a.regions == (region.id,))
    return after(program, action)


def product(program: Program) -> Any:
    return next(r for r in program.called if program.implementation(r).generated)


@pytest.mark.parametrize("form", FORMS)
def test_tiles_that_a_mask_in_a_buffer_leaves_empty_are_found_once(form: str) -> None:
    program = lowered(form)
    region = product(program)
    made = program.implementation(region)
    assert made.schedule is not None and made.schedule.family == "sampled" and made.prepare
    assert ("wild" in made.source) == (form in ("factor", "bool", "layer"))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x, y: (x @ y) * (x[:, :1] > 0),
        lambda self, x, y: (x @ y) + self.get_buffer("mask"),
        lambda self, x, y: torch.exp(x @ y) * self.get_buffer("factor"),
        lambda self, x, y: (x @ y * self.get_buffer("factor")).sum(-1),
    ],
    ids=["an input's", "added", "of what may overflow", "reduced"],
)
def test_other_products_are_left_to_the_gemm_family(function: Callable[..., Any]) -> None:
    class Other(Product):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return function(self, x, y)

    program = start_of(KernelSpec.from_module(Other(""), inputs()))
    while (fusion := next((a for a in legal_actions(program, CONTEXT) if a.kind == "fusion"), None)) is not None:
        program = after(program, fusion)
    assert {covering(region)[0].name for region in program.called} & {"gemm"}
    assert not any(covering(region)[0].name == "sampled" for region in program.called)


def test_lowering_measures_the_plain_product_beside_it() -> None:
    program = start_of(KernelSpec.from_module(Product("where").bfloat16(), inputs(torch.bfloat16)))
    while (fusion := next((a for a in legal_actions(program, CONTEXT) if a.kind == "fusion"), None)) is not None:
        program = after(program, fusion)
    patch = CONTEXT.coder.write(Request(program, action_of(program, "lowering"), CONTEXT.device))
    found = [made.schedule.family for made in patch.alternatives if made.schedule is not None]
    assert found[0] == "sampled" and "gemm" in found


def test_the_printed_kernels(golden: Callable[[str, str], None]) -> None:
    program = lowered("factor")
    golden("sampled.py.txt", program.implementation(product(program)).source)


def test_it_compiles_without_spills(tmp_path: Path) -> None:
    program = lowered("bool", torch.bfloat16)
    region = product(program)
    job = job_of(region, program.implementation(region))
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job])
    assert found.error is None and all(k.spills == 0 for k in found.kernels)


# -- values, in a process of its own where Triton interprets


CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "factor": ("factor", torch.float32, {"block_m": 32, "block_n": 32}),
    "not finite": ("factor", torch.float32, {"block_m": 32, "block_n": 32}),
    "where": ("where", torch.float32, {"block_m": 32, "block_n": 32}),
    "all": ("all", torch.float32, {"block_m": 64, "block_n": 64}),
    "none": ("none", torch.float32, {"block_m": 64, "block_n": 64}),
    "filled": ("filled", torch.float32, {"block_m": 64, "block_n": 32}),
    "bool": ("bool", torch.bfloat16, {"block_m": 32, "block_n": 32}),
    "layer": ("layer", torch.float32, {"block_m": 32, "block_n": 32}),
    "batch": ("batch", torch.float32, {"block_m": 32, "block_n": 32}),
    "split": ("factor", torch.float32, {"block_m": 32, "block_n": 32, "block_k": 16, "splits": 3}),
    "planes": ("where", torch.float32, {"block_m": 32, "block_n": 32, "precision": "fp16x3"}),
    "packed": ("layer", torch.float32, {"block_m": 32, "block_n": 32, "packed": "b"}),
}
QUICK = ["factor", "not finite", "none", "layer"]


def rows(name: str) -> dict[str, Any]:
    """The largest errors of the program and of PyTorch, relative to |result| + rms, after a change of the mask too."""
    form, dtype, changes = CASES[name]
    program, module = lowered(form, dtype), Product(form).to(dtype)
    region = product(program)
    schedule = program.schedule(region)
    assert schedule is not None
    made = CONTEXT.coder.print(region, schedule.but(**changes))
    model = program.with_implementation(region.id, made).load().Model()
    given = inputs(dtype)
    if name == "not finite":
        given[0][90, 3], given[1][5, 80] = float("inf"), float("nan")
    return row_of(name, model, module, given, change)


def change(module: nn.Module) -> None:
    """Other places are wanted."""
    module.get_buffer("mask").copy_(wanted().roll(50, 0))
    module.get_buffer("factor").copy_(module.get_buffer("factor").roll(50, 0))


def test_quick_values() -> None:
    check("tests.vocabulary.sparse.test_sampled", QUICK)


@pytest.mark.slow
def test_other_values() -> None:
    check("tests.vocabulary.sparse.test_sampled", [name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    run(rows, sys.argv[1:])
