"""Environments side by side, whose steps are judged beside each other where the judge works on several at a time.

Deals in the moment at which requests are submitted. The steps themselves, and what they find, are those of
stable-baselines3's `DummyVecEnv`: one environment after the other.
"""

from __future__ import annotations

from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.steps.ahead import submit_ahead
from qimeng.interfaces import Ticket


class SideBySide(DummyVecEnv):
    """Submits what all environments' steps ask the judge, then takes the steps.

    The start programs of the next episodes are judged while the present ones go on: to open the judge of a computation
    takes longer than a step. A forced move that follows a step is judged when it is its turn.
    """

    def reset(self) -> VecEnvObs:
        """Begin an episode in each environment."""
        ahead: dict[str, Ticket] = {}
        for base, seed in zip(self._bases, self._seeds, strict=True):
            base.ahead = ahead  # one that two of them draw is judged once
            base.prepare(seed)
        found = super().reset()
        for base in self._bases:
            base.prepare()
        return found

    def step_wait(self) -> VecEnvStepReturn:
        """Take the steps of all environments."""
        for base, index in zip(self._bases, self.actions, strict=True):
            offered = base.observed.actions
            if 0 <= int(index) < len(offered):
                submit_ahead([(base.session, offered[int(index)])])
        found = super().step_wait()
        for base, over in zip(self._bases, found[2], strict=True):
            if over:
                base.prepare()
        return found

    @property
    def _bases(self) -> list[KernelOptimizationEnv]:
        """The environments without what is wrapped around them."""
        bases = [env.unwrapped for env in self.envs]
        return [base for base in bases if isinstance(base, KernelOptimizationEnv)]


__all__ = ["SideBySide"]
