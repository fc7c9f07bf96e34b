"""Episodes without forced moves: if only one action is offered, it is taken without asking.

Deals in steps and rewards. Knows nothing about what is offered, or why. A stored tree often has an answer for only one
action (in more than half of the states on walks through the measured trees). A policy learns nothing there, at the full
cost of computing it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

EPISODES = 64
"""After this many episodes in a row without a choice, one is shown anyway."""


class ChoicesAlone(gymnasium.Wrapper[dict[str, Any], Any, dict[str, Any], Any]):
    """The environment, reduced to states with at least two actions.

    The reward of a forced move is added to the choice before it, undiscounted. Rewards before the first choice are
    dropped. An episode without any choice is skipped.

    Args:
        env: has `action_masks`.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode, and go on to its first choice."""
        for episode in range(EPISODES):
            seen, info = self.env.reset(seed=seed if episode == 0 else None, options=options)
            seen, _, terminated, truncated, info = self._onward(seen, 0.0, False, False, info)
            if not (terminated or truncated):
                return seen, info
        return self.env.reset(options=options)

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Take a step, and go on to the next choice."""
        return self._onward(*self.env.step(action))

    def action_masks(self) -> np.ndarray:
        """Which indices name an action that is offered (sb3-contrib looks for this)."""
        masks: np.ndarray = self.env.get_wrapper_attr("action_masks")()
        return masks

    def _onward(
        self, seen: dict[str, Any], reward: Any, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        while not (terminated or truncated) and (offered := self.action_masks()).sum() == 1:
            seen, more, terminated, truncated, info = self.env.step(int(offered.argmax()))
            reward += more
        return seen, reward, terminated, truncated, info


__all__ = ["EPISODES", "ChoicesAlone"]
