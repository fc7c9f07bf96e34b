"""What is assumed of the masks by which code selects rows, while a module is exported.

``if mask.any():``, ``if mask.sum() == 0:``, ``rows = torch.where(mask)`` and ``len(rows)`` depend on values, which no
graph can hold. Here such code is told that the mask selects rows, or that it selects none; ``x[mask]`` becomes
``x[torch.where(mask)]``. Deals in calls of PyTorch's functions. Knows nothing about experts, nor whether what is
assumed holds (`qimeng.graph.experts.skipped`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

ANYS = (torch.Tensor.any, torch.any)
"""Functions that ask whether a mask selects any rows."""

COUNTS = (torch.Tensor.sum, torch.sum, torch.Tensor.count_nonzero, torch.count_nonzero)
"""Functions that ask how many places a mask of zeros and ones selects."""

FINDS = (torch.Tensor.nonzero, torch.nonzero)

SELECTS = (*FINDS, torch.where)
"""Functions that give the rows which a mask selects."""

INDEXES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

_COMPARES = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")},
    **{"greater": operator.gt, "greater_equal": operator.ge, "less": operator.lt, "less_equal": operator.le},
}
_VALUES: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.item: lambda value: value,
}
_ALIKE = ("eq", "getitem", "select")
"""Names of functions of a tensor and numbers that code may call twice to make one mask."""

_KEEPS = ("bool", "float", "int", "long", "permute", "reshape", "squeeze", "t", "to", "transpose", "unsqueeze", "view")
"""Names of functions of a mask whose result selects rows where the mask does."""


class Assumed:
    """Every mask selects rows, or some select none.

    Args:
        empty: every other mask, from the first (0) or the second (1) on, selects none; None for no such mask.

    The others select one row where code counts them, or all that they could where `empty` is given. What depends on how
    many rows there are, and not on whether there are any, then differs from one to the other.
    """

    def __init__(self, empty: int | None = None) -> None:
        self._empty = empty
        self._asked: dict[int, tuple[int, Any]] = {}
        self._answers: dict[int, tuple[Any, Callable[[int], Any], Any]] = {}
        self._first: dict[Any, Any] = {}
        self._roots: dict[int, tuple[Any, Any]] = {}
        self._units: dict[int, Any] = {}
        self._places: dict[tuple[int, int], Any] = {}
        self._most = 1

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives for a mask of which something is assumed; None where it asks for nothing of one."""
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor):
            return None
        if func is torch.Tensor.__len__ and source.dim() and isinstance(source.shape[0], torch.SymInt):
            return self._some()
        if id(source) in self._answers:
            return self._answer(func, args)
        if len(args) > 1 or func not in (*ANYS, *COUNTS, *SELECTS):
            return self._derived(func, args, kwargs)
        if func in SELECTS:
            return self._selected(func, source, kwargs)
        if kwargs or not self._is_mask(source):
            return self._derived(func, args, kwargs)
        found = func(source)
        self._answers[id(found)] = source, bool if func in ANYS else int, found
        return found

    def places(self, index: Any) -> Any:
        """What indexes a tensor as `index` does, with ``torch.where(mask)`` for each mask in it."""
        given = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.dim() for x in given):
            return index
        made: list[Any] = []
        for item in given:
            is_mask = isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.dim()
            made += self._places_of(item) if is_mask else [item]
        return tuple(made)

    def _places_of(self, mask: Any) -> Any:
        key = id(mask), mask._version
        if key not in self._places:
            self._places[key] = self._selected(torch.where, mask, {})
        return self._places[key]

    def _selected(self, func: Any, mask: Any, kwargs: Any) -> Any:
        if self._has_rows(mask):
            self._most = max(self._most, mask.numel())
            result = func(mask, **kwargs)
            torch._check((result if isinstance(result, torch.Tensor) else result[0]).shape[0] >= 1)
            return result
        nothing = mask.new_empty((0, mask.dim()), dtype=torch.int64)
        return nothing if func in FINDS and not kwargs.get("as_tuple") else nothing.unbind(1)

    def _answer(self, func: Any, args: Any) -> Any:
        """What code learns from an answer: its value, or how a number of rows compares with 0 or 1."""
        source, *others = args
        mask, value, _ = self._answers[id(source)]
        if func in _VALUES and not others:
            self._most = max(self._most, mask.numel())
            return _VALUES[func](value(self._some() if self._has_rows(mask) else 0))
        compare = _COMPARES.get(_name(func))
        if compare is None or len(others) != 1 or type(number := others[0]) is not int or number > 1:
            return None
        if compare(value(1), number) != compare(value(2), number):
            return None  # it asks for one row
        found = func(*args)
        self._answers[id(found)] = mask, lambda rows: compare(value(rows), number), found
        return found

    def _derived(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives where that is a mask that selects rows as another one does; None where it is not."""
        name, (source, *others) = _name(func), args
        is_mask = self._is_mask(source)
        if name in _ALIKE and not kwargs and all(type(x) is int for x in others):
            found = func(*args)
            first, _ = self._first.setdefault((name, id(source), *others), (found, source))
        elif is_mask and (name in _KEEPS or func in ANYS) or name == "one_hot":
            found = func(*args, **kwargs)
            first = source if is_mask else found
        else:
            return None
        self._roots[id(found)] = self._root(first), found
        if is_mask or name in ("eq", "one_hot"):
            self._units[id(found)] = found
        return found

    def _is_mask(self, tensor: Any) -> bool:
        """Whether it is known to hold zeros and ones alone."""
        return tensor.dtype == torch.bool or id(tensor) in self._units

    def _root(self, mask: Any) -> Any:
        return self._roots.get(id(mask), (mask, mask))[0]

    def _some(self) -> int:
        """How many rows code counts where there are any."""
        return 1 if self._empty is None else self._most

    def _has_rows(self, mask: Any) -> bool:
        mask = self._root(mask)
        number, _ = self._asked.setdefault(id(mask), (len(self._asked), mask))
        return self._empty is None or number % 2 != self._empty


def _name(func: Any) -> str:
    """A function's name, such as ``"eq"`` for ``==``."""
    return getattr(func, "__name__", "").strip("_")


__all__ = ["ANYS", "COUNTS", "FINDS", "INDEXES", "SELECTS", "Assumed"]
