"""Kinds of action that have a region, and those equal to it, compute itself what other regions computed for it.

Deals in regions, and in which nodes one of them takes over. Knows nothing about what is computed or about kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from qimeng.actions import Context, GraphRewrite, Kind, Remainder, find_region
from qimeng.errors import IllegalAction
from qimeng.graph.region import Region, repartition
from qimeng.interfaces import Action
from qimeng.program.program import Program


class TakingOver(Kind):
    """Has a region, and those equal to it, take nodes over from others.

    Attributes:
        task: what the region does then, as after "to": "read its weight as it is stored".
    """

    task: str

    @abstractmethod
    def concerns(self, region: Region) -> bool:
        """Whether `region` is one of this kind."""

    @abstractmethod
    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that it takes over.

        Raises:
            IllegalAction: it is none of this kind, or has taken them over already.
        """

    def candidates(self, program: Program) -> Iterable[Region]:
        """Regions that may be concerned: by default all that a call computes."""
        return program.called

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """One for each region that is concerned, equal ones once."""
        seen = set[str]()
        for region in self.candidates(program):
            if region.signature not in seen and self.concerns(region):
                seen.add(region.signature)
                yield Action(self.name, (region.id,))

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where there is something to take over, and the coder can implement the whole."""
        target = self.target(program, action)
        reason = context.coder.can_implement(target)
        if reason is not None:
            raise IllegalAction(f"{target.label()} cannot {self.task}: {reason}")

    def target(self, program: Program, action: Action) -> Region:
        """The region with what it takes over."""
        region = find_region(program, action)
        nodes = self.reading(region)
        return next(r for r in self._partition(program, region) if set(r.nodes) == nodes)

    def remains(self, program: Program, action: Action) -> Remainder:
        """The region with what it takes over."""
        return Remainder(self.target(program, action), self.work(program, action))

    def work(self, program: Program, action: Action) -> float:
        """Share of the arithmetic that is left once a legal action is carried out: by default all of it."""
        return 1.0

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The partition in which the region, and those equal to it, have taken their nodes over."""
        region = self.target(program, action)
        note = f"to {self.task}: {region.label()}"
        return GraphRewrite(self._partition(program, find_region(program, action)), region, note=note)

    def _partition(self, program: Program, region: Region) -> tuple[Region, ...]:
        """The regions of `program`, those equal to `region` with what they take over."""
        sets = [self.reading(r) if r.signature == region.signature else set(r.nodes) for r in program.regions]
        return repartition(program.graph, sets)


__all__ = ["TakingOver"]
