"""What is assumed of the masks by which code selects rows, while a module is exported.

``if mask.any():``, ``rows = torch.where(mask)`` and ``len(rows)`` depend on values, which no graph can hold. Here such
code is told that the mask selects rows, or that it selects none. Deals in calls of PyTorch's functions. Knows nothing
about experts, nor whether what is assumed holds (`qimeng.graph.experts.skipped`).
"""

from __future__ import annotations

from typing import Any

import torch

ANYS = (torch.Tensor.any, torch.any)
"""Functions that ask whether a mask selects any rows."""

FINDS = (torch.Tensor.nonzero, torch.nonzero)

SELECTS = (*FINDS, torch.where)
"""Functions that give the rows which a mask selects."""


class Assumed:
    """Every mask selects rows, or some select none.

    Args:
        empty: every other mask, from the first (0) or the second (1) on, selects none; None for no such mask.

    The others select one row for ``len(rows)``, or all that they could where `empty` is given. What depends on how many
    rows there are, and not on whether there are any, then differs from one to the other.
    """

    def __init__(self, empty: int | None = None) -> None:
        self._empty = empty
        self._asked: dict[int, tuple[int, Any]] = {}
        self._anys: dict[int, tuple[Any, Any]] = {}
        self._most = 1

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives for a mask of which something is assumed; None where it asks for nothing of one."""
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor):
            return None
        if func is torch.Tensor.__len__ and source.dim() and isinstance(source.shape[0], torch.SymInt):
            return 1 if self._empty is None else self._most
        if func in (torch.Tensor.__bool__, torch.Tensor.item) and id(source) in self._anys:
            return self._has_rows(self._anys[id(source)][0])
        if source.dtype != torch.bool or len(args) != 1:
            return None
        if func in ANYS and not kwargs:
            found = func(source)
            self._anys[id(found)] = (source, found)
            return found
        if func not in SELECTS:
            return None
        if self._has_rows(source):
            self._most = max(self._most, source.numel())
            result = func(source, **kwargs)
            torch._check((result if isinstance(result, torch.Tensor) else result[0]).shape[0] >= 1)
            return result
        nothing = source.new_empty((0, source.dim()), dtype=torch.int64)
        return nothing if func in FINDS and not kwargs.get("as_tuple") else nothing.unbind(1)

    def _has_rows(self, mask: Any) -> bool:
        number, _ = self._asked.setdefault(id(mask), (len(self._asked), mask))
        return self._empty is None or number % 2 != self._empty


__all__ = ["ANYS", "FINDS", "SELECTS", "Assumed"]
