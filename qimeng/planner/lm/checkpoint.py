"""Checkpoints of training: everything that decides the next rollout, in one file.

Deals in states of learners. stable-baselines3 saves neither random states nor unfinished episodes; this module saves
both. Episodes are restored by repeating their steps, which is exact if evaluations are replayed. Frozen weights are not
saved.
"""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qimeng.checkpoint import read_checkpoint, write_checkpoint
from qimeng.envs.gym.observation import TEXTS
from qimeng.errors import WeightsError

if TYPE_CHECKING:
    from sb3_contrib import MaskablePPO

FILE = "checkpoint.pt"


def save_checkpoint(
    learner: MaskablePPO,
    folder: str | Path,
    notes: Any = None,
    best: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write `learner`, between two rollouts, into `folder`; a checkpoint there is replaced at once or not at all.

    Args:
        learner: what is kept.
        folder: made where it does not exist.
        notes: other data to restore, as JSON.
        best: other weights to restore (`trained_weights`).

    Raises:
        WeightsError: it cannot be written.
    """
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    monitor: Any = learner.env
    numpy_state = np.random.get_state(legacy=False)
    rest = {
        "texts": TEXTS,
        "steps": learner.num_timesteps,
        "updates": learner._n_updates,
        "starts": np.asarray(learner._last_episode_starts).tolist(),
        "episodes": monitor.env_method("episode"),
        "returns": monitor.episode_returns.tolist(),
        "lengths": monitor.episode_lengths.tolist(),
        "count": monitor.episode_count,
        "finished": list(learner.ep_info_buffer or []),
        "numpy": numpy_state,
        "python": random.getstate(),
        "notes": notes,
    }
    state = {
        "policy": trained_weights(learner.policy),
        "best": best,
        "optimizer": learner.policy.optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "rest": json.dumps(rest, default=_plain),
    }
    write_state(state, path)


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write what `read_state` reads, at once or not at all.

    Raises:
        WeightsError: it cannot be written.
    """
    write_checkpoint(state, path, WeightsError)


def trained_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters that are trained, by name."""
    return {n: p.detach().cpu().clone() for n, p in module.named_parameters() if p.requires_grad}


def put_weights(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give `module` what `trained_weights` took from its like.

    Raises:
        ValueError: it is of another model; the message names the first parameter that does not fit.
    """
    own = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for name in sorted(own.keys() ^ weights.keys()):
        raise ValueError(f"{name} is trained in {'this run' if name in own else 'the checkpoint'} only")
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter.shape != weights[name].shape:
                raise ValueError(f"{name} is {list(weights[name].shape)}, this run's is {list(parameter.shape)}")
            parameter.copy_(weights[name])


def read_state(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote to `path`, as data.

    Raises:
        ValueError: the file is damaged.
    """
    return read_checkpoint(path)


def load_checkpoint(learner: MaskablePPO, folder: str | Path) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """Put a learner that was made with the same model, tasks and settings where the saved one was.

    `learner.learn(steps, reset_num_timesteps=False)` then goes on. An unfinished episode restarts, with a warning, if
    one of its actions now has another number (a kind of action was added or removed, or the tree differs). The run then
    continues, but not exactly.

    Returns:
        The notes and the best weights that were saved with it.

    Raises:
        WeightsError: there is no checkpoint, it is damaged, or it is of another model, number of environments or
            version of the texts.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise WeightsError(f"no checkpoint in {folder}: {FILE} is missing")
    try:
        state = read_state(path)
        rest = json.loads(state["rest"])
        if rest.get("texts") != TEXTS:
            begin = "remove it to begin PPO again from the imitating planner"
            raise ValueError(f"it learnt to read texts of version {rest.get('texts')}, not {TEXTS}: {begin}")
        if len(rest["episodes"]) != learner.n_envs:
            raise ValueError(f"it has {len(rest['episodes'])} environments, the run {learner.n_envs}")
        put_weights(learner.policy, state["policy"])
        learner.policy.optimizer.load_state_dict(state["optimizer"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).split("\n")[0]
        raise WeightsError(f"the checkpoint in {folder} does not fit: {reason}") from error
    learner.num_timesteps, learner._n_updates = rest["steps"], rest["updates"]
    learner.ep_info_buffer = deque(rest["finished"], maxlen=learner._stats_window_size)
    learner.ep_success_buffer = deque(maxlen=learner._stats_window_size)
    monitor: Any = learner.env
    monitor.reset()
    episodes = enumerate(rest["episodes"])
    rows = [monitor.env_method("bring_back", episode, indices=number)[0] for number, episode in episodes]
    learner._last_obs = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    learner._last_episode_starts = np.asarray(rest["starts"], dtype=bool)
    monitor.episode_returns = np.asarray(rest["returns"], dtype=np.float32)
    monitor.episode_lengths = np.asarray(rest["lengths"], dtype=np.int32)
    monitor.episode_count = rest["count"]
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy_state = rest["numpy"]
    numpy_state["state"]["key"] = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    version, words, gauss = rest["python"]
    random.setstate((version, tuple(words), gauss))
    return rest["notes"], state["best"]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written")


__all__ = ["FILE", "load_checkpoint", "put_weights", "read_state", "save_checkpoint", "trained_weights", "write_state"]
