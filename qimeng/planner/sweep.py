"""Baseline planners without decisions: they show what the coder's default kernels and its sweeps gain alone.

Deals in fixed orders. Knows nothing about times. Other planners are compared with these.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions import kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.interfaces import Action, Observation, Planner


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


def _of_regions(o: Observation, actions: list[Action]) -> Iterator[Action]:
    """`actions` by their region, in the order of the program."""
    for region in o.program.regions:
        yield from (a for a in actions if a.regions[0] == region.id)


__all__ = ["LowerOnlyPlanner", "SweepPlanner"]
