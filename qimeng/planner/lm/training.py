"""Training: imitation of given choices, then PPO on environments.

Deals in batches, seeds and progress. What is paid is for `qimeng.envs.reward`, where the answers come from (a GPU, or a
store that replays them) is for the task's evaluator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qimeng.envs.environment import KernelOptimizationEnv
from qimeng.envs.reward import Reward
from qimeng.envs.shares import MAX_ACTIONS
from qimeng.envs.task import Task
from qimeng.interfaces import Action, Observation
from qimeng.planner.lm.checkpoint import FILE, load_checkpoint, save_checkpoint
from qimeng.planner.lm.reading import ReadObservation
from qimeng.planner.lm.weights import PlannerModel

if TYPE_CHECKING:
    from sb3_contrib import MaskablePPO

Progress = Callable[[dict[str, float]], None]
"""Called with figures: after each epoch of imitation, and after each rollout of PPO."""


@dataclass(frozen=True)
class Imitation:
    """How choices are imitated.

    Attributes:
        epochs: passes over the pairs.
        batch: pairs a step of the optimizer.
        rate: learning rate.
        clip: largest norm of the gradient.
        seed: of the order of the pairs.
    """

    epochs: int = 4
    batch: int = 16
    rate: float = 1e-3
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Ppo:
    """How PPO trains; the defaults suit the mini model from scratch, where small rollouts and many updates learn.

    Attributes:
        steps: steps in environments, at least; whole rollouts are taken.
        environments: environments side by side, each with all tasks.
        rollout: steps of each environment before an update.
        batch: steps a step of the optimizer.
        epochs: passes over a rollout.
        rate: learning rate.
        gamma: discount.
        gae: lambda of the generalised advantage estimate.
        clip: of the probability ratio.
        entropy: coefficient of the policy's entropy.
        value: coefficient of the value's error.
        target_kl: a rollout's passes end where the policy has gone 1.5 times this far; None for no limit.
        max_steps: longest episode.
        seed: of the environments, of the sampling, and of the batches.
    """

    steps: int = 4096
    environments: int = 8
    rollout: int = 16
    batch: int = 32
    epochs: int = 4
    rate: float = 3e-4
    gamma: float = 1.0
    gae: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    target_kl: float | None = 0.1
    max_steps: int = 16
    seed: int = 0


def imitate(
    model: PlannerModel,
    pairs: Sequence[tuple[Observation, Action]],
    settings: Imitation | None = None,
    progress: Progress | None = None,
) -> list[dict[str, float]]:
    """Make the policy choose as in `pairs`, by cross-entropy over the legal actions.

    Returns:
        For each epoch: ``loss`` in nats and ``accuracy``, means over the pairs as they were seen while training.

    Raises:
        ValueError: no pairs, or a choice that its observation does not offer.
    """
    s = settings or Imitation()
    if not pairs:
        raise ValueError("nothing to imitate: give at least one (observation, action)")
    rows, wanted = [], []
    for seen, action in pairs:
        if action not in seen.actions:
            raise ValueError(f"{action} is not among the {len(seen.actions)} actions of its observation")
        rows.append(model.reader.arrays(seen))
        wanted.append(seen.actions.index(action))
    scorer, shuffle = model.scorer.eval(), np.random.default_rng(s.seed)
    trained = [p for p in scorer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=s.rate, weight_decay=0.0)
    device, found = trained[0].device, []
    for epoch in range(s.epochs):
        loss_sum, right, order = 0.0, 0, shuffle.permutation(len(rows))
        for start in range(0, len(rows), s.batch):
            chosen = order[start : start + s.batch]
            logits = _logits(model, [rows[i] for i in chosen], device)
            target = torch.tensor([wanted[i] for i in chosen], device=device)
            loss = torch.nn.functional.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, s.clip)
            optimizer.step()
            loss_sum += loss.item() * len(chosen)
            right += int((logits.argmax(1) == target).sum())
        found.append({"epoch": epoch + 1, "loss": loss_sum / len(rows), "accuracy": right / len(rows)})
        if progress is not None:
            progress(found[-1])
    return found


def make_learner(
    model: PlannerModel,
    tasks: Sequence[Task],
    settings: Ppo | None = None,
    reward: Callable[[], Reward] | None = None,
    tensorboard: str | None = None,
) -> MaskablePPO:
    """MaskablePPO on `tasks` with `model` as its policy, which is trained in place.

    Args:
        model: policy, value and reader.
        tasks: what is optimized; one is drawn at each reset.
        settings: of PPO.
        reward: makes the reward of one environment; `MilestoneReward` by default.
        tensorboard: folder of TensorBoard's logs.
    """
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    from qimeng.planner.lm.policy import LanguageModelPolicy

    s = settings or Ppo()

    def environment() -> ReadObservation:
        env = KernelOptimizationEnv(tasks, reward() if reward else None, max_steps=s.max_steps)
        return ReadObservation(env, model.reader)

    return MaskablePPO(
        LanguageModelPolicy,
        VecMonitor(DummyVecEnv([environment] * s.environments)),
        learning_rate=s.rate,
        n_steps=s.rollout,
        batch_size=s.batch,
        n_epochs=s.epochs,
        gamma=s.gamma,
        gae_lambda=s.gae,
        clip_range=s.clip,
        ent_coef=s.entropy,
        vf_coef=s.value,
        target_kl=s.target_kl,
        tensorboard_log=tensorboard,
        policy_kwargs={"scorer": model.scorer},
        seed=s.seed,
        device=next(model.scorer.parameters()).device,
    )


def train(
    model: PlannerModel,
    tasks: Sequence[Task],
    settings: Ppo | None = None,
    reward: Callable[[], Reward] | None = None,
    progress: Progress | None = None,
    tensorboard: str | None = None,
    checkpoint: str | Path | None = None,
) -> list[dict[str, float]]:
    """Train `model` by PPO on `tasks`, in place.

    Args:
        model: policy, value and reader.
        tasks: what is optimized; one is drawn at each reset.
        settings: of PPO; `Ppo.steps` counts those of a run that is taken up again as well.
        reward: makes the reward of one environment; `MilestoneReward` by default.
        progress: called after each rollout.
        tensorboard: folder of TensorBoard's logs.
        checkpoint: folder of a checkpoint, written before each rollout and at the end. Where there is one already,
            training goes on from it, exactly as if it had not been interrupted if evaluations are replayed.

    Raises:
        WeightsError: the checkpoint is damaged, or of another model or number of environments.

    Returns:
        For each rollout: ``steps`` so far, ``reward``: mean return of the last 100 episodes, ``length``: their mean
        number of steps, ``seconds`` since the start.
    """
    from stable_baselines3.common.callbacks import BaseCallback

    s, found, began = settings or Ppo(), [], time.monotonic()

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if checkpoint is not None:
                save_checkpoint(learner, checkpoint)

        def _on_rollout_end(self) -> None:
            episodes: Any = self.model.ep_info_buffer
            if not episodes:
                return
            found.append(
                {
                    "steps": self.num_timesteps,
                    "reward": float(np.mean([e["r"] for e in episodes])),
                    "length": float(np.mean([e["l"] for e in episodes])),
                    "seconds": time.monotonic() - began,
                }
            )
            if progress is not None:
                progress(found[-1])

    learner = make_learner(model, tasks, s, reward, tensorboard)
    if checkpoint is not None and (Path(checkpoint) / FILE).exists():
        load_checkpoint(learner, checkpoint)
    left = s.steps - learner.num_timesteps
    if left > 0:
        learner.learn(left, callback=Watch(), reset_num_timesteps=learner.num_timesteps == 0)
    if checkpoint is not None and left > 0:
        save_checkpoint(learner, checkpoint)
    return found


def _logits(model: PlannerModel, rows: Sequence[dict[str, np.ndarray]], device: torch.device) -> torch.Tensor:
    """Logits of the policy, one row an observation; those of places that hold no action are -inf."""
    given = {name: torch.from_numpy(np.stack([r[name] for r in rows])).to(device) for name in rows[0]}
    actions = given["action_ids"].long().view(len(rows), MAX_ACTIONS, -1)
    count = int((actions[:, :, 0] >= 0).sum(1).max())
    logits, _ = model.scorer(given["state_ids"].long(), actions[:, :count], given["features"])
    found: torch.Tensor = logits
    return found
