"""The planner that scores actions with a trained language model.

Deals in observations and scores. Knows nothing about training. It runs on the CPU unless told otherwise, so that it
does not disturb what is timed on the GPU.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from qimeng.envs.shares import MAX_ACTIONS
from qimeng.errors import WeightsError
from qimeng.interfaces import Observation
from qimeng.planner.search import ValuingPlanner

if TYPE_CHECKING:
    from qimeng.planner.lm.weights import PlannerModel

SHIPPED = Path(__file__).parent / "shipped"
"""Where the weights that come with the package lie, once there are any."""


class LanguageModelPlanner(ValuingPlanner):
    """Scores each legal action by the log-probability that a language model's policy gives it.

    Args:
        weights: a folder that `qimeng.planner.lm.weights.save` wrote, or a model; by default the weights that come
            with the package. A folder is read at the first decision.
        device: where the model runs.

    Raises:
        WeightsError: there is no such folder, or no weights come with this version.
    """

    def __init__(self, weights: str | Path | PlannerModel | None = None, device: str = "cpu"):
        self.device = device
        self._model: PlannerModel | None = None
        self._folder = SHIPPED
        self._warned: set[str] = set()
        if weights is None or isinstance(weights, str | Path):
            self._folder = Path(weights or SHIPPED)
            if not (self._folder / "planner.json").is_file():
                raise WeightsError(
                    f"no planner in {self._folder}: name a folder that a training run wrote"
                    if weights
                    else "no trained weights come with this version of qimeng yet: train a planner, then name its "
                    "folder, as in planner='lm:runs/planner'; planner='heuristic' needs none"
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

    def look(self, observation: Observation) -> tuple[list[float], float]:
        """Log-probability of each of `observation.actions`, and the value of the state (the reward still to come)."""
        import torch

        self._warn(observation.device.name.removesuffix("(here)"))
        arrays = self.model.reader.arrays(observation)
        device = next(self.model.scorer.parameters()).device
        given = {name: torch.from_numpy(array)[None].to(device) for name, array in arrays.items()}
        actions = given["action_ids"].long().view(1, MAX_ACTIONS, -1)[:, : len(observation.actions)]
        with torch.inference_mode():
            logits, values = self.model.scorer(given["state_ids"].long(), actions, given["features"])
        found: list[float] = logits[0].log_softmax(-1).tolist()
        return found, float(values[0])

    def _warn(self, device: str) -> None:
        """Say once that this device is new to the planner, where that is known."""
        known = {name.removesuffix("(here)") for name in self.model.devices}
        if known and device not in known | self._warned:
            self._warned.add(device)
            warnings.warn(
                f"this planner was trained on times of {', '.join(sorted(known))}; for {device} it goes by the "
                f"device's numbers alone: `qimeng adapt --device {device}` trains it further",
                stacklevel=4,
            )
