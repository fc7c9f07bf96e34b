"""The kind that makes a program of very many regions a small one, in one step.

Deals in groups of pointwise regions. Knows nothing about schedules' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions.base import Context, GraphRewrite, Kind
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.graph.groups import pointwise_groups
from qimeng.graph.region import Region, repartition
from qimeng.interfaces import Action
from qimeng.program.program import Program

MANY = 96
"""Regions from which on a program has too many for fusions of two at a time: a budget is tens of steps."""


class Gather(Kind):
    """Make all pointwise operators that touch one region, all over a program of very many regions.

    args: none.
    rewrite: ``a = f(x); b = g(a); c = h(a, b) …`` -> ``c = fgh(x)``
    """

    name = "gather"

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """One, for a program of `MANY` regions or more."""
        if len(program.regions) >= MANY:
            yield Action(self.name)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where a program of `MANY` regions has such operators and the coder can implement them together."""
        if len(program.regions) < MANY:
            raise IllegalAction(
                f"gather is for programs of {MANY} regions or more, this one has {len(program.regions)}"
            )
        if len(gathered(program, context)) == len(program.regions):
            raise IllegalAction("no pointwise operators that touch can be one region")

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The partition with every group as one region."""
        regions = gathered(program, context)
        return GraphRewrite(regions, note=f"{len(program.regions)} regions become {len(regions)}")


def gathered(program: Program, context: Context) -> tuple[Region, ...]:
    """The partition after `Gather`: a group that the coder cannot implement is halved, generated kernels stay."""
    groups = [
        group
        for group in pointwise_groups(program.regions)
        if not any(program.implementation(r).generated for r in group)
    ]
    while groups:
        unions = [frozenset(name for region in group for name in region.nodes) for group in groups]
        inside = {region.id for group in groups for region in group}
        rest = [set(r.nodes) for r in program.regions if r.id not in inside]
        regions = repartition(program.graph, [*rest, *map(set, unions)])
        made = {frozenset(r.nodes): r for r in regions}
        fits = [u not in made or context.coder.can_implement(made[u]) is None for u in unions]
        if all(fits):
            return regions
        parts = [part for g, fit in zip(groups, fits, strict=True) for part in ([g] if fit else _halves(g))]
        groups = [part for part in parts if len(part) > 1]
    return program.regions


def _halves(group: tuple[Region, ...]) -> list[tuple[Region, ...]]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]]


register(Gather())


__all__ = ["Gather", "gathered"]
