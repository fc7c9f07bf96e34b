"""Adapts a planner to a new device: trains an adapter and the value head on a budget of evaluations.

Deals in what is trained, the number of evaluations, and the gain. `run` does the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qimeng.planner.lm.config import TrainConfig, TrainingError, load_config
from qimeng.planner.lm.run import OnProgress, Run, prepare
from qimeng.planner.lm.sources import gather
from qimeng.planner.lm.weights import is_planner

DEFAULTS = (
    "imitation.epochs=2",
    "imitation.rate=5e-4",
    "ppo.rate=5e-4",
    "ppo.rollout=16",
    "ppo.batch=32",
    "validate_every=4",
    "held_out=0.3",
)
"""Defaults that differ from training from scratch, since the budget is smaller than a long rollout. Given settings
override them."""


@dataclass(frozen=True)
class Adaptation:
    """What an adaptation gained.

    Attributes:
        device: name of the device.
        times: whose times and of which kind.
        evaluations: programs asked about while training.
        trained: parameters trained.
        parameters: all of them.
        shares: ``before`` and ``after``, on held-out trees; empty where there are none.
        returns: mean return of the latest episodes, after each rollout.
        seconds: of the whole.
    """

    device: str
    times: str
    evaluations: int
    trained: int
    parameters: int
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    returns: tuple[float, ...] = ()
    seconds: float = 0.0

    def sentence(self) -> str:
        """What it gained, in words."""
        head = f"{self.trained:,} of {self.parameters:,} parameters trained with {self.evaluations} evaluations"
        if "before" not in self.shares:
            returns = f" (mean return {self.returns[0]:.3g} -> {self.returns[-1]:.3g})" if self.returns else ""
            return f"{head}; no trees are held out, so only what training paid is known{returns}"
        before, after = self.shares["before"], self.shares["after"]
        gained = ", ".join(f"{n} {before[n]:.0%} -> {after[n]:.0%}" for n in after)
        return f"{head}; share of the best-known log-gain on held-out trees ({self.times}): {gained}"


def adaptation_config(path: Path | None, overrides: Sequence[str]) -> TrainConfig:
    """Settings of an adaptation: `DEFAULTS`, then the file's, then the overrides.

    Raises:
        TrainingError: an unknown name, or a value of another type.
    """
    with_trees = path is not None or any(o.startswith("trees=") for o in overrides)
    return load_config(path, overrides, DEFAULTS if with_trees else ("answers=live", *DEFAULTS))


def run_adaptation(
    config: TrainConfig,
    out: Path,
    evaluations: int,
    on_progress: OnProgress = lambda phase, row: None,
    seconds: float = math.inf,
) -> Adaptation:
    """Adapt the planner that `config.start` names, into `out`.

    With stored trees, the budget pays for whole trees. With a live judge, training ends after that many evaluations.
    PPO ends after `seconds`, too, and the planner is saved as it stands; an interrupted adaptation goes on in `out`.

    Raises:
        TrainingError: the start is no planner's folder, or the settings do not fit.
        WeightsError: the planner cannot be loaded.
    """
    if not is_planner(config.start):
        raise TrainingError(f"no planner in {config.start}: name a folder that a training run wrote")
    began = time.monotonic()
    prepare(out, config)
    sources = gather(config, out, evaluations)
    try:
        run = Run(config, out, sources, on_progress, seconds - (time.monotonic() - began))
        report = run()
    finally:
        sources.close()
    names = {"untrained": "before", "trained": "after"}
    return Adaptation(
        sources.device,
        sources.times,
        report.evaluations,
        report.trained,
        report.parameters,
        {names[who]: found for who, found in report.shares.items() if who in names},
        tuple(row["reward"] for row in report.curve if "reward" in row),
        report.seconds,
    )


__all__ = ["DEFAULTS", "Adaptation", "adaptation_config", "run_adaptation"]
