"""Suites by name: KernelBench, a folder of files, a Python module, and those of installed packages.

Deals in finding a suite from what a user writes, ``NAME`` or ``NAME:ARGUMENT``. Knows nothing about how problems run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from qimeng.bench.ids import SuiteError, natural
from qimeng.bench.kernelbench import KernelBench
from qimeng.bench.suite import GROUP, SpecFile, Suite
from qimeng.errors import QimengError
from qimeng.spec import KernelSpec


class FolderSuite(Suite):
    """KernelBench-style files below a folder; a file's id is its path there, without the ending.

    Files and folders whose name begins with ``_`` or ``.`` do not count.

    Args:
        path: the folder.

    Raises:
        SuiteError: no such folder, or no file in it.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.resolve().name
        if not self.path.is_dir():
            raise SuiteError(f"no folder {path}")
        if not self._ids():
            raise SuiteError(f"the folder {path} holds no problem file (*.py with Model, get_inputs, get_init_inputs)")

    def problems(self) -> Iterator[tuple[str, SpecFile]]:
        """The files, in the order of their ids."""
        for id in sorted(self._ids(), key=natural):
            yield id, SpecFile(self.path / f"{id}.py")

    def _ids(self) -> list[str]:
        paths = [p.relative_to(self.path) for p in self.path.rglob("*.py")]
        return [p.with_suffix("").as_posix() for p in paths if not any(part[0] in "_." for part in p.parts)]


@dataclass(frozen=True)
class _Member:
    """A spec of a Python module, found there by name, so that a worker process imports the module itself."""

    module: str
    name: str

    def __call__(self) -> KernelSpec:
        found: Any = vars(importlib.import_module(self.module))[self.name]
        made: KernelSpec = found if isinstance(found, KernelSpec) else found()
        return made


class ModuleSuite(Suite):
    """The specs of a Python module: its public `KernelSpec`s, and its public functions that take no argument.

    Such a function returns a `KernelSpec`; it is called when its problem's turn comes. The id is the name.

    Args:
        module: name of an importable module, ``"package.module"``.

    Raises:
        SuiteError: it cannot be imported, or holds neither.
    """

    def __init__(self, module: str):
        self.name = module
        try:
            loaded = importlib.import_module(module)
        except Exception as error:  # the module's own code
            raise SuiteError(f"cannot import the module {module} ({type(error).__name__}: {error})") from error
        self._members = [name for name, value in vars(loaded).items() if _is_problem(name, value, loaded)]
        if not self._members:
            raise SuiteError(f"the module {module} has no public KernelSpec and no function without arguments")

    def problems(self) -> Iterator[tuple[str, _Member]]:
        """The members, in the order of the module's text."""
        for name in self._members:
            yield name, _Member(self.name, name)


def _is_problem(name: str, value: Any, module: ModuleType) -> bool:
    if name.startswith("_"):
        return False
    if isinstance(value, KernelSpec):
        return True
    own = inspect.isfunction(value) and value.__module__ == module.__name__
    return own and not any(p.default is p.empty for p in inspect.signature(value).parameters.values())


BUILT_IN: Mapping[str, Callable[[str], Suite]] = {
    "kernelbench": KernelBench,
    "folder": FolderSuite,
    "module": ModuleSuite,
}
"""Suites that come with the library: name to what makes one from its argument."""


def suite_named(text: str) -> Suite:
    """The suite that a user writes as ``NAME:ARGUMENT``.

    That is ``"kernelbench:FOLDER"``, ``"folder:FOLDER"``, ``"module:NAME"``; or the name of an entry point of the group
    `qimeng.suites`, with an argument or without.

    Raises:
        SuiteError: no such suite, or it cannot be made; the message names it and its package.
    """
    name, colon, argument = text.partition(":")
    if name in BUILT_IN:
        if not argument:
            raise SuiteError(f"write {name}:{'NAME' if name == 'module' else 'FOLDER'}")
        return BUILT_IN[name](argument)
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise SuiteError(f"no suite called {name!r}; known: {', '.join([*BUILT_IN, *sorted(points)])}")
    point = points[name]
    package = point.dist.name if point.dist else point.value
    try:
        found = point.load()(*([argument] if colon else []))
    except QimengError:
        raise
    except Exception as error:  # the other package's code
        words = f"{type(error).__name__}: {error}"
        raise SuiteError(f"the suite {name!r} of the installed package {package} cannot be used ({words})") from error
    if not isinstance(found, Suite):
        raise SuiteError(
            f"the suite {name!r} of the installed package {package} is a {type(found).__name__}, no "
            "qimeng.bench.suite.Suite"
        )
    return found


__all__ = ["FolderSuite", "ModuleSuite", "suite_named"]
