"""Conversations of several turns with a model that is trained: it answers, gates and judge reply, it answers again.

Deals in requests, replies and what a grader says to them. Knows nothing about tokens' gradients, or about how a grade
is found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.llm.chat import Message
from qimeng.finetune.rewards import returns
from qimeng.finetune.sampling import Sampled, Sampler


@dataclass(frozen=True)
class Asked:
    """A request to the model.

    Attributes:
        key: of the request; answers to the same one are compared.
        messages: the conversation that begins it.
    """

    key: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Answered:
    """A reply to be graded.

    Attributes:
        key: of the request.
        messages: the conversation before it.
        text: what the model said.
        finished: whether it ended before it was cut off.
        place: number of the trajectory, so that a grader can tell a repeated answer.
    """

    key: str
    messages: tuple[Message, ...]
    text: str
    finished: bool
    place: int = 0


@dataclass(frozen=True)
class Graded:
    """What a reply is worth.

    Attributes:
        reward: of this turn (`qimeng.finetune.rewards.turn_reward`).
        right: whether it passed every gate.
        share: PR: share of the time that generated kernels take.
        speedup: over what it is compared with; 0 where it is not right.
        failure: gate and class of the failure; empty where it is right.
        then: the conversation that goes on; empty where it ends.
        counted: whether it may be learnt from; False where the machine, not the reply, failed.
    """

    reward: float
    right: bool
    share: float = 0.0
    speedup: float = 0.0
    failure: str = ""
    then: tuple[Message, ...] = ()
    counted: bool = True


class Grader(ABC):
    """Finds out what replies are worth."""

    @abstractmethod
    def grade(self, answers: Sequence[Answered]) -> Sequence[Graded]:
        """The grades of `answers`, in their order; all of one turn are asked about together."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One reply, with its grade."""

    sampled: Sampled
    graded: Graded


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One conversation.

    Attributes:
        key: of the request.
        turns: in order.
    """

    key: str
    turns: tuple[Turn, ...]

    def returns(self, gamma: float = 1.0) -> list[float]:
        """G of each turn."""
        return returns([turn.graded.reward for turn in self.turns], gamma)

    @property
    def counted(self) -> bool:
        """Whether every grade is one of the reply."""
        return all(turn.graded.counted for turn in self.turns)


def rollout(
    sampler: Sampler, grader: Grader, asked: Sequence[Asked], group: int, turns: int, seed: int
) -> list[Trajectory]:
    """`group` conversations about each request, of at most `turns` turns.

    A conversation ends where its grade says so.

    Args:
        sampler: the model.
        grader: gates and judge.
        asked: requests.
        group: conversations about each.
        turns: most replies in each.
        seed: of what is drawn.

    Raises:
        ValueError: the grader gave another number of grades than it got answers.
    """
    keys = [one.key for one in asked for _ in range(group)]
    open_now = {n: one.messages for n, one in enumerate(one for one in asked for _ in range(group))}
    done: list[list[Turn]] = [[] for _ in keys]
    for number in range(turns):
        places = list(open_now)
        if not places:
            break
        drawn = sampler.sample([open_now[n] for n in places], seed * turns + number)
        answers = [Answered(keys[n], open_now[n], s.text, s.finished, n) for n, s in zip(places, drawn, strict=True)]
        grades = grader.grade(answers)
        if len(grades) != len(answers):
            raise ValueError(f"{len(answers)} answers got {len(grades)} grades: a grader gives one for each")
        for n, sampled, graded in zip(places, drawn, grades, strict=True):
            done[n].append(Turn(sampled, graded))
            if graded.then:
                open_now[n] = graded.then
            else:
                del open_now[n]
    return [Trajectory(key, tuple(found)) for key, found in zip(keys, done, strict=True)]


__all__ = ["Answered", "Asked", "Graded", "Grader", "Trajectory", "Turn", "rollout"]
