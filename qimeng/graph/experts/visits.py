"""Iteration over the experts that some row chose, as iteration over all of them, while a module is exported.

``for e in (mask.sum((-1, -2)) > 0).nonzero()`` runs as often as the values say, which no graph can hold. Where each
turn only reads its own rows ``torch.where(mask[e])`` and adds to them, a turn without rows adds nothing, so that all
turns may run. Here they do, and it is noted where that does not follow from what was called. Deals in calls of
PyTorch's functions. Knows nothing about graphs, nor what a turn computes (`qimeng.graph.experts.selected`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from qimeng.graph.experts.assumed import ANYS, COUNTS, FINDS, INDEXES, SELECTS, Assumed

MOST = 1024
"""Experts of a layer at most: each makes operators of its own."""

_SUMS = (torch.Tensor.sum, torch.sum)
_ABOVE = (torch.greater, torch.gt, torch.Tensor.greater, torch.Tensor.gt, torch.Tensor.__gt__)
_ITEM = torch.Tensor.__getitem__
_PICKS = (_ITEM, torch.select, torch.Tensor.select)
_SAME = (torch.Tensor.squeeze, torch.squeeze)


class Visits(TorchFunctionMode):
    """In the block, iteration over chosen experts visits all.

    Args:
        assumed: what code is told that asks for the rows of a mask; nothing by default.
        kept: whether the loop is to stay one, with all turns.

    Attributes:
        assumed: that.
        kept: that.
        used: whether one did so.
        unsure: whether rows were selected otherwise than by the mask of the iteration.
        selects: whether code selected rows by a mask, or asked whether a mask selects any.
    """

    def __init__(self, assumed: Assumed | None = None, kept: bool = False) -> None:
        super().__init__()
        self.assumed, self.kept = assumed, kept
        self.used = self.unsure = self.selects = False
        self._made: dict[int, tuple[str, Any, Any]] = {}
        self._numbers: dict[int, torch.Tensor] = {}
        self._masks: dict[int, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of `func`."""
        kwargs = kwargs or {}
        if func is torch.Tensor.unbind and (mask := self._mask_of_all(args[0])) is not None:
            self.used = True
            self._masks[id(mask)] = mask
            with _disable_current_modes():
                return tuple(self._number(torch.tensor([e])) for e in range(mask.shape[0]))
        if self._numbers:
            tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if any(id(x) in self._numbers for x in tensors):
                return self._with_number(func, args, kwargs, tensors)
        if func in (*SELECTS, *ANYS, *COUNTS) and len(args) == 1:
            self.selects = True
        if self.assumed is not None and func in INDEXES:
            args = (args[0], self.assumed.places(args[1]), *args[2:])
        if self.assumed is None or (result := self.assumed.result(func, args, kwargs)) is None:
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _with_number(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """A call with the number of an expert, whose value is known; another tensor is indexed by it."""
        if all(id(x) in self._numbers for x in tensors):
            with _disable_current_modes():
                result = func(*args, **kwargs)
                return self._number(result) if isinstance(result, torch.Tensor) else result
        if func is _ITEM and id(args[1]) in self._numbers and args[1].numel() == 1:
            with _disable_current_modes():
                at, keeps = int(args[1]), args[1].dim() == 1
            result = func(args[0], slice(at, at + 1) if keeps else at)
            self._note(func, args, kwargs, result)
            return result
        return func(*args, **kwargs)

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        self._numbers[id(tensor)] = tensor
        return tensor

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember what a mask may come from, and its rows."""
        source = args[0] if args else None
        if func in _SUMS and _all_but_first(source, args[1:], kwargs):
            self._keep("sum", source, result)
        elif func in ANYS and _all_but_first(source, args[1:], kwargs):
            self._keep("any", source, result)
        elif func in _ABOVE and len(args) == 2 and isinstance(args[1], int) and args[1] == 0:
            self._keep("above", source, result)
        elif func in _PICKS and id(source) in self._masks or func in _SAME and self._kind(source) == "row":
            self._keep("row", source, result)
        elif func in SELECTS and len(args) == 1:
            known = self._kind(source)
            if func in FINDS:
                self._keep("found", source, result)
            if self.used and known not in ("row", "above", "any"):
                self.unsure = True

    def _keep(self, kind: str, source: Any, result: Any) -> None:
        self._made[id(result)] = (kind, source, result)

    def _kind(self, tensor: Any) -> str:
        return self._made.get(id(tensor), ("", None, None))[0]

    def _mask_of_all(self, found: Any) -> torch.Tensor | None:
        """The mask [experts, …] of which `found` are the places with any row; None where it is something else."""
        wanted, value = ["found"], found
        while self._kind(value) in wanted:
            kind, value, _ = self._made[id(value)]
            wanted = {"found": ["above", "any"], "above": ["sum"]}.get(kind, [])
            if kind in ("sum", "any"):
                return value if 1 < value.shape[0] <= MOST else None
        return None


def _all_but_first(tensor: Any, args: Any, kwargs: Any) -> bool:
    """Whether a reduction is along all dimensions of `tensor` but the first."""
    dims = args[0] if args else kwargs.get("dim")
    if not isinstance(tensor, torch.Tensor) or len(args) > 1 or set(kwargs) - {"dim"} or tensor.dim() < 2:
        return False
    given = (dims,) if isinstance(dims, int) else dims
    return isinstance(given, (tuple, list)) and {d % tensor.dim() for d in given} == set(range(1, tensor.dim()))


__all__ = ["Visits"]
