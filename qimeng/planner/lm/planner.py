"""The planner that scores actions with a trained language model.

Deals in observations and scores. Knows nothing about training. By default it runs on the CPU, so that it does not
disturb measurements on the GPU.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qimeng.device import row_name
from qimeng.envs.steps.state import STOP
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.errors import WeightsError
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Observation, Step
from qimeng.planner.search import PATIENCE, ValuingPlanner

if TYPE_CHECKING:
    from qimeng.planner.lm.weights import PlannerModel

TOGETHER = 16
"""Observations that a GPU scores in one pass. A CPU scores them one by one, because padding costs time there."""

REMEMBERED = 4096
"""Answers that are remembered, the oldest forgotten first."""

TOKENS = ("state_ids", "action_ids")
"""Of what is read, the arrays of tokens."""

SHIPPED = Path(__file__).parent / "shipped"
"""Where the weights that come with the package lie."""


class LanguageModelPlanner(ValuingPlanner):
    """Scores each legal action by the log-probability that a language model's policy gives it.

    `stop` has a score of minus infinity while another action is legal. The best program is kept anyway, so going on
    loses nothing. A policy only learns where its stored trees ended, not that nothing more can be gained. The planner
    stops once `PATIENCE` judged steps in a row found nothing better, and one more for each region that no step was
    about so far. What its trees did not have, kinds of action and programs of many regions, is left to the planner by
    rule (`qimeng.planner.lm.learnt`).

    Args:
        weights: a folder that `qimeng.planner.lm.weights.save` wrote, or a model; by default the weights that come
            with the package. A folder is read at the first decision.
        device: where the model runs.

    Raises:
        WeightsError: there is no planner in the folder.
    """

    def __init__(self, weights: str | Path | PlannerModel | None = None, device: str = "cpu"):
        self.device = device
        self._model: PlannerModel | None = None
        self._folder = SHIPPED
        self._own = False  # weights that nobody trains meanwhile
        self._warned: set[str] = set()
        self._known: dict[bytes, tuple[list[float], float]] = {}
        if weights is None or isinstance(weights, str | Path):
            self._own = True
            self._folder = Path(weights or SHIPPED)
            if not (self._folder / "planner.json").is_file():
                raise WeightsError(
                    f"no planner in {self._folder}: name a folder that a training run wrote"
                    if weights
                    else f"the weights that come with qimeng are not in {self._folder}: install qimeng again, or name "
                    "a folder of your own, as in planner='lm:runs/planner'; planner='heuristic' needs none"
                )
        else:
            self._model = weights

    @property
    def model(self) -> PlannerModel:
        """The model, read from its folder when first asked for.

        Raises:
            WeightsError: a file is damaged or does not fit.
        """
        if self._model is None:
            from qimeng.planner.lm.weights import load

            self._model = load(self._folder)
            self._model.scorer.to(self.device)
        return self._model

    def choose(self, observation: Observation) -> Action:
        """The most probable action.

        `stop` where its patience is over, or nothing is left that it has learnt.
        """
        if fruitless(observation.history) >= PATIENCE + len(untouched(observation)):
            return STOP
        learnt = self.model.learnt if self._own else None
        if learnt is not None and (choice := learnt.ruled(observation)) is not None:
            return choice
        return STOP if learnt is not None and learnt.is_done(observation) else super().choose(observation)

    def look(self, observation: Observation) -> tuple[list[float], float]:
        """Log-probability of each of `observation.actions` if it goes on, and the value of the state.

        The value is the reward still to come.
        Answers are cached, since searches return to the same state.
        """
        row = self._read(observation)
        if not self._own:
            scores, value = self._look([row])[0]
            return self._scored(observation, scores), value
        key = hashlib.blake2b(b"".join(part.tobytes() for part in row.values()), digest_size=16).digest()
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = self._look([row])[0]
        scores, value = self._known[key]
        return self._scored(observation, scores), value

    def scores_of(self, observations: Sequence[Observation]) -> list[Sequence[float]]:
        """Log-probabilities; on a GPU `TOGETHER` at a time, those about as long as each other."""
        rows = [self._read(o) for o in observations]
        order = sorted(range(len(rows)), key=lambda i: sum(int((rows[i][k] >= 0).sum()) for k in TOKENS))
        size = 1 if next(self.model.scorer.parameters()).device.type == "cpu" else TOGETHER
        found: dict[int, Sequence[float]] = {}
        for start in range(0, len(order), size):
            part = order[start : start + size]
            found |= {i: s for i, (s, _) in zip(part, self._look([rows[i] for i in part]), strict=True)}
        return [self._scored(o, found[i]) for i, o in enumerate(observations)]

    def _scored(self, observation: Observation, scores: Sequence[float]) -> list[float]:
        """The scores without `stop`; with weights of its own, the planner by rule chooses what they have not learnt."""
        going_on, learnt = _going_on(observation, scores), self.model.learnt
        return going_on if learnt is None or not self._own else learnt.scored(observation, going_on)

    def _read(self, observation: Observation) -> dict[str, np.ndarray]:
        self._warn(row_name(observation.device.name))
        return self.model.reader.arrays(observation)

    def _look(self, rows: Sequence[dict[str, np.ndarray]]) -> list[tuple[list[float], float]]:
        import torch

        where = next(self.model.scorer.parameters()).device
        given = {name: torch.from_numpy(np.stack([row[name] for row in rows])).to(where) for name in rows[0]}
        actions = given["action_ids"].long().view(len(rows), MAX_ACTIONS, -1)
        counts = (actions[:, :, 0] >= 0).sum(1).tolist()
        actions = actions[:, : max(counts)]
        numbers = given["action_features"].view(len(rows), MAX_ACTIONS, -1)[:, : max(counts)]
        with torch.inference_mode():
            logits, values = self.model.scorer(given["state_ids"].long(), actions, given["features"], numbers)
        scores, worth = logits.log_softmax(-1).tolist(), values.tolist()
        return [(s[:n], v) for n, s, v in zip(counts, scores, worth, strict=True)]

    def _warn(self, device: str) -> None:
        """Say once that this device is new to the planner, where that is known."""
        known = {row_name(name) for name in self.model.devices}
        if known and device not in known | self._warned:
            self._warned.add(device)
            warnings.warn(
                f"this planner was trained on times of {', '.join(sorted(known))}; for {device} it goes by the "
                f"device's numbers alone: `qimeng adapt --device {device}` trains it further",
                stacklevel=5,
            )


def fruitless(history: Sequence[Step]) -> int:
    """Judged steps since the one that brought the best program."""
    best, since = math.inf, 0
    for step in history:
        if step.evaluation is None:
            continue
        ms = step.evaluation.ms if step.accepted else None
        best, since = (ms, 0) if ms is not None and ms < best else (best, since + 1)
    return since


def untouched(observation: Observation) -> list[Region]:
    """The regions of the program that no step so far was about."""
    touched = {region for step in observation.history for region in step.action.regions}
    return [region for region in observation.program.called if region.id not in touched]


def _going_on(observation: Observation, scores: Sequence[float]) -> list[float]:
    """The log-probabilities without `stop`, or those of `stop` alone where nothing else is legal."""
    moves = [score for score, action in zip(scores, observation.actions, strict=True) if action != STOP]
    if not moves:
        return list(scores)
    top = max(moves)
    total = top + math.log(sum(math.exp(score - top) for score in moves))
    return [-math.inf if a == STOP else s - total for s, a in zip(scores, observation.actions, strict=True)]


__all__ = ["SHIPPED", "LanguageModelPlanner", "fruitless", "untouched"]
