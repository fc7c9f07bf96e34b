"""Two of the three roles: planner and coder; the third is `qimeng.interfaces.evaluator`.

Deals in abstract classes of one or two methods. Knows nothing about who plays a role.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from qimeng.interfaces.steps import Action, Observation, Patch, Request

if TYPE_CHECKING:
    from qimeng.graph.opgraph import OpGraph
    from qimeng.graph.region import Region
    from qimeng.program.program import Implementation, Program
    from qimeng.program.schedule import Schedule


class Planner(ABC):
    """Chooses what to do next."""

    @abstractmethod
    def choose(self, observation: Observation) -> Action:
        """One of `observation.actions`."""


class Memory(ABC):
    """What a coder keeps from one request to the next; it stands beside the coder (`Coder.memory`)."""

    @abstractmethod
    def use_store(self, store: Any, spec: str) -> None:
        """Keep in `store` what writing cost time or money, and answer from it; called once, before the first `write`.

        Args:
            store: the project's `qimeng.store.Store`.
            spec: digest of the specification that is optimized.
        """

    @abstractmethod
    def remarks(self) -> tuple[str, ...]:
        """What a result's notes should say about the coder's work (what it cost); a sentence each."""


class Coder(ABC):
    """Writes the kernels that an action asks for.

    What an action does to the graph is the kind's own (`qimeng.actions.Kind.apply`).

    Attributes:
        free_hand: whether it can work on a kernel that has no schedule, by changing its text.
        schedules: whether it prints a region's family's schedules, so that it can lower again what others wrote.
        languages: what it writes kernels in (`qimeng.backend`), the usual one first.
        memory: what it keeps between requests; None for coders that keep nothing.
    """

    languages: tuple[str, ...] = ("triton",)
    free_hand: bool = False
    schedules: bool = False
    memory: Memory | None = None

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


class Prints(ABC):
    """What a coder is as well that prints a region's kernel from a schedule."""

    @abstractmethod
    def print(self, region: Region, schedule: Schedule) -> Implementation:
        """The kernel of `region` under `schedule`.

        Raises:
            Unsupported: the family does not cover the region, or not under this schedule.
        """


class Reprints(ABC):
    """What a coder is as well that can print a program again for the same computation at other sizes."""

    @abstractmethod
    def reprint(self, program: Program, graph: OpGraph) -> Program:
        """`program` for `graph`, which has the same operators at other sizes.

        Raises:
            CoderError: it cannot be done.
        """


__all__ = ["Coder", "Memory", "Planner", "Prints", "Reprints"]
