"""Warm start of the policy by imitation of given choices.

Deals in batches of examples. Knows nothing about PPO or the source of the choices.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from qimeng.envs.gym.observation import TEXTS
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.errors import WeightsError
from qimeng.interfaces import Action, Observation
from qimeng.planner.lm.checkpoint import put_weights, read_state, trained_weights, write_state
from qimeng.planner.lm.ranges import POSITIVE
from qimeng.planner.lm.reading import PAD, Reader, Text
from qimeng.planner.lm.training import Progress
from qimeng.planner.lm.weights import PlannerModel

RISE = 0.05
"""Share of the steps over which the learning rate rises."""

REPORT_S = 30.0
"""Seconds between two progress reports in an epoch, which may take most of an hour on a CPU."""

ALIKE = 8
"""Batches that are drawn together, their examples sorted by length and dealt out."""


@dataclass(frozen=True)
class Imitation:
    """How choices are imitated.

    Attributes:
        epochs: passes over the examples.
        batch: examples a step of the optimizer.
        rate: largest learning rate; it rises over the first `RISE` of the steps and then falls to nothing.
        clip: largest norm of the gradient.
        others: an example shows one action more than this, drawn from the legal ones anew each time; 0 for all of them,
            which takes longer. The actions to be chosen are kept, and the rest is drawn. Where they would be more than
            half of those shown (`Teacher.power`), all are drawn, and the choice is among those that were.
        seed: of the order of the examples, and of the others.
    """

    epochs: int = 4
    batch: int = field(default=16, metadata=POSITIVE)
    rate: float = 1e-3
    clip: float = 1.0
    others: int = 15
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A state as it is read, and what is to be chosen in it.

    Attributes:
        text: the state and its legal actions.
        wanted: how likely each of the actions is to be chosen, float32; the sum is 1.
    """

    text: Text
    wanted: np.ndarray

    @classmethod
    def of(cls, seen: Observation, choice: Mapping[Action, float]) -> Example:
        """`seen`, in which `choice` says how likely which actions are to be chosen.

        Raises:
            ValueError: it names an action that `seen` does not offer.
        """
        text = Text.of(seen)
        wanted = np.zeros(len(text.actions), dtype=np.float32)
        for action, likely in choice.items():
            if action not in seen.actions:
                raise ValueError(f"{action} is not among the {len(seen.actions)} actions of its observation")
            wanted[seen.actions.index(action)] = likely
        return cls(text, wanted)


def imitate(
    model: PlannerModel,
    examples: Sequence[Example],
    settings: Imitation | None = None,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
) -> list[dict[str, float]]:
    """Make the policy choose as in `examples`, by cross-entropy over the actions of a choice and other legal ones.

    Args:
        model: what is trained.
        examples: what is chosen where.
        settings: how.
        progress: called with the figures of each epoch, and now and then with those of a part of one (``epoch`` 0.4).
        checkpoint: file that is written after each epoch. Where it is there already, training goes on from it, exactly
            as if it had not been interrupted (on a CPU).

    Returns:
        For each epoch: ``loss``, the divergence from the choices in nats, and ``accuracy``, how likely the policy's
        first choice was to be chosen over how likely the likeliest one was, means over the examples as they were seen
        while training.

    Raises:
        ValueError: no examples.
        WeightsError: the checkpoint is damaged, or of another model, other examples or other settings.
    """
    s = settings or Imitation()
    if not examples:
        raise ValueError("nothing to imitate: give at least one example")
    rows = _read(model.reader, examples)
    sizes = np.asarray([row.tokens(s.others) for row in rows])
    scorer, draw = model.scorer.eval(), np.random.default_rng(s.seed)
    trained = [p for p in scorer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=s.rate, weight_decay=0.0)
    steps = s.epochs * math.ceil(len(rows) / s.batch)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / math.ceil(RISE * steps), 1 - step / steps))
    about = {"settings": asdict(s), "examples": len(rows), "version of the texts": TEXTS}
    progressed = _Passes(scorer, optimizer, schedule, draw, about)
    found, device, reported = progressed.load(checkpoint), trained[0].device, time.monotonic()
    for epoch in range(len(found), s.epochs):
        sums, count = torch.zeros(2, device=device), 0
        for chosen in _batches(sizes, s.batch, draw):
            batch = [rows[i].against(s.others, draw) for i in chosen]
            logits = _logits(model, batch, device)
            target = torch.from_numpy(_padded([row.wanted for row in batch], 0.0)).to(device)
            known = logits.log_softmax(-1).masked_fill(target == 0, 0.0)  # -inf where nothing is offered
            loss = torch.nn.functional.kl_div(known, target, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, s.clip)
            optimizer.step()
            schedule.step()
            right = target.gather(1, logits.argmax(1, keepdim=True))[:, 0] / target.amax(1)
            sums += torch.stack((loss.detach() * len(chosen), right.sum()))
            count += len(chosen)
            over = count == len(rows)
            if over or time.monotonic() - reported > REPORT_S:
                loss_sum, right_sum = sums.tolist()
                means = {"loss": loss_sum / count, "accuracy": right_sum / count}
                figures = {"epoch": round(epoch + count / len(rows), 3), **means}
                if over:
                    found.append(figures)
                    progressed.save(checkpoint, found)
                if progress is not None:
                    progress(figures)
                reported = time.monotonic()
    return found


@dataclass(frozen=True)
class _Row:
    """Token ids of an example, without padding of the state, and its numbers; actions n x T, padded on the right."""

    state: np.ndarray
    actions: np.ndarray
    features: np.ndarray
    action_features: np.ndarray
    wanted: np.ndarray

    def tokens(self, others: int) -> int:
        """About how many tokens it takes against so many others."""
        used, count = int((self.actions >= 0).sum()), len(self.wanted)
        return len(self.state) + (used if not others else round(used * min(1.0, (others + 1) / count)))

    def against(self, others: int, draw: np.random.Generator) -> _Row:
        """With so many of its actions as `Imitation.others` says."""
        if not others or len(self.wanted) <= others + 1:
            return self
        chosen = np.flatnonzero(self.wanted)
        if 2 * len(chosen) > others + 1:
            kept = draw.permutation(len(self.wanted))[: others + 1]
            if not self.wanted[kept].any():
                kept[0] = draw.choice(chosen)
        else:
            rest = draw.permutation(np.flatnonzero(self.wanted == 0))
            kept = np.append(rest[: others + 1 - len(chosen)], chosen)
        wanted = self.wanted[kept]
        return _Row(self.state, self.actions[kept], self.features, self.action_features[kept], wanted / wanted.sum())


def _read(reader: Reader, examples: Sequence[Example]) -> list[_Row]:
    found = []
    for example, row in zip(examples, reader.rows([e.text for e in examples]), strict=True):
        state, actions = row["state_ids"], row["action_ids"].reshape(-1, reader.action_length)
        found.append(
            _Row(
                state[np.flatnonzero(state >= 0)],
                actions[: len(example.wanted)].copy(),
                row["features"],
                row["action_features"].reshape(MAX_ACTIONS, -1)[: len(example.wanted)].copy(),
                example.wanted,
            )
        )
    return found


def _logits(model: PlannerModel, rows: Sequence[_Row], device: torch.device) -> torch.Tensor:
    """Logits of the policy, one row an example; those of places that hold no action are -inf."""
    states = _padded([row.state[::-1] for row in rows], PAD)[:, ::-1]
    actions = _padded([row.actions for row in rows], PAD)
    numbers = _padded([row.action_features for row in rows], 0.0)
    given = (states, actions, np.stack([row.features for row in rows]), numbers)
    state_ids, action_ids, *features = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in given)
    logits, _ = model.scorer(state_ids.long(), action_ids.long(), *features)
    found: torch.Tensor = logits
    return found


def _padded(arrays: Sequence[np.ndarray], value: float) -> np.ndarray:
    """One array of all of them, the shorter ones filled up with `value` behind."""
    longest = max(len(a) for a in arrays)
    found = np.full((len(arrays), longest, *arrays[0].shape[1:]), value, dtype=arrays[0].dtype)
    for place, array in zip(found, arrays, strict=True):
        place[: len(array)] = array
    return found


def _batches(sizes: np.ndarray, count: int, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Every index once, `count` at a time, in a random order; the examples of a batch are about as long as each other.

    A batch costs as much as its longest example in every row: that saves a third.
    """
    order, wide = draw.permutation(len(sizes)), ALIKE * count
    for start in range(0, len(order), wide):
        part = order[start : start + wide]
        part = part[np.argsort(sizes[part], kind="stable")]
        batches = [part[i : i + count] for i in range(0, len(part), count)]
        yield from (batches[i] for i in draw.permutation(len(batches)))


@dataclass(frozen=True)
class _Passes:
    """All that decides the next epoch."""

    scorer: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    draw: np.random.Generator
    about: dict[str, Any]

    def save(self, path: Path | None, found: list[dict[str, float]]) -> None:
        """Write it to `path`, at once or not at all, with the figures of the epochs so far."""
        if path is None:
            return
        state = {
            "weights": trained_weights(self.scorer),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.last_epoch,
            "rest": json.dumps({**self.about, "draw": self.draw.bit_generator.state, "found": found}),
        }
        write_state(state, path)

    def load(self, path: Path | None) -> list[dict[str, float]]:
        """Go on from what is at `path`, if anything; the figures of the epochs before."""
        if path is None or not path.is_file():
            return []
        try:
            state = read_state(path)
            rest = json.loads(state["rest"])
            if other := [name for name, value in self.about.items() if rest.get(name) != value]:
                raise ValueError(f"other {' and '.join(other)}")
            put_weights(self.scorer, state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.last_epoch = state["schedule"]
            self.draw.bit_generator.state = rest["draw"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).split("\n")[0]
            raise WeightsError(f"{path} does not fit: {reason}; remove it to begin anew") from error
        found: list[dict[str, float]] = rest["found"]
        return found


__all__ = ["Example", "Imitation", "imitate"]
