"""Rewards: what a planner is trained to do.

Deals in numbers made from what a step found out. Knows nothing about programs. `qimeng.envs.judge.ranking` compares
times, so rewards and searches prefer the same programs. Each reward is an object with its formula in its docstring; it
is reset at the start of an episode and may be copied in the middle.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qimeng.envs.judge.ranking import gain, margin
from qimeng.interfaces import Evaluation, Gate, Step


@dataclass(frozen=True)
class Transition:
    """What a step found out: evaluations of the programs around it.

    Attributes:
        step: the action and its evaluation; None for an index that named no action.
        number: of the step in its episode, from 1.
        before: of the program before the step; None where it has none.
        after: of the program after it.
        best_before: of the best program before the step.
        best_after: of the best program after it.
    """

    step: Step | None
    number: int
    before: Evaluation | None = None
    after: Evaluation | None = None
    best_before: Evaluation | None = None
    best_after: Evaluation | None = None

    @property
    def failed(self) -> bool:
        """True where the step was refused or named no action."""
        return self.step is None or not self.step.accepted


class Reward(ABC):
    """A reward of one episode.

    Attributes:
        low: least reward of a step.
        high: greatest reward of a step.
    """

    low: float
    high: float

    def reset(self) -> None:
        """Begin an episode."""
        return None

    @abstractmethod
    def update(self, transition: Transition) -> float:
        """The reward of a step, in [`low`, `high`]."""


class MilestoneReward(Reward):
    """Milestones of speedup, each paid once, when it is passed by more than the noise.

    For step t with device time m_t, time e_t of eager (timed in turns with it) and noise n_t (`ranking.margin`)::

        r_t = -cost
              - failure                       where the step was refused or named no action
              + correct                       at the first accepted step that was judged
              + prize * #{M in milestones not yet paid : e_t / m_t >= M (1 + n_t)}

    Nothing is paid twice, so neither cycling nor many right but useless steps gain anything. Milestones with a margin
    trained better planners than the raw speedup: 96.8 % against 60.4 % of problems faster than torch.compile (CUDA
    Agent, table 2).

    Args:
        milestones: speedups over eager.
        prize: for each milestone.
        correct: for the first right patch.
        failure: for a refused step.
        cost: of every step.
    """

    def __init__(
        self,
        milestones: tuple[float, ...] = (1.05, 1.2, 1.5, 2.0, 3.0),
        prize: float = 1.0,
        correct: float = 0.1,
        failure: float = 0.1,
        cost: float = 0.01,
    ):
        self.milestones, self.prize, self.correct = tuple(sorted(milestones)), prize, correct
        self.failure, self.cost = failure, cost
        self.low, self.high = -cost - failure, correct + prize * len(milestones) - cost
        self.reset()

    def reset(self) -> None:
        """No milestone is paid yet."""
        self._paid, self._was_right = 0, False

    def update(self, transition: Transition) -> float:
        """The reward of a step."""
        reward = -self.cost
        if transition.failed:
            return reward - self.failure
        step = transition.step
        if step is None or step.evaluation is None:
            return reward
        if not self._was_right:
            self._was_right = True
            reward += self.correct
        after = transition.after
        if after is not None and after.speedup is not None:
            reached = sum(after.speedup >= m * (1 + margin(after)) for m in self.milestones)
            reward += self.prize * max(0, reached - self._paid)
            self._paid = max(self._paid, reached)
        return reward


class PaperReward(Reward):
    """The rule-based reward of the MTMC paper (overview figure), its three parts summed.

    For step t::

        r_t = compiled + correct + faster - decay * t

        compiled = 0.1 where the patch was written, compiled and fits the device, else -1.0 (and nothing more)
        correct  = 0.5 where the result is right, else -0.5
        faster   = 1.0 where the step is right and faster than the program before it, beyond noise (`ranking`)

    Steps that only change the graph, and `stop`, get the decay alone. The paper states neither the coefficient of its
    step-proportional decay nor that the parts are summed: both are choices of ours.

    Args:
        decay: for each step taken so far.
        steps: longest episode, which bounds the decay.
    """

    def __init__(self, decay: float = 0.01, steps: int = 64):
        self.decay, self.steps = decay, steps
        self.low, self.high = -1.0 - decay * steps, 1.6 - decay

    def update(self, transition: Transition) -> float:
        """The reward of a step."""
        reward = -self.decay * min(transition.number, self.steps)
        step = transition.step
        if step is None:
            return reward - 1.0
        if step.evaluation is None:
            return reward if step.accepted else reward - 1.0
        if not step.accepted:
            early = step.evaluation.gate in (Gate.WRITE, Gate.COMPILE, Gate.RESOURCES)
            return reward - 1.0 if early else reward + 0.1 - 0.5
        after, before = transition.after, transition.before
        gained = gain(after, before)
        faster = after is not None and gained is not None and gained * (1 - margin(after, before)) > 1
        return reward + 0.1 + 0.5 + (1.0 if faster else 0.0)


class LogSpeedupReward(Reward):
    """The logarithm of what a step gains on the best program so far.

    For step t::

        r_t = log(b_{t-1} / b_t) - failure where the step was refused or named no action

    with b_t the best device time after step t, as a share of eager's (`ranking.gain`). The sum over an episode is the
    log of the whole gain, whatever the path.

    Args:
        failure: for a refused step.
        limit: greatest reward of a step, in nepers.
    """

    def __init__(self, failure: float = 0.02, limit: float = 8.0):
        self.failure, self.low, self.high = failure, -failure, limit

    def update(self, transition: Transition) -> float:
        """The reward of a step."""
        if transition.failed:
            return -self.failure
        gained = gain(transition.best_after, transition.best_before)
        return min(self.high, math.log(gained)) if gained else 0.0


class AnytimeReward(LogSpeedupReward):
    """`LogSpeedupReward`, discounted by evaluations: what is found soon is worth more.

    For step t, with n_t the steps of the episode, t included, that were judged::

        r_t = discount^(n_t - 1) log(b_{t-1} / b_t) - failure where the step was refused or named no action

    Steps of the graph alone, which cost no evaluation, discount nothing: `gamma` of PPO, which would, stays 1. Over an
    episode this is the mean of log(b_0 / b) over the number of evaluations that one can afford, where that is as likely
    to be n as a run of n throws, each of which goes on with probability `discount`.

    By default a refused step costs its evaluation alone, after which gains are worth less: in a program of a hundred
    regions a step gains a hundredth, and any fixed price would outweigh it.

    Args:
        discount: of a gain, for each evaluation before it.
        failure: for a refused step.
        limit: greatest reward of a step, in nepers.
    """

    def __init__(self, discount: float = 0.95, failure: float = 0.0, limit: float = 8.0):
        super().__init__(failure, limit)
        self.discount = discount
        self.reset()

    def reset(self) -> None:
        """Nothing was judged yet."""
        self._judged = 0

    def update(self, transition: Transition) -> float:
        """The reward of a step."""
        self._judged += transition.step is not None and transition.step.evaluation is not None
        paid = super().update(transition)
        return paid if transition.failed else paid * self.discount ** max(0, self._judged - 1)


class CoverageReward(Reward):
    """Another reward, and a share of it for work that generated kernels really do.

    For step t, with s_t the share of the present program's device time in generated kernels::

        r_t = inner_t + weight * (s_t - s_{t-1})        s_0 = 0; s_t = s_{t-1} where a step does not tell

    Dr. Kernel pays ``weight * PR`` for each right program, PR = time in generated kernels over all time (equations 7
    and 8, weight 0.5), against kernels that are right and do next to nothing. As a difference it is paid once: over an
    episode it sums to the weight times the last program's share, whatever the path.

    Args:
        inner: the other reward.
        weight: for a program that spends all its time in generated kernels.
    """

    def __init__(self, inner: Reward, weight: float = 0.5):
        if weight < 0:
            raise ValueError(f"the weight of the coverage must not be negative, got {weight}")
        self.inner, self.weight = inner, weight
        self.low, self.high = inner.low - weight, inner.high + weight
        self.reset()

    def reset(self) -> None:
        """Nothing is generated yet."""
        self.inner.reset()
        self._share = 0.0

    def update(self, transition: Transition) -> float:
        """The reward of a step."""
        before, step = self._share, transition.step
        if step is not None and step.accepted and step.evaluation is not None:
            share = step.evaluation.generated_share
            self._share = before if share is None else share
        return self.inner.update(transition) + self.weight * (self._share - before)


REWARDS: Mapping[str, Callable[[], Reward]] = {
    "milestones": MilestoneReward,
    "paper": PaperReward,
    "log-speedup": LogSpeedupReward,
    "anytime": AnytimeReward,
}
"""Name to what makes the reward of one environment."""


def make_reward(name: str, coverage: float = 0.0) -> Reward:
    """The reward called `name`, with `CoverageReward` of that weight around it where it is not 0.

    Raises:
        ValueError: an unknown name; the message lists the names; a negative weight.
    """
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; known: {', '.join(sorted(REWARDS))}")
    made = REWARDS[name]()
    return CoverageReward(made, coverage) if coverage else made


__all__ = [
    "REWARDS",
    "AnytimeReward",
    "CoverageReward",
    "LogSpeedupReward",
    "MilestoneReward",
    "PaperReward",
    "Reward",
    "Transition",
    "make_reward",
]
