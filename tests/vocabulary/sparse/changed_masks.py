"""Values of programs under a mask that a buffer holds, in Triton's interpreter, also after the mask has changed.

The cases of a file run in a process of its own (that file as a script), where Triton interprets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.interpreted import rows_of


def row_of(
    name: str, model: nn.Module, module: nn.Module, given: Sequence[Tensor], change: Callable[[nn.Module], None]
) -> dict[str, Any]:
    """The largest errors of a program and of PyTorch, relative to |result| + rms, before and after a change.

    Args:
        name: of the case.
        model: the program.
        module: what it computes.
        given: the inputs.
        change: changes the module's buffers.
    """
    errors = []
    for _ in range(2):
        model.load_state_dict(module.state_dict())
        with torch.no_grad():
            y, eager = model(*given), module(*given)
            exact = copy.deepcopy(module).double()(*(x.double() for x in given))
        assert torch.equal(y.isnan(), eager.isnan()) and y.stride() == eager.stride()
        usual = exact.nan_to_num(0.0, 0.0, 0.0)
        scale = usual.abs() + usual.square().mean().sqrt()
        errors.append([float(((z - exact).abs() / scale).nan_to_num(0.0).max()) for z in (y, eager)])
        change(module)
    error, eager_error = (max(pair) for pair in zip(*errors, strict=True))
    return {"case": name, "error": error, "limit": max(2 * eager_error, 16 * torch.finfo(given[0].dtype).eps)}


def check(module: str, names: list[str]) -> None:
    """Run the cases `names` of `module`; none may be further off than twice PyTorch's error."""
    found = rows_of("-m", module, *names)
    assert [row["case"] for row in found] == names
    for row in found:
        assert row["error"] <= row["limit"], row


def run(rows: Callable[[str], dict[str, Any]], names: Sequence[str]) -> None:
    """Print a row for each of the cases `names`."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for name in names:
        print(json.dumps(rows(name)), flush=True)
