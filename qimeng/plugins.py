"""Objects that another package or a file brings: finding them, and one error that names what they do wrong.

Deals in entry points, files, calls and what they return. Knows nothing about what the objects are for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from qimeng.errors import QimengError

FILES = "QIMENG_PLUGINS"
"""Variable with the files that bring objects, divided as in PATH; processes that are started have it too."""

SHIPPED = (
    "qimeng.vocabulary.lowprecision", "qimeng.vocabulary.quantized", "qimeng.vocabulary.sparse",
    "qimeng.vocabulary.irregular",
)  # fmt: skip
"""Packages that come with the library and register what they bring when they are imported, as a user's would."""

_run: set[str] = set()

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
        if not self._done:
            for name in SHIPPED:
                import_module(name)
        run_files()
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


def use_files(paths: Iterable[Path]) -> None:
    """Run files that register objects, in this process now and in those that it starts when they look for objects.

    Raises:
        QimengError: one does not run; the message names the file and the line.
    """
    for path in paths:
        name = str(path.resolve())
        _run_once(name)
        known = list(filter(None, os.environ.get(FILES, "").split(os.pathsep)))
        os.environ[FILES] = os.pathsep.join(dict.fromkeys([*known, name]))


def run_files() -> None:
    """Run the files that `FILES` names, each once in a process.

    Raises:
        QimengError: one does not run; the message names the file and the line.
    """
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        _run_once(path)


def _run_once(path: str) -> None:
    if path in _run:
        return
    _run.add(path)
    try:
        _execute(Path(path))
    except Exception as error:  # the file is the user's, and may raise anything
        _run.discard(path)
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        at = f", line {lines[-1]}" if lines else ""
        raise QimengError(f"the plugin {path}{at} does not run: {type(error).__name__}: {error}") from error


def _execute(path: Path) -> None:
    name = f"qimeng_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError("a plugin is a Python file, such as my_actions.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


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


def is_shared(module: ModuleType) -> bool:
    """Whether every process can import it: the standard library, installed packages, this one.

    One that is installed to be edited is not: processes in a sandbox do not read its folder.
    """
    path = getattr(module, "__file__", None) or ""
    top = module.__name__.split(".")[0]
    return not path or top in ("qimeng", "torch") or "site-packages" in path or "/lib/python3" in path


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


def not_an_object(thing: Any, noun: str, base: type) -> str:
    """What is wrong with `thing`, which should be an object of a class that extends `base`; empty where nothing is."""
    if isinstance(thing, base):
        return ""
    if isinstance(thing, type) and issubclass(thing, base):
        return f"give an object of the class, {thing.__qualname__}(), not the class {thing.__qualname__}"
    return f"a {noun} must extend {base.__module__}.{base.__qualname__}, {type(thing).__qualname__} does not"


def where(thing: Any) -> str:
    """Module and class of an object, to find it by."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


__all__ = [
    "SHIPPED",
    "Installed",
    "Problem",
    "anything",
    "guard",
    "is_shared",
    "named",
    "not_an_object",
    "returns",
    "run_files",
    "unusable",
    "use_files",
    "where",
]
