"""What is known of each action besides its text, as numbers: what it may save, and how steps like it went before.

Deals in shares of time and in the steps so far. Knows nothing about models. No family or operator is named here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qimeng.envs.gym.observation import Feature
from qimeng.envs.steps.time_shares import ceilings, region_times
from qimeng.family import word_of
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Observation

TO_PYTORCH = "library"
"""Kind of the action that goes back to PyTorch, where it has no option."""

ALIKE = 8
"""Twice as many operators make a step alike by a few hundredths: what one can write of ten operators says little of
four."""

LEAST = 2.0**-16
"""A share of the time below which nothing is told apart."""

MOST = 16
"""Steps alike beyond which none is told apart."""

ACTION_FEATURES = (
    Feature("saved", -2, 2, "2 + log2 of the share of the program's time that it may save at most, over 4"),
    Feature("touched", -2, 2, "2 + log2 of the share of the program's time that its regions take, over 4"),
    Feature("operators", 0, 4, "log2 of 1 + operators of its regions, over 4"),
    Feature("tried", 0, math.log2(1 + MOST) / 2, "log2 of 1 + judged steps alike so far, over 2"),
    Feature("went well", -1, 1, "share s of those that were accepted, half of one step more added; 2 s - 1"),
    Feature(
        "expected", -2, 2, "2 + log2 of what it may save at most times s, over 4; s is 1 for going back to PyTorch"
    ),
    Feature(
        "brought", -1, 1, "8 log2 (t / u): the program took t before the last accepted step on its regions, u after"
    ),
)
"""Of each action; regions that equal its own count with it. A step is alike if it is of the same kind and its regions
have the same word. It counts ``((1 + a) / (1 + b)) ** ALIKE``, where a and b are the operators of its regions and of
the action's, a the smaller number: 1 where they have as many.

What going back to PyTorch saves is known where this search put the kernels there: what they took from the program's
time or added to it, and never less than nothing."""


@dataclass(frozen=True)
class _Aim:
    """What an action is about."""

    kind: str
    word: str
    operators: int

    @classmethod
    def of(cls, action: Action, here: Mapping[str, Region]) -> _Aim:
        regions = [here[r] for r in action.regions if r in here]
        return cls(action.kind, word_of(regions[0]) if regions else "", sum(len(r.ops) for r in regions))

    def alike(self, other: _Aim) -> float:
        if (self.kind, self.word) != (other.kind, other.word):
            return 0.0
        fewer, more = sorted((1 + self.operators, 1 + other.operators))
        return (fewer / more) ** ALIKE


def action_features(observation: Observation) -> np.ndarray:
    """Each of `observation.actions` as `ACTION_FEATURES`, float32, actions x features, each clipped to its range.

    The text of an action has the bound as a percentage of one digit, and that of the state has the last steps alone.
    Among many regions, most actions are alike in those.
    """
    o = observation
    times = region_times(o.program, o.evaluation, o.device)
    total, equal = sum(times.values()), defaultdict[str, float](float)
    here = {region.id: region for region in o.program.regions}
    for region in here.values():
        equal[region.signature] += times[region.id]
    bounds = ceilings(o.actions, o.program, o.evaluation, o.device, o.mode)
    judged = [(_Aim.of(s.action, here), s.accepted) for s in o.history if s.evaluation is not None]
    known: dict[_Aim, tuple[float, float]] = {}
    (brought, since), rows = _brought(o), []
    for action, gain in zip(o.actions, bounds, strict=True):
        aim = _Aim.of(action, here)
        if aim not in known:
            weights = [(aim.alike(before), well) for before, well in judged]
            known[aim] = sum(w for w, _ in weights), sum(w for w, well in weights if well)
        tried, well = known[aim]
        saved, chance = 1 - 1 / gain if action.regions else 0.0, (well + 0.5) / (tried + 1)
        if action.kind == TO_PYTORCH and not action.param and set(action.regions) <= since.keys():
            saved, chance = max(0.0, 1 - 2 ** sum(since[r] for r in action.regions)), 1.0
        touched = sum(equal[s] for s in {here[r].signature for r in action.regions})
        rows.append(
            (
                _share(saved),
                _share(touched / total if total else 0.0),
                math.log2(1 + aim.operators) / 4,
                math.log2(1 + tried) / 2,
                2 * chance - 1,
                _share(saved * chance),
                8 * sum(brought.get(r, 0.0) for r in action.regions),
            )
        )
    low, high = action_feature_bounds()
    return np.clip(np.asarray(rows, dtype=np.float32).reshape(-1, len(ACTION_FEATURES)), low, high)


def _brought(o: Observation) -> tuple[dict[str, float], dict[str, float]]:
    """By region, log2 of the program's time before the last accepted step on it over the time after.

    The second has the sum of these since the region was on PyTorch, where all of the steps were on this region alone.
    """
    last, since, before = dict[str, float](), dict[str, float](), o.eager_ms
    for step in o.history:
        after = step.evaluation.ms if step.accepted and step.evaluation is not None else None
        if not after:
            continue
        gained, before = math.log2(before / after) if before else 0.0, after
        regions, back = step.action.regions, step.action.kind == TO_PYTORCH and not step.action.param
        last |= dict.fromkeys(regions, gained)
        if len(regions) == 1 and not back and before is not None:
            since[regions[0]] = since.get(regions[0], 0.0) + gained
        else:
            for region in regions or tuple(since):  # one without regions is about them all
                since.pop(region, None)
    return last, since


def action_feature_bounds() -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each of an action's features, float32."""
    low = np.asarray([f.low for f in ACTION_FEATURES], dtype=np.float32)
    return low, np.asarray([f.high for f in ACTION_FEATURES], dtype=np.float32)


def _share(share: float) -> float:
    return 2 + math.log2(max(share, LEAST)) / 4


__all__ = ["ACTION_FEATURES", "action_feature_bounds", "action_features"]
