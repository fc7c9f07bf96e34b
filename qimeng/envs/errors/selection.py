"""Outputs that select (argmax, top-k, sort): the values that their indices select.

Deals in a module's run, watched for the operator that yields one of its integer outputs. Knows nothing about budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.spec.dispatch import DispatchMode

_SELECTING = ("argmax", "argmin", "max", "min", "topk", "sort", "kthvalue", "median", "mode", "argsort")


@dataclass(frozen=True)
class Selected:
    """Values that indices select: those of the run watched, and those of the candidate."""

    best: torch.Tensor
    chosen: torch.Tensor


class _Watch(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[torch.Tensor, int | None, torch.Tensor]] = {}

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _SELECTING and isinstance(args[0], torch.Tensor):
            integers = [
                x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.dtype == torch.int64
            ]
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            defaults = {"topk": -1, "sort": -1, "argsort": -1, "kthvalue": -1, "mode": -1}
            for x in integers:
                self.found[x.untyped_storage().data_ptr()] = (args[0], given.get("dim", defaults.get(name)), x)
        return result


def selected_values(
    module: torch.nn.Module, inputs: Sequence[Any], number: int, indices: torch.Tensor
) -> Selected | None:
    """What output `number` of the module selects and what `indices` would; None where it is no selection.

    Args:
        module: the module.
        inputs: its inputs.
        number: position among the tensors that it returns.
        indices: of the same shape as that output.
    """
    with _Watch() as watch:
        tensors = [x for x in _pytree.tree_leaves(module(*inputs)) if isinstance(x, torch.Tensor)]
    found = watch.found.get(tensors[number].untyped_storage().data_ptr())
    if found is None or found[2].shape != tensors[number].shape:
        return None
    values, dim, best = found
    if dim is None:
        values, dim = values.reshape(-1), 0
        best, indices = best.reshape(-1), indices.reshape(-1)
    size = values.shape[dim]
    if bool(((indices < 0) | (indices >= size)).any()):
        return None
    if best.dim() < values.dim():
        best, indices = best.unsqueeze(dim), indices.unsqueeze(dim)
    return Selected(values.gather(dim, best), values.gather(dim, indices))


__all__ = ["Selected", "selected_values"]
