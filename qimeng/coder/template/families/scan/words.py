"""What rule-based planners and prompts say about the scan family.

Deals in names of actions and in tiny modules that are no one's problem. Knows nothing about kernels.
"""

from __future__ import annotations

import torch

from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.family import Sample

RESIDENT = (("split", "loop"), ("tiling", "taller"), ("pipeline", "warps"), ("tiling", "smaller"))
LOOP = (("split", "resident"), ("split", "split"), ("pipeline", "stages"), ("tiling", "wider"), ("pipeline", "warps"))
SPLIT = (("split", "more"), ("split", "fewer"), ("tiling", "wider"), ("pipeline", "stages"), ("pipeline", "warps"))
"""What to try, in order, from each form."""


def intents(schedule: ScanSchedule | None) -> tuple[tuple[str, str], ...]:
    """By the form."""
    return {"resident": RESIDENT, "split": SPLIT}.get(schedule.form if schedule else "", LOOP)


class _RunningMean(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, dim=1) / n


def samples() -> tuple[Sample, ...]:
    """Short rows, and few long ones."""
    return (_RunningMean, ((64, 1000), (1000,))), (_RunningMean, ((4, 100_000), (100_000,)))


__all__ = ["intents", "samples"]
