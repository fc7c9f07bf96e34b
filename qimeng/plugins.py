"""Calls of objects that another package may have brought: what they do wrong becomes one error that names them.

Deals in calls and in what they return. Knows nothing about what the objects are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

Problem = Callable[[Any], str]
"""What is wrong with a returned value, as the end of a sentence; empty where nothing is."""


def guard(thing: Any, name: str, problem: Problem, fault: Callable[[str], Exception], *passes: type[Exception]) -> None:
    """Replace the method `name` of `thing` by one that raises `fault` where it fails by itself.

    Args:
        thing: the object.
        name: of the method.
        problem: says what is wrong with what it returns.
        fault: makes the error from a sentence such as ``"its print raised KeyError: 'x'"``.
        passes: errors that the method may raise.
    """
    call = getattr(thing, name)

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            found = call(*args, **kwargs)
            found = tuple(found) if isinstance(found, Iterator) else found  # what it raises, it raises here
        except passes:
            raise
        except Exception as error:  # another package's code may raise anything
            raise fault(f"its {name} raised {type(error).__name__}: {error}") from error
        if text := problem(found):
            raise fault(f"its {name} {text}")
        return found

    setattr(thing, name, run)


def returns(kind: type) -> Problem:
    """A problem where something else than a `kind` is returned."""
    return lambda found: "" if isinstance(found, kind) else f"returned {type(found).__name__}, not {kind.__name__}"


def anything(found: Any) -> str:
    """No problem."""
    return ""


def where(thing: Any) -> str:
    """Module and class of an object, to find it by."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


__all__ = ["Problem", "anything", "guard", "returns", "where"]
