"""Objects that another package brings: finding them by entry points, and one error that names what they do wrong.

Deals in entry points, calls and what they return. Knows nothing about what the objects are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from qimeng.errors import QimengError

Problem = Callable[[Any], str]
"""What is wrong with a returned value, as the end of a sentence; empty where nothing is."""


class Installed:
    """What installed packages bring under one group of entry points; each is taken once.

    Args:
        group: of the entry points.
        noun: what they bring, for messages.
        take: registers what an entry point names.
    """

    def __init__(self, group: str, noun: str, take: Callable[[Any], object]):
        self.group, self._noun, self._take = group, noun, take
        self._taken: set[EntryPoint] = set()
        self._done = False

    def take(self) -> None:
        """Load and register what is not yet; only the first call that succeeds does anything.

        Raises:
            QimengError: one cannot be loaded or registered; the message names the package.
        """
        if self._done:
            return
        for point in entry_points(group=self.group):
            if point in self._taken:
                continue
            self._taken.add(point)
            try:
                self._take(point.load())
            except Exception as error:  # loading runs the other package's code
                self._taken.discard(point)
                raise unusable(self._noun, point, error) from error
        self._done = True


def named(group: str, noun: str, name: str, known: Iterable[str] = ()) -> Any:
    """What an installed package brings by the entry point `name` of `group`; no other package is loaded.

    Args:
        group: of the entry points.
        noun: what they bring, for messages.
        name: what a user asks for.
        known: names that need no package, for messages.

    Raises:
        ValueError: no package brings it; the message lists the names that there are.
        QimengError: it cannot be loaded; the message names the package.
    """
    points = {point.name: point for point in entry_points(group=group)}
    if name not in points:
        raise ValueError(f"unknown {noun} {name!r}; known: {', '.join(sorted({*known, *points}))}")
    try:
        return points[name].load()
    except Exception as error:  # loading runs the other package's code
        raise unusable(noun, points[name], error) from error


def unusable(noun: str, point: EntryPoint, error: Exception) -> QimengError:
    """The error that names the package of an entry point which cannot be used."""
    package = point.dist.name if point.dist else point.value
    return QimengError(
        f"the {noun} {point.name!r} of the installed package {package} cannot be used "
        f"({type(error).__name__}: {error}); update or uninstall that package"
    )


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


__all__ = ["Installed", "Problem", "anything", "guard", "named", "returns", "unusable", "where"]
