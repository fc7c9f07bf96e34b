"""Warm start of the value head on the returns of the policy's own episodes.

Deals in episodes and returns. Knows nothing about PPO, or about how the policy came to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.planner.lm.choices import ChoicesAlone
from qimeng.planner.lm.ranges import POSITIVE
from qimeng.planner.lm.weights import PlannerModel


@dataclass(frozen=True)
class ValueStart:
    """How the value head is fitted before PPO.

    Attributes:
        episodes: played by the policy as it is; 0 leaves the head alone.
        epochs: passes over their states.
        batch: states a step of the optimizer.
        rate: learning rate.
        seed: of the episodes and of the order of the states.
    """

    episodes: int = 64
    epochs: int = 40
    batch: int = field(default=64, metadata=POSITIVE)
    rate: float = 1e-3
    seed: int = 0


def pretrain_value(
    model: PlannerModel, env: ChoicesAlone, settings: ValueStart | None = None, gamma: float = 1.0
) -> dict[str, float]:
    """Fit the value head, and nothing else, to the returns of episodes that the policy plays in `env`.

    Returns:
        ``return``: mean of the episodes; ``explained``: share of the variance of the states' returns that the head
        explains, of those states that it was not fitted to (one episode in five).
    """
    s = settings or ValueStart()
    draw, states, returns, sums, held = np.random.default_rng(s.seed), [], [], [], []
    scorer = model.scorer.eval()
    device = next(scorer.value.parameters()).device

    def choose(seen: dict[str, np.ndarray]) -> int:
        chances = likely(model, seen)
        return int(draw.choice(len(chances), p=chances))

    for episode in range(s.episodes):
        rows, paid = play(env, choose, s.seed + episode)
        ids, features = (torch.from_numpy(np.stack([r[k] for r in rows])) for k in ("state_ids", "features"))
        with torch.no_grad():
            states.append(scorer.states(ids.long().to(device), features.to(device)))
        to_go = 0.0
        back = [to_go := reward + gamma * to_go for reward in reversed(paid)]
        returns += back[::-1]
        sums.append(sum(paid))
        held += [episode % 5 == 4] * len(rows)
    if not states:
        return {}
    seen, wanted = torch.cat(states), torch.tensor(returns, dtype=torch.float32, device=device)
    test = torch.tensor(held, device=device)
    fit, optimizer = torch.nonzero(~test).flatten(), torch.optim.AdamW(scorer.value.parameters(), lr=s.rate)
    for _ in range(s.epochs):
        order = fit[torch.from_numpy(draw.permutation(len(fit))).to(device)]
        for chosen in order.split(s.batch):
            loss = (scorer.value(seen[chosen]).squeeze(-1) - wanted[chosen]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = {"return": float(np.mean(sums))}
    if int(test.sum()) > 1 and float(wanted[test].var()) > 0:
        with torch.no_grad():
            left = (scorer.value(seen[test]).squeeze(-1) - wanted[test]).var()
        found["explained"] = float(1 - left / wanted[test].var())
    return found


def play(
    env: ChoicesAlone, choose: Callable[[dict[str, np.ndarray]], int], seed: int
) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """What was seen before each step of one episode in which `choose` says where to go, and what each step paid."""
    seen, _ = env.reset(seed=seed)
    rows, paid, over = [], [], False
    while not over:
        rows.append(seen)
        seen, reward, terminated, truncated, _ = env.step(choose(seen))
        paid.append(float(reward))
        over = terminated or truncated
    return rows, paid


def likely(model: PlannerModel, seen: dict[str, np.ndarray]) -> np.ndarray:
    """How likely the policy takes each action in one state, up to the last place that holds one."""
    device = next(model.scorer.parameters()).device
    given = {name: torch.from_numpy(array)[None].to(device) for name, array in seen.items()}
    actions = given["action_ids"].long().view(1, MAX_ACTIONS, -1)
    count = int((actions[0, :, 0] >= 0).nonzero().max()) + 1
    numbers = given["action_features"].view(1, MAX_ACTIONS, -1)[:, :count]
    with torch.no_grad():
        logits, _ = model.scorer(given["state_ids"].long(), actions[:, :count], given["features"], numbers)
    found: np.ndarray = logits[0].double().softmax(-1).cpu().numpy()
    return np.asarray(found / found.sum())


__all__ = ["ValueStart", "likely", "play", "pretrain_value"]
