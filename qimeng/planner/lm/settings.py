"""Settings as dataclasses, which may hold others: read from TOML and single overrides, written as TOML, compared.

Deals in names, types and texts. Knows nothing about what a setting is for.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NONE = "none"
"""TOML has no other word for it."""


class SettingsError(ValueError):
    """Settings that do not fit, or a file that cannot be read; the message says which."""


def read_settings(kind: type, path: Path | None, overrides: Sequence[str], defaults: Sequence[str] = ()) -> Any:
    """A `kind` with settings from `defaults`, a TOML file, if any, and `overrides`, the later winning.

    Args:
        kind: the dataclass.
        path: the file.
        overrides: texts such as ``"ppo.steps=2048"``.
        defaults: likewise.

    Raises:
        SettingsError: an unknown name, a value of another type, parts that refuse their settings with a `ValueError`,
            or a file that cannot be read.
    """
    data: dict[str, Any] = {}
    _override(data, defaults)
    if path is not None:
        try:
            _merge(data, tomllib.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path} cannot be read as TOML: {error}") from None
    _override(data, overrides)
    return _build(kind, data, "")


def override(name: str, value: Any) -> str:
    """A setting as an override of `read_settings`, whatever characters it has.

    >>> override("trees", ("a.xz",))
    'trees=["a.xz"]'
    """
    return f"{name}={_text(value)}"


def to_toml(config: Any, explained: bool = False) -> str:
    """`config` as TOML that `read_settings` reads; with each field's meaning above it where `explained`."""
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

    >>> from qimeng.planner.lm.ranges import Range
    >>> meanings(Range)["most"]
    'largest number.'
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


def differences(one: Any, other: Any) -> list[str]:
    """Names of the settings in which two of one class differ, ``"ppo.rate"`` say."""
    pairs = zip(settings_of(one), settings_of(other), strict=True)
    return [name for (name, _, value), (_, _, changed) in pairs if value != changed]


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Each setting that has no parts, ``"ppo.rate"`` say: its name, its field and its value."""
    for setting in dataclasses.fields(config):
        name, value = prefix + setting.name, getattr(config, setting.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{name}.")
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
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has the same escapes
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
            raise SettingsError(f"{text!r} sets nothing: say NAME=VALUE, as in ppo.steps=2048")
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
            raise SettingsError(f"{'.'.join(names)}: {name} has no parts")
    data[names[-1]] = value


def _build(kind: type, data: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise SettingsError(f"unknown setting {prefix}{name!s}; known: {', '.join(prefix + k for k in known)}")
        given[name] = _value(known[name], value, prefix + name)
    try:
        return kind(**given)
    except ValueError as error:  # settings that do not fit each other
        raise SettingsError(f"{prefix.removesuffix('.')}: {error}") from None


def _value(kind: Any, value: Any, name: str) -> Any:
    if isinstance(kind, types.UnionType):
        if value == NONE:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if isinstance(value, Mapping):
            return _build(kind, value, f"{name}.")
        raise SettingsError(f"{name} is a table of settings, not {value!r}")
    if typing.get_origin(kind) is tuple:
        return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise SettingsError(f"{name} is {kind.__name__}, not {value!r}")
    return value


__all__ = ["SettingsError", "differences", "meanings", "override", "read_settings", "settings_of", "to_toml"]
