"""What rule-based planners and prompts say about the tile family.

Deals in names of actions and in tiny modules that are no one's problem. Knows nothing about kernels.
"""

from __future__ import annotations

import torch

from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.family import Sample
from qimeng.graph.ops import category
from qimeng.graph.region import Region

ROW_INTENTS = (
    ("split", "wave"),
    ("split", "cooperative"),
    ("split", "split"),
    ("split", "resident"),
    ("tiling", "wider"),
    ("pipeline", "stages"),
    ("tiling", "taller"),
    ("pipeline", "warps"),
)
COLUMN_INTENTS = (
    ("split", "split"),
    ("split", "resident"),
    ("tiling", "taller"),
    ("tiling", "smaller"),
    ("pipeline", "warps"),
    ("split", "more"),
)
POINTWISE_INTENTS = (("vectorization", "fewer"), ("tiling", "smaller"), ("tiling", "wider"))
"""What to try, in order: rows contiguous in memory, columns contiguous, nothing reduced."""


def intents(region: Region, schedule: TileSchedule | None) -> tuple[tuple[str, str], ...]:
    """By what is reduced; tall tiles are those of columns that are contiguous in memory."""
    if not any(category(n) == "reduction" for n in region.ops):
        return POINTWISE_INTENTS
    return COLUMN_INTENTS if schedule is not None and schedule.block_p >= 32 else ROW_INTENTS


class _Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + b)


class _Softmax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, dim=1)


def samples() -> tuple[Sample, ...]:
    """A pointwise operator, short rows and long rows."""
    return (_Scale, ((64, 1000), (1000,))), (_Softmax, ((64, 1000),)), (_Softmax, ((64, 100_000),))


__all__ = ["COLUMN_INTENTS", "POINTWISE_INTENTS", "ROW_INTENTS", "intents", "samples"]
