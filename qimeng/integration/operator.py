"""An optimized module as one custom operator, which torch.compile and torch.export take without looking inside.

Deals in handing calls to an operator and back. Needs PyTorch only: exported packages hold a copy of this file. What
answers a call is decided when the operator runs. Source: https://docs.pytorch.org/docs/stable/library.html.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qimeng.integration.calls import filled, hollow, key_of, tensors_of

NAMESPACE = __name__.partition(".")[0]
"""Of the operator: that of the package which holds this file."""


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of an output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Outputs:
    """What a kind of call returns.

    Attributes:
        layouts: of its tensors.
        form: what is returned, tensors left out (`hollow`).
    """

    layouts: tuple[Layout, ...]
    form: Any

    @classmethod
    def of(cls, returned: Any, others: Sequence[torch.Tensor]) -> Outputs | None:
        """What a call returned; None where no operator can: other classes, or memory of `others` or of each other."""
        tensors = list(tensors_of(returned))
        mine = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
        shared = {t.untyped_storage().data_ptr() for t in others} & set(mine)
        if not tensors or shared or len(set(mine)) < len(mine) or key_of((returned,), {}) is None:
            return None
        return cls(tuple(Layout(tuple(t.shape), t.stride(), t.dtype) for t in tensors), hollow(returned))


@dataclass(frozen=True, eq=False)
class _Entry:
    """A kind of call of one module.

    Attributes:
        run: takes the arguments and returns what the module does; its owner holds it.
        form: the arguments, tensors left out (`hollow`).
        outputs: what it returns.
    """

    run: weakref.ref[Callable[..., Any]]
    form: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: Outputs


_ENTRIES: dict[int, _Entry] = {}
_NUMBERS = itertools.count()


def register(run: Callable[..., Any], form: tuple[tuple[Any, ...], dict[str, Any]], outputs: Outputs) -> int:
    """The number by which the operator finds a kind of call, as long as `run` lives."""
    number = next(_NUMBERS)
    _ENTRIES[number] = _Entry(weakref.ref(run, lambda _: _ENTRIES.pop(number, None)), form, outputs)
    return number


def through(number: int, outputs: Outputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a registered call returns, by way of the operator."""
    return filled(outputs.form, call(list(tensors_of((args, kwargs))), number))


@torch.library.custom_op(f"{NAMESPACE}::call", mutates_args=())
def call(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The tensors that a registered call returns."""
    entry = _ENTRIES[number]
    run = entry.run()
    assert run is not None
    args, kwargs = filled(entry.form, tensors)
    return list(tensors_of(run(*args, **kwargs)))


@call.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    device = tensors[0].device
    layouts = _ENTRIES[number].outputs.layouts
    return [torch.empty_strided(o.shape, o.stride, dtype=o.dtype, device=device) for o in layouts]


__all__ = ["Layout", "Outputs", "call", "register", "through"]
