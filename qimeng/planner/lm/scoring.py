"""The policy: a causal language model scores the text of every legal action.

Deals in token ids. Knows nothing about programs, texts or training.

The state is computed once. Its keys and values are then what the tokens of each action see before them, and no action
sees another. So every action is scored as if it alone followed the state. After TWOSOME (Tan et al., "True Knowledge
Comes from Practice", https://arxiv.org/abs/2401.14151), which scores one action at a time.

A second head reads an action's last hidden state beside its numbers, such as what it may save at most, and adds to its
logit. The text has few digits, and what the action is worth need not be spread over the probabilities of all its
tokens. The head begins at zero, where the language model decides alone.
"""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

NORMALIZATIONS = ("none", "tokens")

Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Joint log-probabilities of actions, B x A; last hidden states: of actions, B x A x hidden, of states, B x hidden."""

TOGETHER = 4
"""Rows of similar length that a CPU computes at once, because padding costs time there. (Of 64 rows of a random walk
over the measured trees, padded to the longest, 45 % are tokens; by hand.) A GPU takes all."""


@dataclass(frozen=True)
class Scale:
    """How the joint log-probability l of an action of n tokens becomes its logit.

    Attributes:
        normalize: ``"none"``: l / temperature; ``"tokens"``: l / n / temperature, so that a long text is not less
            likely for being long.
        temperature: below 1 the policy is sharper than the language model.

    An untrained model's joint log-probability nearly rules out all but the shortest text, so PPO would explore nothing.
    The mean is therefore the default. Temperatures of 0.25 and less made PPO unstable where 0.5 and 1 did not
    (`benchmarks/planner.py scale`: two seeds, a fake judge).
    """

    normalize: str = "tokens"
    temperature: float = 0.5

    def __post_init__(self) -> None:
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, not {self.normalize!r}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make an equal one."""
        return asdict(self)


class ActionScorer(nn.Module):
    """A language model as policy and value.

    Args:
        lm: a `transformers` causal LM with a cache of keys and values (Llama, Qwen, Mistral, GPT-2 …), or such a model
            with a `peft` adapter.
        features: numbers that the value head reads beside the state's last hidden state.
        action_features: numbers of each action that the other head reads beside its last hidden state.
        scale: from log-probabilities to logits.

    Attributes:
        value: the value head.
        worth: what is added to an action's logit.
    """

    def __init__(self, lm: Any, features: int = 0, scale: Scale | None = None, action_features: int = 0):
        super().__init__()
        self.lm, self.features, self.scale, self.action_features = lm, features, scale or Scale(), action_features
        plain = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
        takes = inspect.signature(plain.forward).parameters
        self._named = "cache" if "cache" in takes else "past_key_values"  # its name since transformers 5.24
        hidden = lm.config.hidden_size
        self.value, self.worth = _head(hidden + features), _head(hidden + action_features)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.lm.get_input_embeddings().num_embeddings)

    def forward(
        self,
        state_ids: torch.Tensor,
        action_ids: torch.Tensor,
        features: torch.Tensor | None = None,
        action_features: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the policy, B x A, -inf for actions that do not exist; values, B.

        Args:
            state_ids: B x L int64, `PAD` on the left.
            action_ids: B x A x T int64, `PAD` on the right; A may be 0 where only the value is wanted.
            features: B x `features` float32.
            action_features: B x A x `action_features` float32.
        """
        logprob, ends, hidden = self._scored(state_ids, action_ids)
        count = (action_ids >= 0).sum(-1)
        length = count.clamp(min=1) if self.scale.normalize == "tokens" else 1
        worth = self.worth(_beside(ends, action_features)).squeeze(-1)
        logits = logprob / length / self.scale.temperature + worth
        return logits.masked_fill(count == 0, float("-inf")), self.value(_beside(hidden, features)).squeeze(-1)

    def states(self, state_ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        """What the value head reads: last hidden state and features, B x (hidden + `features`)."""
        nothing = state_ids.new_zeros(len(state_ids), 0, 1)
        return _beside(self._scored(state_ids, nothing)[2], features)

    def log_probs(self, state_ids: torch.Tensor, action_ids: torch.Tensor) -> torch.Tensor:
        """Joint log-probability of each action's tokens after the state's, B x A, neither normalised nor scaled."""
        return self._scored(state_ids, action_ids)[0]

    def _scored(self, state_ids: torch.Tensor, action_ids: torch.Tensor) -> Scored:
        """What the language model gives."""
        if state_ids.device.type != "cpu" or len(state_ids) <= TOGETHER:
            return self._joint(state_ids, action_ids)
        tokens = (state_ids >= 0).sum(1) + (action_ids >= 0).flatten(1).sum(1)
        order = torch.argsort(tokens)
        parts = [self._joint(state_ids[rows], action_ids[rows]) for rows in order.split(TOGETHER)]
        back = torch.argsort(order)
        joint, ends, hidden = (torch.cat(part)[back] for part in zip(*parts, strict=True))
        return joint, ends, hidden

    def _joint(self, state_ids: torch.Tensor, action_ids: torch.Tensor) -> Scored:
        states = state_ids[:, max(0, state_ids.shape[1] - int((state_ids >= 0).sum(1).max())) :]
        there, count = states >= 0, (action_ids >= 0).sum(-1)
        row, number = torch.nonzero(count, as_tuple=True)  # of each action that exists
        seen = self.lm(
            input_ids=states.clamp(min=0),
            attention_mask=there.long(),
            position_ids=(there.cumsum(1) - 1).clamp(min=0),
            output_hidden_states=True,
            use_cache=len(row) > 0,
            logits_to_keep=1,
        )
        hidden = seen.hidden_states[-1][:, -1].float()
        joint = torch.zeros(action_ids.shape[:2], device=hidden.device)
        ends = torch.zeros(*action_ids.shape[:2], hidden.shape[1], device=hidden.device)
        if not len(row):
            return joint, ends, hidden
        length = count[row, number]
        tokens = action_ids[row, number][:, : int(length.max())]
        valid = tokens >= 0
        for layer in seen[self._named].layers:
            layer.keys, layer.values = layer.keys.index_select(0, row), layer.values.index_select(0, row)
        out = self.lm(
            input_ids=tokens.clamp(min=0),
            attention_mask=torch.cat((there[row], valid), 1).long(),
            position_ids=there.sum(1)[row, None] + torch.arange(tokens.shape[1], device=tokens.device),
            **{self._named: seen[self._named]},
            output_hidden_states=True,
        )
        known = tokens.clamp(min=0)
        first = _said(seen.logits[:, -1].float()[row], known[:, 0])  # a token is predicted from its predecessor
        later = _said(out.logits[:, :-1].float(), known[:, 1:])
        found = torch.cat((first[:, None], later), 1) * valid
        last = out.hidden_states[-1][torch.arange(len(row), device=row.device), length - 1].float()
        return joint.index_put((row, number), found.sum(1)), ends.index_put((row, number), last), hidden


def _head(inputs: int) -> nn.Sequential:
    """From `inputs` numbers to one, which is 0 before training."""
    last = nn.Linear(64, 1)
    for zero in (last.weight, last.bias):
        nn.init.zeros_(zero)
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), last)


def _said(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each of `tokens`, of the shape of `logits` without its last axis."""
    return logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)


def _beside(hidden: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
    return hidden if features is None else torch.cat((hidden, features.to(hidden.dtype)), -1)


__all__ = ["ActionScorer", "Scale"]
