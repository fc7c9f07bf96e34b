"""Single elements by their depth: what is legal, printed and compiled, and activations that are not finite.

Values are computed in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qimeng import IllegalAction
from qimeng.actions import check_action, legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from tests.interpreted import rows_of
from tests.vocabulary.sparse.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of
from tests.vocabulary.values import loaded


def stored(rows: int, param: str = "csc", weights: str = "csr:5") -> Program:
    start = start_of(spec_of(*layer(rows, 200, 100, torch.bfloat16), weights))
    program = after(start, action_of(start, "sparsify"))
    return after(program, Action("storage", (reading(program).id,), param))


def test_it_is_one_of_the_forms_that_lead_to_each_other() -> None:
    program = stored(24)
    legal = legal_actions(program, CONTEXT)
    assert {a.param for a in legal if a.kind == "storage"} == {"csr", "balanced", "ell"}
    assert "tiling" in {a.kind for a in legal}
    with pytest.raises(IllegalAction, match="elements lie by their depth: every program takes whole columns"):
        check_action(program, Action("split", (reading(program).id,), "more"), CONTEXT)


def test_one_row_is_refused_with_the_number() -> None:
    start = start_of(spec_of(*layer(1, 200, 100, torch.bfloat16), "csr:5"))
    program = after(start, action_of(start, "sparsify"))
    with pytest.raises(IllegalAction, match="csc multiplies 8 rows or more on the tensor cores; these are 1"):
        check_action(program, Action("storage", (reading(program).id,), "csc"), CONTEXT)


@pytest.mark.parametrize("rows", [1, 24, 72])
def test_no_search_begins_with_it(rows: int) -> None:
    start = start_of(spec_of(*layer(rows, 200, 100, torch.bfloat16), "csr:5"))
    patch = CONTEXT.coder.write(Request(start, action_of(start, "sparsify"), CONTEXT.device))
    assert patch.alternatives and not any("by_depth=True" in str(a.schedule) for a in patch.alternatives)


def test_it_compiles_within_what_it_says(tmp_path: Path) -> None:
    program = stored(512, weights="csr:20")
    region = reading(program)
    made = program.implementation(region)
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job_of(region, made)])
    assert found.error is None and made.schedule is not None
    family, plan = covering(region)
    product = next(k for k in found.kernels if k.name.endswith("_product"))
    assert product.spills == 0 and product.dots
    assert product.shared_bytes <= family.needs(plan, made.schedule).shared_bytes


def test_what_is_not_finite_stays_where_it_belongs() -> None:
    (row,) = rows_of("-m", "tests.vocabulary.sparse.test_by_depth", "infinite")
    assert row == {"same": True, "finite": row["finite"]} and 0 < row["finite"] < 1


def infinite() -> None:
    """Compare with the form by columns, which meets no element but a column's own."""
    module, x = layer(24, 200, 100, torch.bfloat16)
    x[3, 7], x[5, 100], x[6, 9] = float("inf"), float("nan"), float("-inf")
    found = []
    for param in ("csc", "ell"):
        model = loaded(stored(24, param), module)
        with torch.no_grad():
            found.append(model(x).float())
    same = torch.allclose(*found, rtol=0.02, atol=0.02, equal_nan=True)
    print(json.dumps({"same": same, "finite": float(found[0].isfinite().float().mean())}), flush=True)


if __name__ == "__main__":
    from qimeng.envs.estimate.interpreter import mend

    mend()
    infinite()
