"""Warm start: the policy imitates given choices, the value head learns what its own episodes pay.

Deals in batches of pairs and of returns. Knows nothing about PPO, or about where the choices come from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from qimeng.envs.shares import MAX_ACTIONS
from qimeng.interfaces import Action, Observation
from qimeng.planner.lm.reading import PAD, ReadObservation
from qimeng.planner.lm.training import Progress
from qimeng.planner.lm.weights import PlannerModel

RISE = 0.05
"""Share of the steps over which the learning rate rises."""

TOLD_S = 30.0
"""Seconds between two words on an epoch that goes on: on a CPU it may take most of an hour."""

ALIKE = 8
"""Batches that are drawn together, their states sorted by length and dealt out."""


@dataclass(frozen=True)
class Imitation:
    """How choices are imitated.

    Attributes:
        epochs: passes over the pairs.
        batch: pairs a step of the optimizer.
        rate: largest learning rate; it rises over the first `RISE` of the steps and then falls to nothing.
        clip: largest norm of the gradient.
        others: actions that a choice is among, the rest drawn from the legal ones anew each time it is seen; 0 for all
            of them, which takes several times as long.
        seed: of the order of the pairs, and of the others.
    """

    epochs: int = 4
    batch: int = 16
    rate: float = 1e-3
    clip: float = 1.0
    others: int = 15
    seed: int = 0


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
    batch: int = 64
    rate: float = 1e-3
    seed: int = 0


def imitate(
    model: PlannerModel,
    pairs: Sequence[tuple[Observation, Mapping[Action, float]]],
    settings: Imitation | None = None,
    progress: Progress | None = None,
) -> list[dict[str, float]]:
    """Make the policy choose as in `pairs`, by cross-entropy over the actions of a choice and other legal ones.

    Args:
        model: what is trained.
        pairs: observations, each with how likely which actions are to be chosen.
        settings: how.
        progress: told the figures of each epoch, and now and then of what there is of one so far (``epoch`` 0.4, say).

    Returns:
        For each epoch: ``loss``, the divergence from the choices in nats, and ``accuracy``, how likely the policy's
        first choice was to be chosen over how likely the likeliest one was, means over the pairs as they were seen
        while training.

    Raises:
        ValueError: no pairs, or a choice that its observation does not offer.
    """
    s = settings or Imitation()
    if not pairs:
        raise ValueError("nothing to imitate: give at least one (observation, action)")
    rows, wanted = [], []
    for seen, choice in pairs:
        rows.append(model.reader.arrays(seen))
        wanted.append(_target(seen, choice))
    lengths = np.asarray([int((row["state_ids"] >= 0).sum()) for row in rows])
    scorer, shuffle = model.scorer.eval(), np.random.default_rng(s.seed)
    trained = [p for p in scorer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=s.rate, weight_decay=0.0)
    steps = s.epochs * math.ceil(len(rows) / s.batch)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / math.ceil(RISE * steps), 1 - step / steps))
    device, found, told = trained[0].device, [], time.monotonic()
    for epoch in range(s.epochs):
        loss_sum, right, count = 0.0, 0.0, 0
        for chosen in _batches(lengths, s.batch, shuffle):
            given = [_against(rows[i], wanted[i], s.others, shuffle) for i in chosen]
            logits = _logits(model, given, device)
            target = torch.from_numpy(np.stack([wanted[i] for i in chosen])[:, : logits.shape[1]]).to(device)
            known = logits.log_softmax(-1).masked_fill(target == 0, 0.0)  # -inf where nothing is offered
            loss = torch.nn.functional.kl_div(known, target, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, s.clip)
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(chosen)
            right += float((target.gather(1, logits.argmax(1, keepdim=True))[:, 0] / target.amax(1)).sum())
            count += len(chosen)
            figures = {
                "epoch": round(epoch + count / len(rows), 3),
                "loss": loss_sum / count,
                "accuracy": right / count,
            }
            if progress is not None and (count == len(rows) or time.monotonic() - told > TOLD_S):
                progress(figures)
                told = time.monotonic()
        found.append(figures)
    return found


def pretrain_value(
    model: PlannerModel, env: ReadObservation, settings: ValueStart | None = None, gamma: float = 1.0
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
    for episode in range(s.episodes):
        rows, paid = _play(model, env, draw, device, s.seed + episode)
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


def _play(
    model: PlannerModel, env: ReadObservation, draw: np.random.Generator, device: torch.device, seed: int
) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """What was seen before each step of one episode of the policy, and what each step paid."""
    seen, _ = env.reset(seed=seed)
    rows, paid, over = [], [], False
    while not over:
        with torch.no_grad():
            probs = _logits(model, [seen], device)[0].double().softmax(-1).cpu().numpy()
        rows.append(seen)
        seen, reward, terminated, truncated, _ = env.step(int(draw.choice(len(probs), p=probs / probs.sum())))
        paid.append(float(reward))
        over = terminated or truncated
    return rows, paid


def _batches(lengths: np.ndarray, size: int, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Every index once, `size` at a time, in a random order; a batch's states are about as long as each other.

    A batch costs as much as its longest state in every row: that saves a third.
    """
    order, wide = draw.permutation(len(lengths)), ALIKE * size
    for start in range(0, len(order), wide):
        part = order[start : start + wide]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches = [part[i : i + size] for i in range(0, len(part), size)]
        yield from (batches[i] for i in draw.permutation(len(batches)))


def _target(seen: Observation, choice: Mapping[Action, float]) -> np.ndarray:
    """How likely the action of each place is to be chosen, float32."""
    found = np.zeros(MAX_ACTIONS, dtype=np.float32)
    for action, likely in choice.items():
        if action not in seen.actions:
            raise ValueError(f"{action} is not among the {len(seen.actions)} actions of its observation")
        found[seen.actions.index(action)] = likely
    return found


def _against(
    row: dict[str, np.ndarray], wanted: np.ndarray, others: int, draw: np.random.Generator
) -> dict[str, np.ndarray]:
    """`row` with the actions that are `wanted` and so many others that there are `others` more than one, if it can be.

    Each is in its place.
    """
    actions = row["action_ids"].reshape(MAX_ACTIONS, -1)
    there = np.flatnonzero(actions[:, 0] >= 0)
    if not others or len(there) <= others + 1:
        return row
    chosen = np.flatnonzero(wanted)
    more = max(1, others + 1 - len(chosen))
    kept = np.append(draw.permutation(np.setdiff1d(there, chosen))[:more], chosen)
    short = np.full_like(actions, PAD)
    short[kept] = actions[kept]
    return {**row, "action_ids": short.reshape(-1)}


def _logits(model: PlannerModel, rows: Sequence[dict[str, np.ndarray]], device: torch.device) -> torch.Tensor:
    """Logits of the policy, one row an observation; those of places that hold no action are -inf."""
    given = {name: torch.from_numpy(np.stack([r[name] for r in rows])).to(device) for name in rows[0]}
    actions = given["action_ids"].long().view(len(rows), MAX_ACTIONS, -1)
    count = int((actions[:, :, 0] >= 0).any(0).nonzero().max()) + 1  # places up to the last one used
    logits, _ = model.scorer(given["state_ids"].long(), actions[:, :count], given["features"])
    found: torch.Tensor = logits
    return found
