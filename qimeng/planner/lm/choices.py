"""Episodes of choices alone: where one action is offered, it is taken without asking.

Deals in steps and rewards. Knows nothing about what is offered, or why. A stored tree often has an answer for a single
action (in more than half of the states of walks over the measured trees): a policy learns nothing there that costs as
much to compute as anything else.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

EPISODES = 64
"""Episodes in a row without a choice after which one is shown all the same."""


class ChoicesAlone(gymnasium.Wrapper[dict[str, Any], Any, dict[str, Any], Any]):
    """The environment at those states where there is something to choose.

    What is taken without asking is paid with the choice before it, undiscounted; before the first choice of an episode
    it is not paid. An episode without any choice is passed over.

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
