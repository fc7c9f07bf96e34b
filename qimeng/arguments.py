"""Arguments of the library's functions, checked before any work starts.

Deals in types and ranges, with one message that says what to give instead. Knows nothing about what they are for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def check_budget(seconds: Any, evaluations: Any = 0) -> None:
    """Refuse budgets that are no budgets.

    Raises:
        ValueError: `seconds` is no number from 0 on, or `evaluations` no whole number from 0 on.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds) or seconds < 0:
        raise ValueError(f"seconds must be a number from 0 on, got {seconds!r}")
    if isinstance(evaluations, bool) or not isinstance(evaluations, int) or evaluations < 0:
        raise ValueError(f"evaluations must be a whole number from 0 on, got {evaluations!r}")


def check_object(what: str, given: Any, methods: Sequence[str], names: bool = True) -> None:
    """Refuse what is neither a name nor an object of its role.

    Args:
        what: the argument.
        given: its value.
        methods: which an object of the role has.
        names: whether a name may stand for it.

    Raises:
        ValueError: it is neither.
    """
    if (names and isinstance(given, str)) or (
        not isinstance(given, type) and all(callable(getattr(given, method, None)) for method in methods)
    ):
        return
    wanted = f"an object with {' and '.join(f'{m}()' for m in methods)}"
    raise ValueError(f"{what} must be {'a name or ' if names else ''}{wanted}, got {given!r}")


def check_callable(what: str, given: Any) -> None:
    """Refuse what cannot be called; None stands for nothing.

    Raises:
        ValueError: it cannot be called.
    """
    if given is not None and not callable(given):
        raise ValueError(f"{what} must be a function, got {given!r}")


def check_keywords(given: Any) -> None:
    """Refuse keyword inputs that are no mapping of names.

    Raises:
        ValueError: they are none.
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise ValueError(f"kwargs must be a dict of keyword inputs by name, got {type(given).__name__}")


def names_of(what: str, given: str | Sequence[str]) -> tuple[str, ...]:
    """Several names, of which one may be given alone.

    >>> names_of("compile_modes", "default"), names_of("compile_modes", ["default", "max-autotune"])
    (('default',), ('default', 'max-autotune'))

    Raises:
        ValueError: it is no name and no sequence of names.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Sequence) and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise ValueError(f"{what} must be names, such as ('default',), got {given!r}")


__all__ = ["check_budget", "check_callable", "check_keywords", "check_object", "names_of"]
