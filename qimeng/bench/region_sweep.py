"""Explores the regions of a network one by one: what each action does to each of them.

Deals in one session whose steps are judged by region, and in which regions others have explored. What is found of a
region is known of equal ones in other networks (`qimeng.planner.data.parts`). Knows nothing about stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from qimeng.actions import kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.actions.large import unlike
from qimeng.envs.steps.loop import Search
from qimeng.envs.steps.next_kernels import prepare_actions
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Coder
from qimeng.planner.data.first_steps import first_steps
from qimeng.planner.heuristic_facts import intents_in_order
from qimeng.program.launch import CUDA_GRAPH
from qimeng.program.program import Program

FEW = (3, 1)
"""Rewrites of a schedule that are tried at most: of the one that lowering chose, and of the fastest that came of it."""


class Claims:
    """Which regions are explored, or were: an empty file for each, so that processes on one machine share them.

    Args:
        folder: of the files; None where nobody else explores.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def take(self, signature: str) -> bool:
        """Whether nobody has explored the region with this signature yet; nobody else is told so again."""
        if self.folder is None:
            return True
        try:
            (self.folder / signature).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def give_back(self, signature: str) -> None:
        """There was no time to explore it."""
        if self.folder is not None:
            (self.folder / signature).unlink(missing_ok=True)

    def left(self, program: Program, coder: Coder) -> bool:
        """Whether `program` has a region that can be lowered and that nobody has taken."""
        free = (r for r in unlike(program) if self.folder is None or not (self.folder / r.signature).exists())
        return any(coder.can_implement(region) is None for region in free)


class RegionSweep(Search):
    """Lowers each unlike region, the slowest first, and takes rewrites of its schedule, then of the best one's.

    Those that the region's family thinks worth trying come first. Before all that come the steps that make the regions
    (`qimeng.planner.data.first_steps`), and a CUDA graph of the whole; at the end the program with the best of each
    region, which is judged as a whole.

    Args:
        claims: of regions; a region that others have taken is left alone.
        few: rewrites that are tried at most, in each of so many rounds.
    """

    def __init__(self, claims: Claims | None = None, few: Sequence[int] = FEW):
        self.claims, self.few = claims or Claims(), tuple(few)

    def run(self, session: Session) -> str:
        """From the session's state until the budget is used up, or no region is left."""
        session.begin()
        for action in first_steps(session):
            if session.exhausted() is None:
                session.step(action)
        base = session.state
        graph = Action("launch", (), CUDA_GRAPH)
        if graph in session.observe().actions and session.exhausted() is None:
            session.step(graph)
            session.return_to(base)
        best: list[State] = []
        waiting = self._taken(session, base)
        region, after = next(waiting, None), next(waiting, None)
        while region is not None:
            session.return_to(base)
            prepare_actions(session, [Action("lowering", (r.id,)) for r in (region, after) if r is not None])
            found = self._explored(session, base, region)
            if (reason := session.exhausted()) is not None:
                for left in (region if found is None else None, after):
                    if left is not None:
                        self.claims.give_back(left.signature)
                return reason
            best += [found] if found is not None else []
            region, after = after, next(waiting, None)
        self._judge_together(session, base, best)
        return session.exhausted() or "stop"

    def _taken(self, session: Session, base: State) -> Iterator[Region]:
        """Regions that can be lowered and that nobody else has taken, the slowest first, each once."""
        times = base.evaluation.region_ms if base.evaluation else {}
        session.return_to(base)
        offered = set(session.observe().actions)
        for region in sorted(unlike(base.program), key=lambda r: -times.get(r.id, 0.0)):
            if Action("lowering", (region.id,)) in offered and self.claims.take(region.signature):
                yield region

    def _explored(self, session: Session, base: State, region: Region) -> State | None:
        """The fastest that came of actions on `region`; None where there was no time for one."""
        best = None
        session.return_to(base)
        lowering = Action("lowering", (region.id,))
        offered = [a for a in session.observe().actions if a.kind == "library" and a.regions == (region.id,)]
        for action in (lowering, *sorted(offered)):
            session.return_to(base)
            if session.exhausted() is not None:
                return best
            session.step(action)
            best = min((s for s in (best, base, session.state) if s is not None), key=_ms)
            if action == lowering and session.state is not base:
                best = min((best, self._around(session, session.state, region.id)), key=_ms)
        return best

    def _judge_together(self, session: Session, base: State, best: Sequence[State]) -> None:
        """The best of each region in one program: shows how far the sum of regions' times can be believed."""
        session.return_to(base)
        for state in best:
            for way in state.path():
                action = way.record.action if way.record is not None else None
                if action is not None and action.regions and action in session.observe().actions:
                    session.step(action)
        session.settle()

    def _around(self, session: Session, lowered: State, region: str) -> State:
        """The fastest that came of rewrites of the schedule, then of the fastest of those."""
        tried: set[tuple[str, Action]] = set()
        best = lowered
        for few in self.few:
            found = [best, *self._rewritten(session, best, region, tried, few)]
            faster = min(found, key=_ms)
            if faster is best:
                break
            best = faster
        return best

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


def _ms(state: State) -> float:
    return state.ms if state.ms is not None else float("inf")


__all__ = ["Claims", "RegionSweep"]
