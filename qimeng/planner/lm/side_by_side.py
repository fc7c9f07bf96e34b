"""Environments side by side, whose steps are judged beside each other where the judge works on several at a time.

Deals in the moment at which requests are submitted. The steps themselves, and what they find, are those of
stable-baselines3's `DummyVecEnv`: one environment after the other.
"""

from __future__ import annotations

from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.steps.ahead import submit_ahead


class SideBySide(DummyVecEnv):
    """Submits what all environments' steps ask the judge, then takes the steps.

    A forced move that follows a step, and the start program of a new episode, are judged when it is their turn.
    """

    def step_wait(self) -> VecEnvStepReturn:
        """Take the steps of all environments."""
        for env, index in zip(self.envs, self.actions, strict=True):
            base = env.unwrapped
            assert isinstance(base, KernelOptimizationEnv)
            offered = base.observed.actions
            if 0 <= int(index) < len(offered):
                submit_ahead([(base.session, offered[int(index)])])
        return super().step_wait()


__all__ = ["SideBySide"]
