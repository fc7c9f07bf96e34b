"""Kinds of action that have a product compute its weight itself, from what a declaration stores of it.

Deals in regions, and in which nodes one of them takes over. Knows nothing about how weights are stored or about
kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from qimeng.actions import Context, GraphRewrite, Kind, find_region
from qimeng.errors import IllegalAction
from qimeng.graph.region import Region, repartition
from qimeng.graph.state import settled_nodes
from qimeng.interfaces import Action
from qimeng.program.program import Program


class WeightReader(Kind):
    """Has a product, and those equal to it, compute its weight from what is stored of it.

    Attributes:
        reads: what the product reads then, in words.
    """

    reads: str

    @abstractmethod
    def concerns(self, region: Region) -> bool:
        """Whether `region` multiplies by a weight of this kind."""

    @abstractmethod
    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that it takes over.

        Raises:
            IllegalAction: nothing is stored of its weight, too much is, or it reads that already.
        """

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """One for each product with such a weight, equal ones once."""
        seen = set[str]()
        for region in program.called if settled_nodes(program.graph) else ():
            if region.signature not in seen and self.concerns(region):
                seen.add(region.signature)
                yield Action(self.name, (region.id,))

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where little enough is stored, and the coder can implement the product on it."""
        reading = self.target(program, action)
        reason = context.coder.can_implement(reading)
        if reason is not None:
            raise IllegalAction(f"{reading.label()} cannot read {self.reads}: {reason}")

    def target(self, program: Program, action: Action) -> Region:
        """The region that reads what is stored."""
        region = find_region(program, action)
        nodes = self.reading(region)
        return next(r for r in self._partition(program, region) if set(r.nodes) == nodes)

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The partition in which the region, and those equal to it, compute their weights themselves."""
        region = self.target(program, action)
        note = f"{region.label()} reads {self.reads}"
        return GraphRewrite(self._partition(program, find_region(program, action)), region, note=note)

    def _partition(self, program: Program, region: Region) -> tuple[Region, ...]:
        """The regions of `program`, those equal to `region` with what they take over."""
        sets = [self.reading(r) if r.signature == region.signature else set(r.nodes) for r in program.regions]
        return repartition(program.graph, sets)


__all__ = ["WeightReader"]
