"""Settings of a training run, from a TOML file and single overrides.

Deals in names, types and texts. Knows nothing about training.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qimeng.errors import QimengError
from qimeng.planner.lm.branches import Teacher
from qimeng.planner.lm.imitation import Imitation
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.ranges import POSITIVE, PROPER_SHARE, range_of
from qimeng.planner.lm.training import Ppo
from qimeng.planner.lm.value import ValueStart

ANSWERS = ("stored", "live", "mixed")

DTYPES = ("float32", "bfloat16")

NONE = "none"
"""TOML has no other word for it."""


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
        processor: where the model runs, as PyTorch calls it: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; the GPU if there is
            one, by default.
        reward: ``"anytime"``, ``"log-speedup"``, ``"milestones"`` or ``"paper"`` (`qimeng.envs.gym.reward`).
        coverage: weight of the generated kernels' share of the time, added to the reward; 0 for none.
        held_out: share of the trees that training never sees. Half of those with a possible gain decide which weights
            are kept (validation). The report uses the other half.
        held_out_families: families of specs that are held out completely, in addition.
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
    processor: str = ""
    reward: str = "log-speedup"
    coverage: float = 0.0
    held_out: float = field(default=0.2, metadata=PROPER_SHARE)
    held_out_families: tuple[str, ...] = ()
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
        for name, setting, value in _settings(self):
            if isinstance(value, int | float) and not isinstance(value, bool) and value not in range_of(setting):
                raise TrainingError(f"{name} is a number {range_of(setting)}, not {value}")
        if self.ppo.steps and self.ppo.environments * self.ppo.rollout < 2:
            raise TrainingError("ppo.environments and ppo.rollout are both 1: an update needs at least two steps")
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
    data: dict[str, Any] = {}
    _override(data, defaults)
    if path is not None:
        try:
            _merge(data, tomllib.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path} cannot be read as TOML: {error}") from None
    _override(data, overrides)
    found = _build(TrainConfig, data, "")
    assert isinstance(found, TrainConfig)
    return found


def to_toml(config: Any, explained: bool = False) -> str:
    """`config` as TOML that `load_config` reads; with each field's meaning above it where `explained`."""
    tables, lines = [], []
    for name, value in _fields(config):
        if dataclasses.is_dataclass(value):
            tables += [f"\n[{name}]", *([f"# {meanings(type(config))[name]}"] if explained else [])]
            tables += _lines(value, explained)
        else:
            lines += _line(config, name, value, explained)
    return "\n".join([*lines, *tables]) + "\n"


def meanings(kind: type) -> dict[str, str]:
    """What each field of a dataclass means, from the ``Attributes:`` of its docstring.

    >>> meanings(Imitation)["batch"]
    'examples a step of the optimizer.'
    """
    found: dict[str, str] = {}
    name, known = "", {f.name for f in dataclasses.fields(kind)}
    for line in (inspect.getdoc(kind) or "").partition("Attributes:")[2].splitlines():
        head, colon, rest = line.strip().partition(":")
        if colon and head in known and line.startswith("    ") and not line.startswith("     "):
            name, found[head] = head, rest.strip()
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """Names of the settings in which the two differ, ``"ppo.rate"`` say."""
    pairs = zip(_settings(one), _settings(other), strict=True)
    return [name for (name, _, value), (_, _, changed) in pairs if value != changed]


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each setting that has no parts, ``"ppo.rate"`` say: its name, its field and its value."""
    for setting in dataclasses.fields(config):
        name, value = prefix + setting.name, getattr(config, setting.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{name}.")
        else:
            yield name, setting, value


def _fields(config: Any) -> list[tuple[str, Any]]:
    return [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config)]


def _lines(config: Any, explained: bool) -> list[str]:
    return [line for name, value in _fields(config) for line in _line(config, name, value, explained)]


def _line(config: Any, name: str, value: Any, explained: bool) -> list[str]:
    note = [f"# {meanings(type(config))[name]}"] if explained else []
    return [*note, f"{name} = {_text(value)}"]


def _text(value: Any) -> str:
    if value is None:
        return _text(NONE)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _literal(text: str) -> Any:
    """A TOML value; what is none is a string, so that ``start=mini`` needs no quotes."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _override(data: dict[str, Any], texts: Sequence[str]) -> None:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise TrainingError(f"{text!r} sets nothing: say NAME=VALUE, as in ppo.steps=2048")
        _put(data, name.strip().split("."), _literal(value.strip()))


def _merge(data: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(data.get(name), dict):
            _merge(data[name], value)
        else:
            data[name] = value


def _put(data: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise TrainingError(f"{'.'.join(names)}: {name} has no parts")
    data[names[-1]] = value


def _build(kind: type, data: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise TrainingError(f"unknown setting {prefix}{name!s}; known: {', '.join(prefix + k for k in known)}")
        given[name] = _value(known[name], value, prefix + name)
    try:
        return kind(**given)
    except ValueError as error:  # settings that do not fit each other
        raise TrainingError(f"{prefix.removesuffix('.')}: {error}") from None


def _value(kind: Any, value: Any, name: str) -> Any:
    if isinstance(kind, types.UnionType):
        if value == NONE:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if isinstance(value, Mapping):
            return _build(kind, value, f"{name}.")
        raise TrainingError(f"{name} is a table of settings, not {value!r}")
    if typing.get_origin(kind) is tuple:
        return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise TrainingError(f"{name} is {kind.__name__}, not {value!r}")
    return value


__all__ = [
    "ANSWERS", "TrainConfig", "TrainingError", "differences", "load_config", "meanings", "processor_of", "to_toml",
]  # fmt: skip
