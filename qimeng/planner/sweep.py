"""Baseline planners with hardly a decision: they show what the coder's default kernels and its sweeps gain alone.

Deals in fixed orders, and in one by the roofline. Other planners are compared with these.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions import kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.envs.steps.time_shares import ceilings
from qimeng.interfaces import Action, Observation, Planner
from qimeng.program.launch import CUDA_GRAPH


class LowerOnlyPlanner(Planner):
    """Lowers every region once, as the graph was captured, in the order of the program, and stops."""

    def choose(self, observation: Observation) -> Action:
        """The first action in that order which was not taken yet."""
        tried = {step.action for step in observation.history}
        return next((a for a in self._order(observation) if a not in tried), Action("stop"))

    def _order(self, o: Observation) -> Iterator[Action]:
        yield from _of_regions(o, [a for a in o.actions if a.kind == "lowering"])


class SweepPlanner(LowerOnlyPlanner):
    """Lowers every region, then takes each rewrite of a schedule once, region by region, by name.

    Each of these steps lets the evaluator choose among the configurations that the coder lists for it.
    """

    def _order(self, o: Observation) -> Iterator[Action]:
        yield from super()._order(o)
        rewrites = [a for a in o.actions if isinstance(kind_named(a.kind), ScheduleKind)]
        yield from _of_regions(o, sorted(rewrites, key=lambda a: (a.kind, a.param)))


class RooflinePlanner(Planner):
    """Fuses all it can, has the whole launched as a CUDA graph, then lowers one region a step.

    That is the region of which the program would gain most at its roofline.

    What a program gains at most follows from Amdahl's law and the roofline (Williams et al., CACM 2009).
    """

    def choose(self, observation: Observation) -> Action:
        """A fusion that computes nothing twice, a graph, then the best lowering; stops where none is left."""
        o, tried = observation, {step.action for step in observation.history}
        left = [a for a in o.actions if a not in tried and not a.param]
        fusions = [a for kind in ("cluster", "fusion") for a in left if a.kind == kind]
        if fusions:
            return min(fusions, key=lambda a: len(a.regions))  # all at once, where that is offered
        graphs = [a for a in o.actions if a not in tried and (a.kind, a.param) == ("launch", CUDA_GRAPH)]
        if graphs:
            return graphs[0]
        lowerings = [a for a in left if a.kind == "lowering"]
        gains = ceilings(lowerings, o.program, o.evaluation, o.device, o.mode)
        return max(zip(gains, lowerings, strict=True), default=(0.0, Action("stop")), key=lambda each: each[0])[1]


def _of_regions(o: Observation, actions: list[Action]) -> Iterator[Action]:
    """`actions` by their region, in the order of the program."""
    for region in o.program.regions:
        yield from (a for a in actions if a.regions[0] == region.id)


__all__ = ["LowerOnlyPlanner", "RooflinePlanner", "SweepPlanner"]
