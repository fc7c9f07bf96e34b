"""Finds the pointwise regions of a program that can be one region each, however many they are.

Deals in groups of pointwise regions. Knows nothing about schedules' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.actions.base import Context
from qimeng.graph.groups import pointwise_groups
from qimeng.graph.region import Region, repartition
from qimeng.program.program import Program

Group = tuple[Region, ...]
"""Regions that become one, in topological order."""


def chains_of(program: Program, context: Context) -> tuple[Group, ...]:
    """Groups of two or more pointwise regions on PyTorch that touch; one that the coder cannot implement is halved."""
    groups = [
        group
        for group in pointwise_groups(program.regions)
        if not any(program.implementation(r).generated for r in group)
    ]
    while groups:
        made = {frozenset(r.nodes): r for r in joined(program, groups)}
        unions = [frozenset(name for region in group for name in region.nodes) for group in groups]
        fits = [u not in made or context.coder.can_implement(made[u]) is None for u in unions]
        if all(fits):
            break
        parts = [part for g, fit in zip(groups, fits, strict=True) for part in ([g] if fit else _halves(g))]
        groups = [part for part in parts if len(part) > 1]
    return tuple(groups)


def joined(program: Program, groups: Sequence[Group]) -> tuple[Region, ...]:
    """The partition of `program` with each of `groups` as one region."""
    inside = {region.id for group in groups for region in group}
    rest = [set(r.nodes) for r in program.regions if r.id not in inside]
    unions = [{name for region in group for name in region.nodes} for group in groups]
    return repartition(program.graph, [*rest, *unions]) if groups else program.regions


def _halves(group: Group) -> list[Group]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]]


__all__ = ["Group", "chains_of", "joined"]
