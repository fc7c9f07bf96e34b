"""A program printed again for a graph of other sizes.

Deals in regions and their twins. Knows nothing about how a kernel is printed.
"""

from __future__ import annotations

from collections.abc import Callable

from qimeng.errors import CoderError, FamilyFault, IllegalAction
from qimeng.family import Unsupported, family_of, plan_of
from qimeng.graph.opgraph import OpGraph, same_operators
from qimeng.graph.region import Region, repartition
from qimeng.program.program import Implementation, Program
from qimeng.program.schedule import Schedule


def reprinted(program: Program, graph: OpGraph, printer: Callable[[Region, Schedule], Implementation]) -> Program:
    """`program` on `graph`: same regions, same schedules; what has none, or cannot be printed there, is on PyTorch.

    Args:
        program: the program.
        graph: the same operators at other sizes.
        printer: prints a region under a schedule.

    Raises:
        CoderError: the graphs have different operators.
    """
    try:
        small = Program.start(graph).with_rewrites(program.rewrites)
    except IllegalAction as error:
        raise CoderError(f"at that size the graph cannot be rewritten so: {error}") from None
    graph = small.graph
    if not same_operators(program.graph, graph):
        raise CoderError("the graph has other operators than the program")
    rename = dict(zip(program.graph.nodes, graph.nodes, strict=True))
    smaller = small.with_regions(repartition(graph, [{rename[n] for n in r.nodes} for r in program.regions]))
    by_nodes = {r.nodes: r for r in smaller.regions}
    for region in program.regions:
        schedule = program.schedule(region)
        twin = by_nodes.get(tuple(rename[n] for n in region.nodes))
        if schedule is None or twin is None:
            continue
        try:
            family = family_of(schedule)
            implementation = printer(twin, family.reduced(plan_of(family, twin), schedule))
        except (Unsupported, FamilyFault):
            continue
        smaller = smaller.with_implementation(twin.id, implementation)
    return smaller


__all__ = ["reprinted"]
