"""Training by PPO on environments.

Deals in batches, seeds and progress. `qimeng.envs.gym.reward` defines the reward. The task's evaluator provides the
answers, from a GPU or a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.gym.reward import Reward
from qimeng.envs.steps.task import Task
from qimeng.planner.lm.checkpoint import FILE, load_checkpoint, put_weights, save_checkpoint, trained_weights
from qimeng.planner.lm.choices import ChoicesAlone
from qimeng.planner.lm.ranges import POSITIVE, SHARE
from qimeng.planner.lm.reading import Offering, Reader, ReadObservation
from qimeng.planner.lm.scoring import ActionScorer
from qimeng.planner.lm.stored import Offer
from qimeng.planner.lm.weights import PlannerModel

if TYPE_CHECKING:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import VecEnv

Progress = Callable[[dict[str, float]], None]
"""Called with figures: after each epoch of imitation, after each rollout of PPO, after each validation."""

OFFERED = "offered"
"""Of a checkpoint's notes, the states and shares that an `Offer` has counted."""


@dataclass(frozen=True)
class Ppo:
    """How PPO trains. docs/training.md gives the reasons for the defaults.

    Attributes:
        steps: steps in environments, at least; whole rollouts are taken.
        environments: environments side by side, each with all tasks.
        rollout: steps of each environment before an update.
        batch: steps a step of the optimizer; none may be left alone where advantages are scaled.
        epochs: passes over a rollout.
        rate: learning rate at first; it falls to a tenth of it over `steps`.
        heads: how many times `rate` the rate of the heads is, which read the numbers of actions and of the state. Where
            `rate` is small, the language model then stays near what it imitated.
        gamma: discount.
        gae: lambda of the generalised advantage estimate.
        clip: of the probability ratio.
        normalize: whether the advantages of a batch are scaled to unit variance, those of choices that are worth the
            same included.
        entropy: coefficient of the policy's entropy.
        anchor: coefficient of the policy's divergence from what PPO began with, which takes the entropy's place; 0 for
            none. All legal actions are looked at, so that those which no tree has an answer for stay where they were.
        value: coefficient of the value's error; a large one's gradient is most of what reaches the language model.
        target_kl: a rollout's passes end where the policy has gone 1.5 times this far; None for no limit.
        processes: whether each environment has a process of its own, for networks and bundles. They take seconds to
            start, and pay where there are more cores than runs.
        max_steps: longest episode; steps of the graph alone count, and a program of many operators takes one each.
        seed: of the environments, of the sampling, and of the batches.
    """

    steps: int = 4096
    environments: int = field(default=8, metadata=POSITIVE)
    rollout: int = field(default=64, metadata=POSITIVE)
    batch: int = field(default=64, metadata=POSITIVE)
    epochs: int = field(default=4, metadata=POSITIVE)
    rate: float = 3e-4
    heads: float = field(default=1.0, metadata=POSITIVE)
    gamma: float = field(default=1.0, metadata=SHARE)
    gae: float = field(default=0.95, metadata=SHARE)
    clip: float = 0.2
    normalize: bool = True
    entropy: float = 0.01
    anchor: float = 0.0
    value: float = 0.1
    target_kl: float | None = 0.1
    processes: bool = False
    max_steps: int = field(default=32, metadata=POSITIVE)
    seed: int = 0

    def __post_init__(self) -> None:
        taken = self.environments * self.rollout
        if self.steps and self.environments == self.rollout == 1:
            raise ValueError("environments and rollout are both 1: an update needs at least two steps")
        if self.steps and self.normalize and 1 in (min(self.batch, taken), taken % max(1, self.batch)):
            raise ValueError(
                f"the {taken} steps of a rollout, in batches of {self.batch}, leave one step alone, whose advantage "
                "has no variance to be scaled to: change batch, rollout or environments, or set normalize = false"
            )


@dataclass(frozen=True)
class Validation:
    """When the policy is validated during training, and when training ends early.

    Attributes:
        score: says how good the policy is, larger is better, and what else is worth telling.
        every: rollouts between two looks.
        patience: looks in a row without a better score, after which training ends; 0 for never.
    """

    score: Callable[[], tuple[float, dict[str, float]]]
    every: int = 8
    patience: int = 0


class HorizonEnds(gymnasium.Wrapper[dict[str, Any], Any, dict[str, Any], Any]):
    """Episodes end at the step limit as terminated, not as truncated.

    The number of steps left is a feature, so the last step really has no future. For a truncated episode,
    stable-baselines3 would add the value of its last state to the reward. No step is ever taken from that state, so its
    value is never learnt.
    """

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        return seen, reward, terminated or truncated, False, info


def make_environment(
    model: PlannerModel,
    tasks: Sequence[Task],
    max_steps: int,
    reward: Reward | None = None,
    offer: Offering | None = None,
    whole: bool = False,
) -> ChoicesAlone:
    """One environment as `model` reads it, at the states where there is something to choose.

    Args:
        model: has the reader.
        tasks: what is optimized; one is drawn at each reset.
        max_steps: longest episode.
        reward: `MilestoneReward` by default.
        offer: says which of the legal actions may be chosen; all by default.
        whole: whether those that may not be chosen are read as well.
    """
    return _environment(model.reader, tasks, max_steps, None if reward is None else (lambda: reward), offer, whole)


def _environment(
    reader: Reader,
    tasks: Sequence[Task],
    max_steps: int,
    reward: Callable[[], Reward] | None,
    offer: Offering | None,
    whole: bool,
) -> ChoicesAlone:
    env = HorizonEnds(KernelOptimizationEnv(tasks, reward() if reward else None, max_steps=max_steps))
    return ChoicesAlone(ReadObservation(env, reader, offer, whole))


def make_learner(
    model: PlannerModel,
    tasks: Sequence[Task],
    settings: Ppo | None = None,
    reward: Callable[[], Reward] | None = None,
    tensorboard: str | None = None,
    offer: Offering | None = None,
) -> MaskablePPO:
    """MaskablePPO on `tasks` with `model` as its policy, which is trained in place.

    Args:
        model: policy, value and reader.
        tasks: what is optimized; one is drawn at each reset.
        settings: of PPO.
        reward: makes the reward of one environment; `MilestoneReward` by default.
        tensorboard: folder of TensorBoard's logs.
        offer: says which of the legal actions may be chosen; all by default.

    Raises:
        ValueError: `Ppo.processes`, and not all tasks can be sent to other processes.
    """
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.utils import LinearSchedule
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecMonitor

    from qimeng.planner.lm.policy import LanguageModelPolicy
    from qimeng.planner.lm.side_by_side import SideBySide

    s = settings or Ppo()

    if s.processes and not (isinstance(offer, Offer) and all(one.portable for one in offer.stored.values())):
        raise ValueError("environments have processes of their own for networks and bundles: set processes = false")
    environment = partial(_environment, model.reader, tasks, s.max_steps, reward, offer, bool(s.anchor))
    several: list[Callable[[], gymnasium.Env[Any, Any]]] = [environment] * s.environments
    return MaskablePPO(
        LanguageModelPolicy,
        VecMonitor(SubprocVecEnv(several, "spawn") if s.processes else SideBySide(several)),
        learning_rate=LinearSchedule(s.rate, s.rate / 10, 1.0),  # the last update has the last rate
        n_steps=s.rollout,
        batch_size=s.batch,
        n_epochs=s.epochs,
        gamma=s.gamma,
        gae_lambda=s.gae,
        clip_range=s.clip,
        normalize_advantage=s.normalize,
        ent_coef=s.anchor or s.entropy,
        vf_coef=s.value,
        target_kl=s.target_kl,
        tensorboard_log=tensorboard,
        policy_kwargs={"scorer": model.scorer, "anchor": frozen(model.scorer) if s.anchor else None, "heads": s.heads},
        seed=s.seed,
        device=next(model.scorer.parameters()).device,
    )


def frozen(scorer: ActionScorer) -> ActionScorer:
    """A copy that stays as it is."""
    return deepcopy(scorer).eval().requires_grad_(False)


@dataclass
class _Looks:
    """What validation has found so far; kept in checkpoints, so that a resumed run ends where the whole one would."""

    validation: Validation | None
    rows: list[dict[str, float]] = field(default_factory=list)
    rollouts: int = 0
    seen: int = -1
    best: float = float("-inf")
    stale: int = 0
    weights: dict[str, Any] | None = None

    def look(self, learner: MaskablePPO, force: bool = False) -> dict[str, float] | None:
        """Validate where it is time to; the row of it, or None."""
        v = self.validation
        if v is None or self.seen == self.rollouts or not (force or self.rollouts % v.every == 0):
            return None
        self.seen = self.rollouts
        score, more = v.score()
        self.stale = 0 if score > self.best else self.stale + 1
        if score > self.best:
            self.best, self.weights = score, trained_weights(learner.policy)
        return {"steps": learner.num_timesteps, "score": score, **more}

    @property
    def over(self) -> bool:
        """Whether patience has run out."""
        v = self.validation
        return v is not None and 0 < v.patience <= self.stale

    def notes(self) -> dict[str, Any]:
        """As a checkpoint keeps it; the weights are kept beside it."""
        return {k: getattr(self, k) for k in ("rows", "rollouts", "seen", "best", "stale")}

    def take_up(self, notes: dict[str, Any], weights: dict[str, Any] | None) -> None:
        """What `notes` gave."""
        for name, value in notes.items():
            setattr(self, name, value)
        self.weights = weights


def train(
    model: PlannerModel,
    tasks: Sequence[Task],
    settings: Ppo | None = None,
    reward: Callable[[], Reward] | None = None,
    progress: Progress | None = None,
    tensorboard: str | None = None,
    checkpoint: str | Path | None = None,
    offer: Offering | None = None,
    validation: Validation | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> list[dict[str, float]]:
    """Train `model` by PPO on `tasks`, in place.

    Args:
        model: policy, value and reader.
        tasks: what is optimized; one is drawn at each reset.
        settings: of PPO; `Ppo.steps` counts those of a run that is taken up again as well.
        reward: makes the reward of one environment; `MilestoneReward` by default.
        progress: called after each rollout and after each validation.
        tensorboard: folder of TensorBoard's logs.
        checkpoint: folder of a checkpoint, written before each rollout and at the end. Where there is one already,
            training goes on from it, exactly as if it had not been interrupted if evaluations are replayed. `model` has
            to be what it began with, since an anchor is a copy of that.
        offer: says which of the legal actions may be chosen; all by default.
        validation: looks at the policy now and then; the model ends with the weights that did best.
        enough: asked after each step: whether training ends now (a budget is used up, say).

    Raises:
        WeightsError: the checkpoint is damaged, or of another model or number of environments.

    Returns:
        The rows that `progress` was given, those of a run that was taken up again included. For each rollout:
        ``steps`` so far, ``reward``: mean return of the last 100 episodes, ``length``: their mean number of steps,
        ``seconds`` since this process began to train. For each validation: ``steps``, ``score`` and its other figures.
    """
    from stable_baselines3.common.callbacks import BaseCallback

    s, began, looks = settings or Ppo(), time.monotonic(), _Looks(validation)
    counted = offer if isinstance(offer, Offer) else Offer()

    def tell(row: dict[str, float] | None) -> None:
        if row is None:
            return
        looks.rows.append(row)
        for name, value in row.items():
            if tensorboard is not None and "score" in row:
                learner.logger.record(f"validation/{name}", value)
        if progress is not None:
            progress(row)

    def save() -> None:
        if checkpoint is not None:
            notes = {**looks.notes(), OFFERED: (counted.states, counted.shares)}
            save_checkpoint(learner, checkpoint, notes, looks.weights)

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return not (looks.over or enough())

        def _on_rollout_start(self) -> None:
            tell(looks.look(learner))
            save()

        def _on_rollout_end(self) -> None:
            looks.rollouts += 1
            begun.add(self.training_env)
            episodes: Any = self.model.ep_info_buffer
            if episodes:
                mean = {
                    n: float(np.mean([float(e[k]) for e in episodes])) for n, k in (("reward", "r"), ("length", "l"))
                }
                tell({"steps": self.num_timesteps, **mean, "seconds": time.monotonic() - began})

    learner = make_learner(model, tasks, s, reward, tensorboard, offer)
    resumed = checkpoint is not None and (Path(checkpoint) / FILE).exists()
    if checkpoint is not None and resumed:
        notes, weights = load_checkpoint(learner, checkpoint)  # which looks at states again
        counted.states, counted.shares = notes.pop(OFFERED, (counted.states, counted.shares))
        looks.take_up(notes, weights)
    begun = _Elsewhere(counted, learner.env if s.processes else None)
    left = s.steps - learner.num_timesteps
    if left > 0 and not looks.over:
        learner.learn(left, callback=Watch(), reset_num_timesteps=not resumed)  # a reset draws new episodes
        tell(looks.look(learner, force=True))
        save()
    if looks.weights is not None:
        put_weights(learner.policy, looks.weights)
    _end(learner.env, s.processes)
    return looks.rows


class _Elsewhere:
    """Adds to `counted` what is offered in environments that have processes of their own, each with a copy of it."""

    def __init__(self, counted: Offer, env: VecEnv | None):
        self._counted, self._before = counted, (counted.states, counted.shares)
        self._there = env.env_method("counted") if env is not None else []

    def add(self, env: VecEnv) -> None:
        """What came since this was made; nothing where the environments share the offer itself."""
        if self._there:
            pairs = list(zip(env.env_method("counted"), self._there, strict=True))
            self._counted.states = self._before[0] + sum(now[0] - then[0] for now, then in pairs)
            self._counted.shares = self._before[1] + sum(now[1] - then[1] for now, then in pairs)


def _end(env: VecEnv | None, processes: bool) -> None:
    if processes and env is not None:
        env.close()


__all__ = ["HorizonEnds", "Ppo", "Progress", "Validation", "frozen", "make_environment", "make_learner", "train"]
