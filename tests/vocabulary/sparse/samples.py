"""Layers with declared zeros and their programs, for the tests beside this file."""

from __future__ import annotations

import torch
from torch import nn

from qimeng.graph.region import Region
from qimeng.program.program import Program
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, layer, spec_of, start_of


def reading(program: Program) -> Region:
    """The region whose kernel reads kept blocks."""
    return next(r for r in program.called if "linear" in r.label() and "index_put" in r.label())


class Turned(nn.Sequential):
    """Layers of a transposed input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.t())


__all__ = ["CONTEXT", "Turned", "action_of", "after", "layer", "reading", "spec_of", "start_of"]
