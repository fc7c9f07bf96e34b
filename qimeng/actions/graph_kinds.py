"""Kinds that change which operators are implemented together, or by what: lowering, fusion, unfuse, stop.

Deals in regions. Knows nothing about schedules' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions.base import Context, GraphRewrite, Kind, find_region
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.family import is_covered
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region, merge, merge_recomputing, split
from qimeng.interfaces import Action
from qimeng.program.program import Program

MANY = 96
"""Regions from which on a program has too many pairs to look at each: there `cluster` fuses many at a time."""


class Stop(Kind):
    """End the search; the best program so far is the result.

    rewrite: program -> program
    """

    name = "stop"

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """Always one."""
        yield Action("stop")

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Always legal."""

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """Nothing changes."""
        return GraphRewrite()


class Lowering(Kind):
    """Replace PyTorch calls by one generated kernel, plain or, where that is no safe guess, the fastest of a few.

    args: the region.
    rewrite: ``v = torch.ops.aten.add(x, y)`` -> ``kernel[grid](x, y, v)`` with the default schedule
    """

    name = "lowering"
    local = True
    shared = True

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal for regions that the coder can implement, on PyTorch or in a kernel that lacks the schedule it has."""
        region, coder = find_region(program, action), context.coder
        written = program.implementation(region)
        again = written.schedule is None and (coder.free_hand or coder.schedules) and is_covered(region)
        if written.generated and not again:
            raise IllegalAction(f"{region.id} has a generated kernel already")
        reason = context.coder.can_implement(region)
        if reason is not None:
            raise IllegalAction(f"{region.label()} cannot be lowered: {reason}")


class Fusion(Kind):
    """Make a producer and its consumer one region, so that what passes between them stays in registers.

    args: the producer and the consumer; ``recompute`` leaves the producer in place for its other readers and computes
    it again inside the consumer.
    rewrite: ``v = f(x); w = g(v)`` -> ``w = fg(x)``
    """

    name = "fusion"
    options = ("", "recompute")

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """Each edge between fewer than `MANY` regions; recompute only where the producer has other readers."""
        graph = program.fusions.digraph
        for producer, consumer in graph.edges if len(graph) < MANY else ():
            yield Action(self.name, (producer, consumer))
            if graph.out_degree(producer) > 1:
                yield Action(self.name, (producer, consumer), "recompute")

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where the program stays acyclic and the coder can implement the result.

        No other region may lose its kernel, or the chance of one, by having to yield other values.
        """
        fused = fused_region(program, action)
        reason = context.coder.can_implement(fused)
        if reason is not None:
            raise IllegalAction(f"{fused.label()} cannot be one region: {reason}")
        before = {frozenset(r.nodes): r for r in program.regions}
        for other in program.fusions.changed(action.regions[0], action.regions[1], action.param == "recompute"):
            known = before.get(frozenset(other.nodes))
            if known is not None and program.implementation(known).generated:
                raise IllegalAction(f"{other.label()} would have to yield other values, and lose its kernel")
            reason = context.coder.can_implement(other)
            if reason is not None and (known is None or context.coder.can_implement(known) is None):
                raise IllegalAction(f"{other.label()} would have to yield other values: {reason}")

    def target(self, program: Program, action: Action) -> Region:
        """The region that the two become."""
        return fused_region(program, action)

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The new partition; where one of the two is a kernel, so must be what they become."""
        fused, (producer, consumer) = fused_region(program, action), action.regions[:2]
        merged = merge_recomputing if action.param == "recompute" else _merged
        kernels = any(program.implementation(program.region(r)).generated for r in (producer, consumer))
        note = f"{fused.label()} as one region"
        return GraphRewrite(merged(program.regions, producer, consumer), fused if kernels else None, note=note)


def _merged(regions: tuple[Region, ...], producer: str, consumer: str) -> tuple[Region, ...]:
    return merge(regions, (producer, consumer))


def fused_region(program: Program, action: Action) -> Region:
    """The region that a fusion makes.

    Raises:
        IllegalAction: no such edge, or a cycle.
    """
    producer, consumer = find_region(program, action), find_region(program, action, 1)
    if action.param == "recompute":
        return program.fusions.merged_recomputing(producer.id, consumer.id)
    return program.fusions.merged(producer.id, consumer.id)


class Unfuse(Kind):
    """Take a region apart into one region an operator, on PyTorch.

    args: the region.
    rewrite: ``w = fg(x)`` -> ``v = f(x); w = g(v)``
    """

    name = "unfuse"
    local = True

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal for regions of two or more operators."""
        region = find_region(program, action)
        heavy = [n for n in region.ops if n.packet not in VIEWS]
        if len(heavy) < 2:
            raise IllegalAction(f"{region.id} has {len(heavy)} operator(s); unfuse needs at least 2")

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The region's operators apart."""
        region = find_region(program, action)
        return GraphRewrite(split(program.regions, region.id), note="one region an operator")


for _kind in (Stop(), Lowering(), Fusion(), Unfuse()):
    register(_kind)


__all__ = ["Fusion", "Lowering", "Stop", "Unfuse", "fused_region"]
