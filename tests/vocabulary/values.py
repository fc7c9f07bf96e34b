"""Values of a layer in Triton's interpreter, held against the declared computation in float64.

The cases of a file run in a process of its own (that file as a script), where Triton interprets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qimeng.program.program import Program
from tests.interpreted import rows_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FLOORS = {F16: 4 * 2.0**-10, BF16: 4 * 2.0**-7, F32: 16 * 2.0**-23}
"""The judge's floors: units of the last place, of a largest error relative to |result| + rms."""

FACTOR = 2
"""Times PyTorch's error on the same declared weights; the judge allows 4."""


@dataclass
class Case:
    """A layer, of a transposed input where `turned`, the form and `storage` of its weight, configurations to run."""

    weights: str
    sizes: tuple[int, int, int]
    dtype: torch.dtype
    after: Any = None
    bias: bool = True
    choices: tuple[int, ...] = (0, 2)
    fused: bool = False
    turned: bool = False
    storage: str = ""


def check(module: str, names: Sequence[str]) -> None:
    """Run the cases `names` of `module`; none may be further off than `FACTOR` times PyTorch."""
    found = rows_of("-m", module, *names)
    assert {row["case"] for row in found} == set(names)
    for row in found:
        assert row["error"] <= row["limit"], row


def loaded(program: Program, module: torch.nn.Module) -> torch.nn.Module:
    """The module of `program` with the parameters of `module`."""
    found: torch.nn.Module = program.load().Model()
    found.load_state_dict(module.state_dict())
    return found


Errors = Iterator[tuple[float, float]]
"""A program's largest error and PyTorch's, for each configuration of a case."""


def run(cases: dict[str, Case], names: Sequence[str], errors_of: Callable[[Case], Errors]) -> None:
    """Print a row for each configuration of the cases `names`."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for name in names:
        case = cases[name]
        for choice, (error, eager) in zip(case.choices, errors_of(case), strict=True):
            limit = max(FACTOR * eager, FLOORS[case.dtype])
            print(json.dumps({"case": name, "choice": choice, "error": error, "limit": limit}), flush=True)
