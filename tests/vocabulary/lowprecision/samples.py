"""Layers with declared weights and their programs, for the tests beside this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

CONTEXT = Context(DEVICES["h100"], TemplateCoder())


def layer(rows: int, depth: int, columns: int, dtype: torch.dtype, *, bias: bool = True, after: Any = None) -> Any:
    """A linear layer, what follows it, and its input."""
    torch.manual_seed(0)
    linear = nn.Linear(depth, columns, bias=bias)
    module = nn.Sequential(linear, after) if after is not None else nn.Sequential(linear)
    return module.to(dtype).eval(), torch.randn(rows, depth).to(dtype)


def spec_of(module: nn.Module, x: torch.Tensor, weights: str) -> KernelSpec:
    return KernelSpec.from_module(module, (x,), weights=weights)


def start_of(spec: KernelSpec) -> Program:
    return Program.start(capture_spec(spec, verify=False))


def action_of(program: Program, kind: str) -> Action:
    return next(a for a in legal_actions(program, CONTEXT) if a.kind == kind)


def after(program: Program, action: Action, choice: int = 0) -> Program:
    """The program with what the template coder writes, its configuration number `choice`."""
    patch = CONTEXT.coder.write(Request(program, action, CONTEXT.device))
    return patch.apply(program, min(choice, max(len(patch.alternatives) - 1, 0)))


def reading(program: Program) -> Region:
    """The region whose kernel reads a stored weight."""
    return next(r for r in program.called if "linear" in r.label() and "mul" in r.label())
