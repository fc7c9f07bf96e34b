"""Input that PyTorch refuses or reads beyond: indices out of range, offsets that fall or lie outside.

The cases run in a process of their own (this file as a script), where Triton interprets. PyTorch has no result for
them: what is expected is computed from the rows that are left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from qimeng.program.program import Program
from tests.interpreted import rows_of
from tests.vocabulary.irregular.samples import CONTEXT, Bags, action_of, after, start_of

SEGMENTS, ROWS, WIDTH = 7, 40, 12


class Sums(nn.Module):
    """Sums of rows by segment."""

    def forward(self, rows: Tensor, index: Tensor) -> Tensor:
        spread = index.view(-1, 1).expand_as(rows)
        return torch.zeros(SEGMENTS, WIDTH).scatter_add(0, spread, rows)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH), torch.randint(0, SEGMENTS, (ROWS,))


def forms(program: Program) -> Iterator[tuple[str, Program]]:
    """The program, and each other order of its rows."""
    yield "first", program
    for action in legal_actions(program, CONTEXT):
        if action.kind == "irregular":
            yield action.param, after(program, action)


def out_of_range(program: Program) -> bool:
    """Rows whose segment does not exist are in none."""
    rows, index = inputs()
    index[3], index[20], index[21] = SEGMENTS, -1, 10**9
    inside = (index >= 0) & (index < SEGMENTS)
    wanted = torch.zeros(SEGMENTS, WIDTH).index_add(0, index[inside], rows[inside])
    return torch.allclose(program.load().Model()(rows, index), wanted, atol=1e-5)


def falling() -> bool:
    """A bag that ends before it begins is empty; offsets outside are cut off."""
    torch.manual_seed(0)
    module, numbers = Bags("sum", rows=20, width=WIDTH), torch.randint(0, 20, (ROWS,))
    start = start_of(KernelSpec.from_module(module, (numbers, torch.tensor([0, 3, 8, 8, 20]))))
    model = after(start, action_of(start, "lowering")).load().Model()
    model.load_state_dict(module.state_dict())
    table = module.get_parameter("bag.weight")[numbers]
    ends = [(5, 2), (2, 30), (30, ROWS), (ROWS, ROWS), (ROWS, ROWS)]
    wanted = torch.stack([table[low:high].sum(0) for low, high in ends])
    return torch.allclose(model(numbers, torch.tensor([5, 2, 30, 10**9, 10**9])), wanted, atol=1e-5)


def cases() -> Iterator[dict[str, Any]]:
    start = start_of(KernelSpec.from_module(Sums(), inputs()))
    for form, made in forms(after(start, action_of(start, "aggregate"))):
        yield {"case": f"out of range, {form}", "right": out_of_range(made)}
    yield {"case": "offsets", "right": falling()}


def test_no_memory_outside_is_read_and_the_rest_is_right() -> None:
    found = rows_of("-m", "tests.vocabulary.irregular.test_bad_input")
    assert {row["case"] for row in found} >= {"out of range, first", "out of range, sorted", "offsets"}
    assert all(row["right"] for row in found), found


if __name__ == "__main__":
    from qimeng.envs.estimate.interpreter import mend

    mend()
    with torch.no_grad():
        for row in cases():
            print(json.dumps(row), flush=True)
