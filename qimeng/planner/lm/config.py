"""The settings of a training run.

Deals in what there is to set, and in what fits together. Knows nothing about how training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qimeng.errors import QimengError
from qimeng.planner.lm.branches import Teacher
from qimeng.planner.lm.bundled import Bundles
from qimeng.planner.lm.imitation import Imitation
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.ranges import POSITIVE, PROPER_SHARE, range_of
from qimeng.planner.lm.settings import SettingsError, read_settings, settings_of
from qimeng.planner.lm.training import Ppo
from qimeng.planner.lm.value import ValueStart

ANSWERS = ("stored", "live", "mixed")

DTYPES = ("float32", "bfloat16")


class TrainingError(QimengError):
    """Settings, trees or a folder that training cannot go on with; the message says what to change."""

    code = "training"


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `qimeng train`.

    Attributes:
        trees: files of stored trees (`qimeng collect export`).
        answers: ``"stored"``: every answer comes from the trees, and legal actions that were never tried are not
            offered; ``"live"``: the judge of this machine answers; ``"mixed"``: the judge answers what the trees lack.
        device: train on the trees of this device, and judge live for it. Default: the only device of the trees, or this
            machine's.
        coder: name of the coder that decides what is legal, and writes patches for a live judge.
        specs: number of specs generated from `seed` if there are no trees (``"live"``).
        start: ``"mini"`` for a new small model, the folder of a planner, or any causal language model of Hugging Face
            by name or path.
        dtype: weights of a Hugging Face model that is only adapted: ``"float32"`` or ``"bfloat16"``, which takes half
            the memory; adapter and value head stay in float32.
        mini: size of a new small model.
        lora: rank of the LoRA adapter that is trained instead of the whole model; 0 for the whole model.
        length: maximum number of tokens of a state for a new model.
        temperature: of a new model's policy (`Scale`). The larger it is, the less the texts of actions decide by
            themselves, and the more what the head makes of them and of their numbers.
        processor: where the model runs, as PyTorch calls it: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; the GPU if there is
            one, by default.
        reward: ``"anytime"``, ``"log-speedup"``, ``"milestones"`` or ``"paper"`` (`qimeng.envs.gym.reward`).
        coverage: weight of the generated kernels' share of the time, added to the reward; 0 for none.
        held_out: share of the trees that training never sees. Half of those with a possible gain decide which weights
            are kept (validation). The report uses the other half.
        held_out_families: families of specs that are held out completely, in addition.
        bundles: bundles of the trees' computations that are planned in their place; 0 for none.
        walks: walks with random detours through each tree, whose states are imitated in addition to the best branch.
        teacher: which choices are imitated.
        imitation: imitation of the best branches; 0 epochs for none.
        value: fitting the value head before PPO.
        ppo: PPO; 0 steps for none.
        validate_every: rollouts between two validations.
        patience: validations in a row without a better score, after which training ends; 0 for never.
        validation_evaluations: evaluations on each tree of a validation.
        tensorboard: whether TensorBoard's logs are written, to the folder ``tensorboard`` of the run.
        seed: seed of the model, of the held-out trees and of all random draws. The parts' own seeds are added to it.
    """

    trees: tuple[str, ...] = ()
    answers: str = "stored"
    device: str = ""
    coder: str = "template"
    specs: int = field(default=32, metadata=POSITIVE)
    start: str = "mini"
    dtype: str = "float32"
    mini: MiniSize = field(default_factory=MiniSize)
    lora: int = 0
    length: int = field(default=512, metadata=POSITIVE)
    temperature: float = 0.5
    processor: str = ""
    reward: str = "log-speedup"
    coverage: float = 0.0
    held_out: float = field(default=0.2, metadata=PROPER_SHARE)
    held_out_families: tuple[str, ...] = ()
    bundles: Bundles = field(default_factory=Bundles)
    walks: int = 4
    teacher: Teacher = field(default_factory=Teacher)
    imitation: Imitation = field(default_factory=Imitation)
    value: ValueStart = field(default_factory=ValueStart)
    ppo: Ppo = field(default_factory=Ppo)
    validate_every: int = 2
    patience: int = 6
    validation_evaluations: int = field(default=10, metadata=POSITIVE)
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        from qimeng.envs.gym.reward import REWARDS
        from qimeng.envs.steps.setup import CODERS

        allowed = (("answers", ANSWERS), ("reward", tuple(REWARDS)), ("coder", tuple(CODERS)), ("dtype", DTYPES))
        for name, known in allowed:
            if getattr(self, name) not in known:
                raise TrainingError(f"{name} = {getattr(self, name)!r} is none of {', '.join(known)}")
        for name, setting, value in settings_of(self):
            if isinstance(value, int | float) and not isinstance(value, bool) and value not in range_of(setting):
                raise TrainingError(f"{name} is a number {range_of(setting)}, not {value}")
        if not self.temperature:
            raise TrainingError("temperature must be above 0")
        if self.ppo.processes and self.answers != "stored":
            raise TrainingError("ppo.processes is for stored answers: set answers = 'stored', or ppo.processes = false")
        if self.dtype != "float32" and not self.lora:
            raise TrainingError(f"dtype = {self.dtype!r} is for weights that stay as they are: set lora, say to 16")


def processor_of(config: TrainConfig) -> torch.device:
    """Where the model of `config` runs.

    Raises:
        TrainingError: PyTorch cannot compute there.
    """
    name = config.processor or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        text = f"processor = {name!r}: PyTorch cannot compute there ({why}); leave it empty to take what there is"
        raise TrainingError(text) from None


def load_config(path: Path | None = None, overrides: Sequence[str] = (), defaults: Sequence[str] = ()) -> TrainConfig:
    """Settings from `defaults`, a TOML file, if any, and `overrides` such as ``"ppo.steps=2048"``, the later winning.

    Raises:
        TrainingError: an unknown name, a value of another type or out of range, or a file that cannot be read.
    """
    try:
        found = read_settings(TrainConfig, path, overrides, defaults)
    except SettingsError as error:
        raise TrainingError(str(error)) from None
    assert isinstance(found, TrainConfig)
    return found


__all__ = ["ANSWERS", "TrainConfig", "TrainingError", "load_config", "processor_of"]
