"""The policy: a causal language model scores the text of every legal action in one pass.

Deals in token ids. Knows nothing about programs, texts or training.

A row holds the state's tokens once and behind them the tokens of all its actions. A mask lets an action's tokens see
the state and their own predecessors, never another action, and each action's positions go on from the state's end. So
every action is scored as if it alone followed the state, and the state is computed once. After TWOSOME (Tan et al.,
"True Knowledge Comes from Practice", https://arxiv.org/abs/2401.14151), which scores one action at a time.

A linear head reads an action's last hidden state and adds to its logit. So what the action is worth need not be spread
over the probabilities of all its tokens. The head begins at zero, where the language model decides alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

NORMALIZATIONS = ("none", "tokens")

Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Joint log-probabilities of actions and what the head adds, B x A each; hidden states of states, B x hidden."""

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


@dataclass(frozen=True)
class Packed:
    """States and their actions, one row a state: L state tokens (padded left), then M action tokens (padded right).

    Attributes:
        ids: B x (L + M) token ids; 0 where there is none.
        positions: B x (L + M): of the state's tokens from 0, of each action's tokens from the state's end.
        allowed: B x (L + M) x (L + M) bool: query, key; every query may see itself.
        segment: B x M: number of the action that a token belongs to.
        offset: B x M: place of a token in its action.
        valid: B x M bool: whether there is a token.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    allowed: torch.Tensor
    segment: torch.Tensor
    offset: torch.Tensor
    valid: torch.Tensor


def pack(state_ids: torch.Tensor, action_ids: torch.Tensor) -> Packed:
    """Lay states and actions out in rows, without the places that no row uses.

    Args:
        state_ids: B x L, `PAD` on the left.
        action_ids: B x A x T, `PAD` on the right; an action that is all `PAD` does not exist.
    """
    states = state_ids[:, max(0, state_ids.shape[1] - int((state_ids >= 0).sum(1).max())) :]
    lengths = (states >= 0).sum(1, keepdim=True)
    flat = action_ids.flatten(1)
    longest = int((flat >= 0).sum(1).max()) if flat.shape[1] else 0
    order = torch.argsort((flat < 0).to(torch.int8), dim=1, stable=True)[:, :longest]
    tokens = flat.gather(1, order)
    segment, offset = order // action_ids.shape[2], order % action_ids.shape[2]
    ids = torch.cat((states, tokens), 1)
    place = torch.cat(((torch.cumsum(states >= 0, 1) - 1).clamp(min=0), lengths + offset), 1)
    owner = torch.cat((torch.full_like(states, -1), segment), 1)
    size, device = ids.shape[1], ids.device
    before = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    own = (owner[:, None, :] == -1) | (owner[:, None, :] == owner[:, :, None])
    allowed = (before & own & (ids >= 0)[:, None, :]) | torch.eye(size, dtype=torch.bool, device=device)
    return Packed(ids.clamp(min=0), place, allowed, segment, offset, tokens >= 0)


class ActionScorer(nn.Module):
    """A language model as policy and value.

    Args:
        lm: a `transformers` causal LM whose attention takes a mask of query by key (Llama, Qwen, Mistral, GPT-2 …), or
            such a model with a `peft` adapter.
        features: numbers that the value head reads beside the state's last hidden state.
        scale: from log-probabilities to logits.

    Attributes:
        value: the value head.
        worth: what an action's last hidden state adds to its logit.
    """

    def __init__(self, lm: Any, features: int = 0, scale: Scale | None = None):
        super().__init__()
        self.lm, self.features, self.scale = lm, features, scale or Scale()
        hidden = lm.config.hidden_size
        last, self.worth = nn.Linear(64, 1), nn.Linear(hidden, 1, bias=False)
        for zero in (last.weight, last.bias, self.worth.weight):
            nn.init.zeros_(zero)
        self.value = nn.Sequential(nn.Linear(hidden + features, 64), nn.Tanh(), last)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.lm.get_input_embeddings().num_embeddings)

    def forward(
        self, state_ids: torch.Tensor, action_ids: torch.Tensor, features: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the policy, B x A, -inf for actions that do not exist; values, B.

        Args:
            state_ids: B x L int64, `PAD` on the left.
            action_ids: B x A x T int64, `PAD` on the right; A may be 0 where only the value is wanted.
            features: B x `features` float32.
        """
        logprob, worth, hidden = self._scored(state_ids, action_ids)
        count = (action_ids >= 0).sum(-1)
        length = count.clamp(min=1) if self.scale.normalize == "tokens" else 1
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
        """What one pass gives; the hidden states are the last ones of the states."""
        if state_ids.device.type != "cpu" or len(state_ids) <= TOGETHER:
            return self._joint(state_ids, action_ids)
        tokens = (state_ids >= 0).sum(1) + (action_ids >= 0).flatten(1).sum(1)
        order = torch.argsort(tokens)
        parts = [self._joint(state_ids[rows], action_ids[rows]) for rows in order.split(TOGETHER)]
        back = torch.argsort(order)
        joint, worth, hidden = (torch.cat(part)[back] for part in zip(*parts, strict=True))
        return joint, worth, hidden

    def _joint(self, state_ids: torch.Tensor, action_ids: torch.Tensor) -> Scored:
        row = pack(state_ids, action_ids)
        kept = row.segment.shape[1] + 1  # the state's last token and all after it
        dtype = self.lm.dtype
        mask = torch.zeros(row.allowed.shape, dtype=dtype, device=row.ids.device)
        mask.masked_fill_(~row.allowed, torch.finfo(dtype).min)
        out = self.lm(
            input_ids=row.ids,
            attention_mask=mask[:, None],
            position_ids=row.positions,
            output_hidden_states=True,
            use_cache=False,
            logits_to_keep=kept,
        )
        logits = out.logits.float()
        place = torch.arange(kept - 1, device=row.ids.device)
        source = torch.where(row.offset == 0, 0, place)  # what a token is predicted from: its predecessor
        batch = torch.arange(len(row.ids), device=row.ids.device)[:, None]
        tokens = row.ids[:, row.ids.shape[1] - kept + 1 :]
        found = logits[batch, source, tokens] - logits.logsumexp(-1).gather(1, source)
        hidden = out.hidden_states[-1][:, -kept:].float()
        last = row.valid & (row.offset + 1 == (action_ids >= 0).sum(-1).gather(1, row.segment))
        none = torch.zeros(action_ids.shape[:2], device=found.device)
        joint = none.scatter_add(1, row.segment, found * row.valid)
        worth = none.scatter_add(1, row.segment, self.worth(hidden[:, 1:]).squeeze(-1) * last)
        return joint, worth, hidden[:, 0]


def _beside(hidden: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
    return hidden if features is None else torch.cat((hidden, features.to(hidden.dtype)), -1)


__all__ = ["ActionScorer", "Packed", "Scale", "pack"]
