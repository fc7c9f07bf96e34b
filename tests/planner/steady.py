"""A planner and a search as another package brings them by entry points; nothing of `qimeng` names this file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qimeng.envs.steps.session import Session
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.search import Search, out_of_budget


class Steady(Planner):
    """Takes the first of fusion and lowering that it is offered, then stops."""

    def choose(self, observation: Observation) -> Action:
        """By kind alone."""
        for kind in ("fusion", "lowering", "stop"):
            for action in observation.actions:
                if action.kind == kind:
                    return action
        raise AssertionError("stop is always offered")


class Rounds(Search):
    """The planner's trajectory from the start, `rounds` times."""

    def __init__(self, planner: Planner, rounds: int = 1):
        self.planner, self.rounds = planner, rounds

    def run(self, session: Session) -> str:
        """One branch a round."""
        session.begin()
        ended = "stop"
        for _ in range(self.rounds):
            branch = session.fork()
            while (ended := branch.exhausted() or "") == "":
                branch.step(self.planner.choose(branch.observe()))
            if out_of_budget(branch):
                break
        return ended


@contextmanager
def installed(folder: Path, planners: str = "", searches: str = "") -> Iterator[None]:
    """A package on the path whose metadata has these lines of entry points."""
    import sys

    about = folder / "steady-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: steady\nVersion: 1.0\n")
    text = f"[qimeng.planners]\n{planners}\n\n[qimeng.searches]\n{searches}\n"
    (about / "entry_points.txt").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
