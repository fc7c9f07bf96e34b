"""The stable-baselines3 policy around an `ActionScorer`, for sb3-contrib's `MaskablePPO`.

Deals in stable-baselines3's interface. What the policy is, is for `qimeng.planner.lm.scoring`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule

from qimeng.planner.lm.scoring import ActionScorer

Masks = np.ndarray | torch.Tensor | None


class Rates(torch.optim.AdamW):
    """AdamW whose groups of parameters have ``times``: how many times the rate theirs is.

    stable-baselines3 sets the rate of all groups to one number before each update.
    """

    def step(self, closure: Any = None) -> Any:
        """One step, each group at its own rate."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= group["times"]
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


class LanguageModelPolicy(MaskableActorCriticPolicy):
    """Chooses among the actions whose tokens the observation holds; none that it lacks can be chosen, mask or not.

    The model never leaves evaluation mode: dropout would make the policy that is trained another than the one that
    acted.

    Args:
        observation_space: `qimeng.planner.lm.reading.Reader.space`.
        action_space: `Discrete`, as many as the observation has room for.
        lr_schedule: learning rate by progress.
        scorer: the model; what of it requires a gradient is trained. It is used, not copied.
        anchor: a frozen model that the policy is to stay near; none by default.
        heads: how many times the learning rate that of the scorer's heads is.
        optimizer_class: made with two groups of parameters, the heads' last; `Rates` by default.
        optimizer_kwargs: for the optimizer, learning rate left out.

    Raises:
        ValueError: the observation has token ids that the model does not know.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        scorer: ActionScorer,
        anchor: ActionScorer | None = None,
        heads: float = 1.0,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
    ):
        top = int(np.max(observation_space["state_ids"].high))  # type: ignore[attr-defined]
        if top >= scorer.vocabulary:
            raise ValueError(
                f"the observation's token ids go up to {top}, the model knows {scorer.vocabulary}: the tokenizer is "
                "not this model's"
            )
        kwargs = {"eps": 1e-5, "weight_decay": 0.0} if optimizer_kwargs is None else optimizer_kwargs
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[],
            ortho_init=False,
            normalize_images=False,
            optimizer_class=optimizer_class or Rates,
            optimizer_kwargs=kwargs,
        )
        self.scorer, self.anchor, self.heads = scorer.eval(), anchor, heads
        own = {id(p) for head in (scorer.value, scorer.worth) for p in head.parameters()}
        trained = [p for p in scorer.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if id(p) not in own], "times": 1.0},
            {"params": [p for p in trained if id(p) in own], "times": heads},
        ]
        self.optimizer = self.optimizer_class([g for g in groups if g["params"]], lr=lr_schedule(1), **kwargs)  # type: ignore[call-arg]

    def _build(self, lr_schedule: Schedule) -> None:
        """No parts but the scorer."""

    def set_training_mode(self, mode: bool) -> None:
        """Stay in evaluation mode."""
        super().set_training_mode(False)

    def forward(
        self, obs: Any, deterministic: bool = False, action_masks: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, values and log-probabilities of the actions."""
        distribution, values, _ = self._look(obs, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: Any, actions: torch.Tensor, action_masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values, log-probabilities of `actions`, and what a bonus is paid for.

        That is the policy's entropy, or with an anchor minus its divergence KL(policy || anchor's) (Ziegler et al.,
        "Fine-Tuning Language Models from Human Preferences", https://arxiv.org/abs/1909.08593): of the divergence from
        chance, entropy is the same but for a constant. The divergence is that among all actions that the observation
        holds, mask or not: the advantages of those that may be chosen move the others' share as well, and where those
        may be chosen one day, nothing but the anchor says what they are worth.
        """
        distribution, values, logits = self._look(obs, action_masks)
        bonus = distribution.entropy() if self.anchor is None else -self._away(logits, obs)
        return values, distribution.log_prob(actions), bonus

    def get_distribution(self, obs: Any, action_masks: np.ndarray | None = None) -> MaskableDistribution:
        """The policy in these states."""
        return self._look(obs, action_masks)[0]

    def predict_values(self, obs: Any) -> torch.Tensor:
        """The values of these states, B x 1; no action is scored."""
        nothing = self._action_ids(obs)[:, :0]
        empty = self._action_features(obs)[:, :0]
        return self.scorer(obs["state_ids"].long(), nothing, obs["features"], empty)[1].unsqueeze(-1)  # type: ignore[no-any-return]

    def _away(self, logits: torch.Tensor, obs: Any) -> torch.Tensor:
        """The divergence of what these logits say from what the anchor says."""
        assert self.anchor is not None
        with torch.no_grad():
            before, _ = self.anchor(*self._given(obs))
        own, there = (x.masked_fill(x == float("-inf"), -1e8).log_softmax(-1) for x in (logits, before))
        return (own.exp() * (own - there)).sum(-1)

    def _look(self, obs: Any, masks: Masks) -> tuple[MaskableDistribution, torch.Tensor, torch.Tensor]:
        """The policy, the values, and the logits of all actions that the observation holds."""
        action_ids = self._action_ids(obs)
        legal = action_ids[:, :, 0] >= 0
        if masks is not None:
            legal = legal & torch.as_tensor(masks, dtype=torch.bool, device=legal.device).reshape(legal.shape)
        logits, values = self.scorer(*self._given(obs))
        distribution = self.action_dist.proba_distribution(action_logits=logits.masked_fill(~legal, -1e8))
        distribution.apply_masking(legal)
        return distribution, values.unsqueeze(-1), logits

    def _given(self, obs: Any) -> tuple[torch.Tensor, ...]:
        """What a scorer takes."""
        return obs["state_ids"].long(), self._action_ids(obs), obs["features"], self._action_features(obs)

    def _action_features(self, obs: Any) -> torch.Tensor:
        """B x actions x numbers."""
        assert isinstance(self.action_space, spaces.Discrete)
        flat: torch.Tensor = obs["action_features"]
        return flat.view(len(flat), int(self.action_space.n), -1)

    def _action_ids(self, obs: Any) -> torch.Tensor:
        """B x actions x tokens."""
        assert isinstance(self.action_space, spaces.Discrete)
        flat: torch.Tensor = obs["action_ids"].long()
        return flat.view(len(flat), int(self.action_space.n), -1)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "scorer": self.scorer,
            "anchor": self.anchor,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }


__all__ = ["LanguageModelPolicy", "Rates"]
