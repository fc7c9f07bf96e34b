"""The three roles: planner, coder and evaluator.

Deals in abstract classes of one or two methods. Knows nothing about who plays a role.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qimeng.interfaces.facts import Facts
from qimeng.interfaces.results import Evaluation
from qimeng.interfaces.steps import Action, Observation, Patch, Request

if TYPE_CHECKING:
    from qimeng.graph.region import Region
    from qimeng.program.program import Program
    from qimeng.program.schedule import Schedule
    from qimeng.store import Store


class Planner(ABC):
    """Chooses what to do next."""

    @abstractmethod
    def choose(self, observation: Observation) -> Action:
        """One of `observation.actions`."""


class Coder(ABC):
    """Turns an action into a small patch.

    Attributes:
        free_hand: whether it can work on a kernel that has no schedule, by changing its text.
    """

    free_hand: bool = False

    @abstractmethod
    def write(self, request: Request) -> Patch:
        """The patch that carries out `request.action`.

        Raises:
            IllegalAction: the action does not apply.
            CoderError: the coder could not write it.
        """

    def can_implement(self, region: Region) -> str | None:
        """None where this coder can write kernels for `region`, else the reason in a few words."""
        return None

    def facts(self, region: Region) -> Facts | None:
        """The loop nest of `region` in numbers; None where this coder has no schedule for it."""
        return None

    def shared_bytes(self, region: Region, schedule: Schedule) -> int:
        """Shared memory in bytes that a block of `region` needs under `schedule`."""
        return 0

    def use_store(self, store: Store, spec: str) -> None:  # noqa: B027  (most coders remember nothing)
        """Keep in `store` what writing cost time or money, and answer from it; called once, before the first `write`.

        Args:
            store: the project's.
            spec: digest of the specification that is optimized.
        """

    def remarks(self) -> tuple[str, ...]:
        """What a result's notes should say about its work (what it cost); a sentence each."""
        return ()


class Evaluator(ABC):
    """Judges programs: are they right, and how fast."""

    @abstractmethod
    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Judge `program` with `patch` applied (the best of its alternatives), or `program` itself."""

    def final(self, program: Program) -> Evaluation:
        """Verify `program` again, as a whole and in a fresh process; by default the same as `evaluate`."""
        return self.evaluate(program)

    def compare_with(self, modes: Sequence[str], limit_s: float) -> None:  # noqa: B027  (estimates have no baselines)
        """Make torch.compile's programs ready in the background, so that the final verification times them as well.

        Args:
            modes: of torch.compile.
            limit_s: seconds that compiling in one mode may take.

        Raises:
            ValueError: torch.compile has no such mode.
        """

    def sanitize_with(self, tools: Sequence[str]) -> None:  # noqa: B027  (estimates run no kernel)
        """Have the final verification run tools of compute-sanitizer, where programs run on a GPU.

        Args:
            tools: such as ``"memcheck"``; see `qimeng.envs.sanitizer.TOOLS`.

        Raises:
            QimengError: there is no such tool.
        """

    def close(self) -> None:  # noqa: B027  (most evaluators hold nothing)
        """Give back processes and memory."""


__all__ = ["Coder", "Evaluator", "Planner"]
