"""Explores the regions of a network one by one: what each action does to each of them.

Deals in one session whose steps are judged by region, and in which regions others have explored. What is found of a
region is known of equal ones in other networks (`qimeng.planner.data.parts`). Knows nothing about stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qimeng.actions import kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.actions.large import unlike
from qimeng.envs.steps.loop import Search
from qimeng.envs.steps.next_kernels import prepare_actions
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State
from qimeng.interfaces import Action
from qimeng.planner.heuristic_facts import intents_in_order

FIRST = ("algebra", "cluster")
"""Kinds that are taken first, each action once: the regions are those that they leave."""

FEW = (6, 3)
"""Rewrites of a schedule that are tried at most: of the one that lowering chose, and of the fastest that came of it."""

Claim = Callable[[str], bool]
"""Whether nobody has explored the region with this signature yet; nobody else is told so again."""


class RegionSweep(Search):
    """Lowers each unlike region, the slowest first, and takes rewrites of its schedule, then of the best one's.

    Those that the region's family thinks worth trying come first.

    Args:
        claim: asked before a region is explored; all are by default.
        few: rewrites that are tried at most, in each of so many rounds.
    """

    def __init__(self, claim: Claim = lambda signature: True, few: Sequence[int] = FEW):
        self.claim, self.few = claim, tuple(few)

    def run(self, session: Session) -> str:
        """From the session's state until the budget is used up, or no region is left."""
        session.begin()
        for kind in FIRST:
            for action in [a for a in session.observe().actions if a.kind == kind and not a.regions]:
                if session.exhausted() is None and action in session.observe().actions:
                    session.step(action)
        base = session.state
        times = base.evaluation.region_ms if base.evaluation else {}
        for region in sorted(unlike(base.program), key=lambda r: -times.get(r.id, 0.0)):
            session.return_to(base)
            offered = {a for a in session.observe().actions if a.regions == (region.id,)}
            lowering = Action("lowering", (region.id,))
            if lowering not in offered or not self.claim(region.signature):
                continue
            for action in (lowering, *sorted(a for a in offered if a.kind == "library")):
                session.return_to(base)
                if (reason := session.exhausted()) is not None:
                    return reason
                session.step(action)
                if action == lowering and session.state is not base:
                    self._around(session, session.state, region.id)
        return session.exhausted() or "stop"

    def _around(self, session: Session, lowered: State, region: str) -> None:
        """Rewrites of the schedule, then of the fastest that came of it."""
        tried: set[tuple[str, Action]] = set()
        best = lowered
        for few in self.few:
            found = [best, *self._rewritten(session, best, region, tried, few)]
            faster = min(found, key=lambda s: s.ms if s.ms is not None else float("inf"))
            if faster is best:
                return
            best = faster

    def _rewritten(
        self, session: Session, state: State, region: str, tried: set[tuple[str, Action]], few: int
    ) -> Iterator[State]:
        session.return_to(state)
        seen, digest = session.observe(), state.program.digest
        here = seen.program.region(region)
        ms = seen.evaluation.region_ms.get(region, 0.0) if seen.evaluation else 0.0
        likely = [Action(kind, (region,), param) for kind, param in intents_in_order(here, ms, seen)]
        offered = [a for a in seen.actions if a.regions == (region,) and isinstance(kind_named(a.kind), ScheduleKind)]
        first = [a for a in likely if a in offered]
        ordered = [*first, *sorted(a for a in offered if a not in first)]
        chosen = [a for a in ordered if (digest, a) not in tried][:few]
        prepare_actions(session, chosen)
        for action in chosen:
            tried.add((digest, action))
            session.return_to(state)
            if session.exhausted() is not None:
                return
            if session.step(action).accepted:
                yield session.state


def claims(folder: Path) -> Claim:
    """Claims that processes on one machine share: an empty file for each region in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)

    def claim(signature: str) -> bool:
        try:
            (folder / signature).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    return claim


__all__ = ["Claim", "RegionSweep", "claims"]
