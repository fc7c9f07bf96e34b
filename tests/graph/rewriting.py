"""Runs a module rewritten by one option of the action `algebra` beside the module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.graph.capture import capture
from qimeng.graph.rewrites import find_rewrites
from qimeng.program.program import Program


class Rewritten:
    """A module and the program that one option makes of it; both have the same random state.

    Args:
        make: makes the module.
        inputs: makes its inputs.
        option: of `algebra`.
    """

    def __init__(self, make: Callable[[], torch.nn.Module], inputs: Callable[[], tuple[Any, ...]], option: str):
        start = Program.start(capture(make, inputs))
        self.rewrites, self.reasons = find_rewrites(start.graph, option)
        self.rules = [r.rule for r in self.rewrites]
        self.program = start.with_rewrites(self.rewrites)
        self.labels = [r.label() for r in self.program.called]
        self.make, self.inputs = make, inputs

    def errors(self) -> list[float]:
        """Largest error of each output over its largest value: as made, with changed and with reloaded parameters."""
        torch.manual_seed(0)
        module, program = self.make(), self.program.load().Model()
        found: list[float] = []
        with torch.no_grad():
            for t in module.state_dict().values():
                t.copy_(torch.rand_like(t) + 0.5 if t.is_floating_point() else t)
            program.load_state_dict(module.state_dict())
            inputs = tuple(torch.randn_like(x) for x in self.inputs())
            found += self._compare(module, program, inputs)
            for a, b in zip(module.parameters(), program.parameters(), strict=True):
                a.mul_(-1.5)
                b.mul_(-1.5)
            found += self._compare(module, program, inputs)
            other = {k: v + 1 if v.is_floating_point() else v for k, v in module.state_dict().items()}
            for m in (module, program):
                m.load_state_dict(other)
            found += self._compare(module, program, inputs)
        return found

    def on(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's first output and the program's, on `inputs`."""
        torch.manual_seed(0)
        module, program = self.make(), self.program.load().Model()
        program.load_state_dict(module.state_dict())
        with torch.no_grad():
            return _tensors(module(*inputs))[0], _tensors(program(*inputs))[0]

    def _compare(self, module: Any, program: Any, inputs: tuple[Any, ...]) -> list[float]:
        pairs = zip(_tensors(module(*inputs)), _tensors(program(*inputs)), strict=True)
        errors = []
        for a, b in pairs:
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            errors.append(float((a.double() - b.double()).abs().max() / a.double().abs().max()))
        return errors


def _tensors(found: Any) -> list[torch.Tensor]:
    return list(_pytree.tree_leaves(found))
