"""Turns plain data from an untrusted process into the expected record.

Deals in dataclasses whose fields are text, numbers, flags, tuples and other such records: every value must have the
type that the field says. Knows nothing about what the values mean.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def record_of(kind: type[T], data: Any) -> T:
    """The record of class `kind` that `asdict` and JSON made `data` of.

    Raises:
        TypeError: it is something else.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Point:
    ...     x: int
    >>> record_of(Point, {"x": "1"})
    Traceback (most recent call last):
    TypeError: x of Point is a str
    """
    if not isinstance(data, dict):
        raise TypeError(f"no table for {kind.__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # mypy does not take a class for hashable
    unknown = [name for name in data if name not in hints]
    if unknown:
        raise TypeError(f"{kind.__name__} has no {str(unknown[0])[:40]}")
    return kind(**{name: _value(hints[name], value, f"{name} of {kind.__name__}") for name, value in data.items()})


@lru_cache(64)
def _hints(kind: type[Any]) -> dict[str, Any]:
    every = get_type_hints(kind)
    return {f.name: every[f.name] for f in fields(kind) if f.init}


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for choice in inner:
            try:
                return _value(choice, value, where)
            except TypeError:
                continue
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_value(inner[0], v, where) for v in value)
        if len(inner) == len(value):
            return tuple(_value(h, v, where) for h, v in zip(inner, value, strict=True))
    elif is_dataclass(hint) and isinstance(hint, type):
        return record_of(hint, value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint in (str, int, bool, NoneType) and type(value) is hint:
        return value
    raise TypeError(f"{where} is a {type(value).__name__}")


__all__ = ["record_of"]
