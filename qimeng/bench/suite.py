"""What a benchmark consists of: a suite names computations, each by an id.

Deals in ids, groups of ids and specs. The suites that come with the library are in `qimeng.bench.suites` and
`qimeng.bench.kernelbench`; an installed package adds one by an entry point of the group `qimeng.suites`. Ids and names
only label rows: nothing that optimizes ever sees them. Knows nothing about what a problem computes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, Union

from qimeng.bench.ids import SuiteError
from qimeng.errors import QimengError, SpecError

if TYPE_CHECKING:
    from qimeng.spec import KernelSpec

GROUP = "qimeng.suites"
"""Entry points of this group are suites of other packages: a subclass of `Suite`, or a function that returns one."""

OWN = "own"
"""As dtype or mode: that of the spec itself."""


Given = Union["KernelSpec", Callable[[], "KernelSpec"]]
"""A spec, or a function that makes it. With a function, a suite lists its problems without loading them."""


class Suite(ABC):
    """A named set of computations to measure; subclasses write `problems`.

    Attributes:
        name: what rows call the suite.
    """

    name: str

    @abstractmethod
    def problems(self) -> Iterator[tuple[str, Given]]:
        """The id and the spec of each problem, in the order that tables show. Ids are unique, as in ``"level1/19"``."""

    def group(self, id: str) -> str:
        """The part of the suite that a problem belongs to; what is before the last slash of its id by default."""
        return id.rpartition("/")[0]


@dataclass(frozen=True)
class SpecFile:
    """A KernelBench-style file, read when its spec is asked for.

    Attributes:
        path: the file, with `Model`, `get_inputs` and `get_init_inputs`.
        name: a label for people.
    """

    path: Path
    name: str = ""

    def __call__(self) -> KernelSpec:
        """The spec.

        Raises:
            SpecError: the file cannot be read or lacks a name.
        """
        from qimeng.spec import KernelSpec  # loads torch, which a list of problems does without

        return KernelSpec.from_file(self.path)

    @cached_property
    def digest(self) -> str:
        """Content hash of the file."""
        return hashlib.blake2b(self.path.read_bytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Problem:
    """One problem of a suite.

    Attributes:
        suite: the suite's name.
        id: the problem's id in it.
        group: the part of the suite that it belongs to.
        given: its spec, or what makes it.
    """

    suite: str
    id: str
    group: str
    given: Given

    @property
    def name(self) -> str:
        """A label for people, where there is one beside the id."""
        return self.given.name if isinstance(self.given, SpecFile) or _is_spec(self.given) else ""

    @cached_property
    def digest(self) -> str:
        """Content hash, so that a changed problem is not mistaken for a finished one; empty where there is no spec."""
        if isinstance(self.given, SpecFile) or _is_spec(self.given):
            return self.given.digest
        try:
            return self.spec().digest
        except SpecError:
            return ""

    def spec(self, dtype: str = OWN, mode: str = OWN) -> KernelSpec:
        """The spec in a dtype and a precision mode; in its own by default.

        Raises:
            SpecError: it cannot be made; the message names suite and problem where the suite's own code failed.
        """
        from qimeng.spec import KernelSpec

        made = self.given if isinstance(self.given, KernelSpec) else self._made(self.given)
        changes = {what: given for what, given in (("dtype", dtype), ("mode", mode)) if given != OWN}
        return made.with_(**changes) if changes else made

    def _made(self, make: Callable[[], KernelSpec]) -> KernelSpec:
        try:
            found = make()
        except QimengError:
            raise
        except Exception as error:  # a suite's own code
            words = f"{type(error).__name__}: {error}"
            raise SpecError(f"problem {self.id} of the suite {self.suite} cannot be made ({words})") from error
        if not _is_spec(found):
            raise SpecError(
                f"problem {self.id} of the suite {self.suite} is a {type(found).__name__}; a suite gives a KernelSpec"
            )
        return found


def _is_spec(thing: object) -> TypeGuard[KernelSpec]:
    from qimeng.spec import KernelSpec

    return isinstance(thing, KernelSpec)


def problems_of(suite: Suite, only: str = "") -> tuple[Problem, ...]:
    """The problems of a suite.

    Args:
        suite: the suite.
        only: ids and patterns, comma-separated: ``"level1/19,level2/*"``; empty for all.

    Raises:
        SuiteError: the suite fails, gives an id twice or something that is no spec; or a pattern fits no id.
    """
    found: dict[str, Problem] = {}
    if not isinstance(getattr(suite, "name", None), str):
        raise SuiteError(f"the suite {type(suite).__module__}.{type(suite).__qualname__} has no name, which rows need")
    try:
        for id, given in suite.problems():
            if not isinstance(id, str) or not id or id in found:
                raise SuiteError(f"the suite {suite.name} gives the id {id!r}, which is empty, no text or there twice")
            if not callable(given) and not _is_spec(given):
                raise SuiteError(
                    f"the suite {suite.name} gives a {type(given).__name__} for {id}; it takes a KernelSpec or a "
                    "function that returns one"
                )
            found[id] = Problem(suite.name, id, suite.group(id), given)
    except QimengError:
        raise
    except Exception as error:  # a suite's own code
        words = f"{type(error).__name__}: {error}"
        raise SuiteError(f"the suite {suite.name} cannot list its problems ({words})") from error
    patterns = [p for p in (part.strip() for part in only.split(",")) if p]
    for pattern in patterns:
        if not any(fnmatchcase(id, pattern) for id in found):
            some = ", ".join(list(found)[:3]) or "none"
            raise SuiteError(f"no problem of the suite {suite.name} is called {pattern!r}; its ids: {some} …")
    return tuple(p for id, p in found.items() if not patterns or any(fnmatchcase(id, one) for one in patterns))


__all__ = ["GROUP", "OWN", "Given", "Problem", "SpecFile", "Suite", "SuiteError", "problems_of"]
