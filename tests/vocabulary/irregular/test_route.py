"""Products with chosen matrices: which are found, what the action makes of a program, values and kernels.

Values are computed in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action, legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from tests.vocabulary.irregular.samples import CONTEXT, Experts, action_of, after, start_of
from tests.vocabulary.values import BF16, F16, F32, FACTOR, FLOORS, check

FORMS = ("einsum", "matmul", "bmm")


def start(form: str, dtype: torch.dtype = F32, rows: int = 12, **sizes: int) -> tuple[nn.Module, torch.Tensor, Program]:
    torch.manual_seed(0)
    module, x = Experts(form, **sizes).to(dtype), torch.randn(rows, sizes.get("width", 20)).to(dtype)
    return module, x, start_of(KernelSpec.from_module(module, (x,)))


def routed(program: Program, choice: int = 0) -> Program:
    """The program with both products routed."""
    while (action := next((a for a in legal_actions(program, CONTEXT) if a.kind == "route"), None)) is not None:
        patch = CONTEXT.coder.write(Request(program, action, CONTEXT.device))
        program = patch.apply(program, min(choice, len(patch.alternatives) - 1))
    return program


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_read_where_they_lie(form: str) -> None:
    _, _, program = start(form)
    assert sum("index" in r.label() for r in program.regions) == 2
    after_ = routed(program)
    products = [r for r in after_.regions if "bmm" in r.label()]
    assert [r.label() for r in products] == [r.label() for r in after_.regions if "index" in r.label()]
    for region in products:
        schedule = after_.schedule(region)
        assert schedule is not None and schedule.family == "grouped"
        assert max(after_.graph.meta(v).numel for v in region.outputs) <= 24 * 28
    with pytest.raises(IllegalAction, match="reads the matrices that its index chooses already"):
        check_action(after_, Action("route", (products[0].id,)), CONTEXT)


def test_other_products_are_refused() -> None:
    class Batch(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, w) + torch.bmm(x, w[i]) + torch.bmm(x[:, :1], w.index_select(1, i))

    inputs = torch.randn(6, 3, 6), torch.randn(6, 6, 6), torch.randint(0, 6, (6,))
    program = start_of(KernelSpec.from_module(Batch(), inputs))
    assert "route" not in {a.kind for a in legal_actions(program, CONTEXT)}
    for region in program.called:
        with pytest.raises(IllegalAction, match="multiplies by no matrices that an index chooses"):
            check_action(program, Action("route", (region.id,)), CONTEXT)


VALUES = {
    "einsum": ("einsum", (F32, F16, BF16), {}),
    "matmul": ("matmul", (F32, BF16), {}),
    "bmm": ("bmm", (F32,), {}),
    "many rows": ("bmm", (BF16,), {"rows": 90, "experts": 3}),
    "one expert in use": ("einsum", (F32,), {"best": 1, "experts": 2}),
    "deep": ("matmul", (BF16,), {"width": 200, "inner": 70}),
}


def test_values() -> None:
    check("tests.vocabulary.irregular.test_route", list(VALUES))


def test_the_printed_kernel(golden: Callable[[str, str], None]) -> None:
    program = routed(start("einsum", BF16)[2])
    region = next(r for r in program.regions if "bmm" in r.label())
    golden("grouped.py.txt", program.implementation(region).source)


@pytest.mark.parametrize(("dtype", "choice"), [(BF16, 0), (BF16, 4), (F32, 0), (F32, 1)])
def test_it_compiles_within_what_it_says(dtype: torch.dtype, choice: int, tmp_path: Path) -> None:
    program = start("einsum", dtype, 64, width=256, inner=512)[2]
    action = action_of(program, "route")
    program = after(program, action, choice)
    region = next(r for r in program.regions if program.schedule(r))
    made = program.implementation(region)
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job_of(region, made)])
    assert found.error is None and made.schedule is not None
    product = next(k for k in found.kernels if k.name.endswith("_product"))
    family, plan = covering(region)
    assert product.spills == 0 and product.shared_bytes <= family.needs(plan, made.schedule).shared_bytes


def rows(name: str) -> None:
    """Print errors against float64, relative to |result| + rms."""
    form, dtypes, sizes = VALUES[name]
    for dtype in dtypes:
        module, x, program = start(form, dtype, **sizes)
        exact = module.double()(x.double())
        module.to(dtype)
        scale = exact.abs() + exact.square().mean().sqrt()
        state = Experts(form, **{k: v for k, v in sizes.items() if k != "rows"}).to(dtype)
        state.load_state_dict(module.state_dict())
        limit = max(FACTOR * float(((state(x).double() - exact).abs() / scale).max()), FLOORS[dtype])
        for choice in (0, 1, 3):
            made = routed(program, choice).load().Model()
            made.load_state_dict(module.state_dict())
            error = float(((made(x).double() - exact).abs() / scale).max())
            print(json.dumps({"case": name, "choice": choice, "error": error, "limit": limit}), flush=True)


if __name__ == "__main__":
    import sys

    from qimeng.envs.estimate.interpreter import mend

    mend()
    for one in sys.argv[1:]:
        rows(one)
