"""The family of writes of rows by index: a kernel fills a table of the rows written last, the tile family's reads it.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from qimeng.coder.template.families.tile.family import Tile
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.printer import print_tile
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.device import Device
from qimeng.family import Sample
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.program.schedule import family_field
from qimeng.vocabulary.irregular.written import writes
from qimeng.vocabulary.irregular.written_nest import WritePlan, plan_writes
from qimeng.vocabulary.irregular.written_table import filling


@dataclass(frozen=True)
class WriteSchedule(TileSchedule):
    """How the elements of the result are cut; see `TileSchedule`."""

    family: str = family_field("writes")


class Writes(Tile):
    """Writes of rows by index, with the operators around them; of rows written to one position the last one counts."""

    name = "writes"
    about = "writes of rows by index"
    schedule = WriteSchedule

    def __init__(self) -> None:
        super().__init__()
        self.moves = {kind: move for kind, move in self.moves.items() if kind != "language"}

    def plan(self, region: Region) -> WritePlan:
        """The region as rows and columns, with its tables."""
        return plan_writes(region)

    def concerns(self, region: Region) -> bool:
        """Whatever writes more than a few rows by index."""
        return any(writes(region.graph, n) for n in region.ops)

    def default(self, plan: TilePlan, device: Device, mode: str) -> WriteSchedule:
        """That of the tile family."""
        made = super().default(plan, device, mode)
        return WriteSchedule(**{f.name: getattr(made, f.name) for f in fields(made) if f.init})

    def print(self, plan: TilePlan, schedule: TileSchedule, prefix: str) -> Implementation:
        """A kernel for each table, then those of the tile family."""
        assert isinstance(plan, WritePlan)
        lines, kernels = list(plan.loads.prelude), []
        for number, table in plan.tables.items():
            name = plan.loads.names[number]
            indices = [plan.loads.names[plan.loads.values[i.value].number] for i in table.indices]
            kernel, made = filling(table, name, f"{prefix}_{name}", indices)
            kernels.append(kernel)
            lines += made
        loads = replace(plan.loads, prelude=tuple(lines))
        found = print_tile(replace(plan, loads=loads), schedule, prefix)
        return replace(found, source="\n\n".join([*kernels, found.source.lstrip("\n")]))

    def word(self, region: Region) -> str:
        """The family's name."""
        return self.name

    def samples(self) -> tuple[Sample, ...]:
        """Keys of a cache, written at some positions."""
        return ((_Cache, ((2, 64, 16), (2, 16, 16))),)


class _Cache(torch.nn.Module):
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.arange(16) * 3)

    def forward(self, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return cache.index_copy(1, self.at, rows * 2)


__all__ = ["WriteSchedule", "Writes"]
