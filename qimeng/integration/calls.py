"""Calls: what tells one kind from another, and the tensors in them.

Deals in the arguments of one call. Needs PyTorch only: exported packages hold a copy of this file. Knows nothing about
programs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PLAIN = {
    bool: "bool",
    int: "int",
    str: "str",
    bytes: "bytes",
    type(None): "NoneType",
    torch.dtype: "dtype",
    torch.device: "device",
}
"""Types of arguments, besides numbers with a fraction, whose values are part of a call's key, and their names there.

The names stand here since Dynamo of torch 2.11 cannot use the ``__name__`` of a type in the key of a dict.
"""

Key = tuple[Any, ...]
"""Plain tuples; see `key_of`."""


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """What tells one kind of call from another: the layout of tensors, the values of everything else.

    None where an argument is neither a tensor of PyTorch's own class nor plain data.

    >>> key_of((torch.zeros(2, 3), None), {"scale": 2})
    (('tuple', (('tensor', (2, 3), (3, 1), torch.float32), ('NoneType', None))), ('scale', ('int', 2)))
    """
    try:
        return (_key(args), *[(name, _key(kwargs[name])) for name in sorted(kwargs)])
    except TypeError:
        return None


def shapes_of(key: Key) -> str:
    """Shapes of the tensors in a kind of call, for people.

    >>> shapes_of(key_of((torch.zeros(2, 3), 1.0), {"mask": torch.zeros(3)}))
    '2x3, 3'
    """
    if len(key) == 4 and key[0] == "tensor":
        return "x".join(map(str, key[1])) or "scalar"
    return ", ".join(filter(None, [shapes_of(part) for part in key if isinstance(part, tuple)]))


def _key(x: Any) -> Key:
    kind = type(x)
    if kind is torch.Tensor or kind is nn.Parameter:
        return "tensor", tuple(x.shape), x.stride() if x.layout is torch.strided else None, x.dtype
    if kind in PLAIN:
        return PLAIN[kind], x
    if kind is float:
        return "float", "nan" if math.isnan(x) else x, math.copysign(1.0, x)
    if kind is tuple or kind is list:
        return "tuple" if kind is tuple else "list", tuple([_key(i) for i in x])
    if kind is dict:
        return "dict", tuple([(_key(k), _key(v)) for k, v in x.items()])
    raise TypeError(f"{kind.__name__} tells no calls apart")


def tensors_of(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists and dicts, in their order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for i in x:
            yield from tensors_of(i)
    elif isinstance(x, dict):
        for i in x.values():
            yield from tensors_of(i)


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of the same shape, strides, dtype and device; usable inside and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def copied_into(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target` with the values of `source`; what an expanded dimension repeats is copied once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in source.stride())
    target[once].copy_(source.detach()[once])
    return target


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor, by its number."""

    number: int


def hollow(x: Any) -> Any:
    """The same with a `Slot` in place of each tensor, numbered in the order of `tensors_of`."""
    count = itertools.count()

    def emptied(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Slot(next(count))
        if isinstance(x, (tuple, list)):
            return type(x)([emptied(i) for i in x])
        return {k: emptied(v) for k, v in x.items()} if isinstance(x, dict) else x

    return emptied(x)


def filled(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What `hollow` emptied, with these tensors."""
    if isinstance(form, Slot):
        return tensors[form.number]
    if isinstance(form, (tuple, list)):
        return type(form)([filled(i, tensors) for i in form])
    return {k: filled(v, tensors) for k, v in form.items()} if isinstance(form, dict) else form


__all__ = ["Key", "Slot", "copied_into", "filled", "hollow", "key_of", "memory_like", "shapes_of", "tensors_of"]
