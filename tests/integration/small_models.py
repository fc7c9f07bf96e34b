"""Small models for the tests of this folder, and options that need no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qimeng.integration.calls import hollow, key_of
from qimeng.integration.operator import Outputs
from qimeng.integration.variant import Variant
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.testing import FakeCoder, FakeEvaluator


def fakes() -> dict[str, Any]:
    """Options with which a search takes no time; the programs are PyTorch calls."""
    evaluator = FakeEvaluator()
    return {"coder": FakeCoder(), "evaluator": evaluator, "planner": "heuristic", "search": "greedy", "cache": False}


class Block(nn.Module):
    """A layer with a buffer that is not in the state_dict and an argument by keyword."""

    def __init__(self, width: int = 8, number: int = 0):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("steps", torch.arange(float(width)), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(self.norm(self.linear(x) + self.steps)) * scale
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    """Equal layers, told apart by a number that changes nothing, and a head."""

    def __init__(self, layers: int = 3, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, i) for i in range(layers))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask=x > 0)
        return self.head(x)


def variant(module: nn.Module, *args: Any, **kwargs: Any) -> Variant:
    """The start program of a module for a call, ready to be attached."""
    program = Program.start(capture_spec(KernelSpec.from_module(module, args, kwargs=kwargs)))
    with torch.no_grad():
        returned = module(*args, **kwargs)
    key = key_of(args, kwargs)
    assert key is not None
    outputs = Outputs.of(returned, [*args, *module.parameters()])
    return Variant(key, program.load().Model(), program.source, hollow((args, kwargs)), outputs)
