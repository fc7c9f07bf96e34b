"""Output classes: what a module may return besides tensors in tuples, lists and dicts.

Deals in dataclasses and plain objects that PyTorch does not see into until they are registered. Knows nothing about
graphs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree

HOLDERS: set[type] = set()
"""Classes of plain objects that were registered, such as the caches of keys and values of transformers."""

_PLAIN = (
    *(str, bytes, bool, int, float, complex, type(None), type, torch.nn.Module, torch.dtype, torch.device),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


def opened(output: Any) -> Any:
    """`output` itself, after every class in it is one that `torch.utils._pytree` sees into.

    PyTorch takes an instance of an unknown class as one leaf. A user of torch.export would register it by hand. It
    lasts as long as the process and changes nothing else. An output that holds itself is left as it is.
    """
    if _is_tree(output, ()):
        _open(output)
    return output


def has_tensors(output: Any) -> bool:
    """Whether there is a tensor in `output`, also in classes that PyTorch does not see into."""
    return _is_tree(output, ()) and _any_tensor(output)


def _any_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor) or any(map(_any_tensor, _parts(item)))


def _is_tree(item: Any, inside: tuple[int, ...]) -> bool:
    """Whether no object is found in itself again."""
    return id(item) not in inside and all(_is_tree(part, (*inside, id(item))) for part in _parts(item))


def _open(output: Any) -> None:
    kind = type(output)
    for part in _parts(output):
        _open(part)
    if kind not in _pytree.SUPPORTED_NODES:
        if _is_record(kind):
            _pytree.register_dataclass(kind)
        elif _is_holder(output):
            _pytree.register_pytree_node(kind, _taken_apart, partial(_put_together, kind))
            HOLDERS.add(kind)


_PARTS = "_qimeng_parts"
"""Attribute of an object that was put together of other things than tensors: names of the attributes they are in."""


def state_of(item: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of a plain object: those in which there are tensors, or what stands for them, and the others."""
    state = dict(vars(item))
    known = state.pop(_PARTS, None)
    if known is None:
        known = [k for k, v in state.items() if any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(v))]
    return {k: state[k] for k in known}, {k: v for k, v in state.items() if k not in known}


def _taken_apart(item: Any) -> tuple[list[Any], Any]:
    parts, rest = state_of(item)
    return list(parts.values()), (tuple(parts), rest)


def _put_together(kind: Any, values: Any, context: Any) -> Any:
    names, rest = context
    made: Any = kind.__new__(kind)
    values = list(values)
    made.__dict__.update({**rest, **dict(zip(names, values, strict=True))})
    if not all(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(values)):
        made.__dict__[_PARTS] = names
    return made


def _is_record(kind: type) -> bool:
    """A dataclass that can be made again from its fields."""
    return dataclasses.is_dataclass(kind) and all(f.init for f in dataclasses.fields(kind))


def _is_holder(item: Any) -> bool:
    """An object whose attributes hold tensors, and which is nothing but its attributes."""
    if isinstance(item, (torch.Tensor, *_PLAIN)) or callable(item) or not hasattr(item, "__dict__"):
        return False
    made_plainly = type(item) is SimpleNamespace or getattr(type(item), "__new__", None) is object.__new__
    return made_plainly and bool(state_of(item)[0])


def _parts(output: Any) -> list[Any]:
    if isinstance(output, (torch.Tensor, *_PLAIN)):
        return []
    if isinstance(output, dict):
        return list(output.values())
    if isinstance(output, (tuple, list)):
        return list(output)
    if dataclasses.is_dataclass(output):
        return [getattr(output, f.name, None) for f in dataclasses.fields(output)]
    return list(vars(output).values()) if hasattr(output, "__dict__") and not callable(output) else []


__all__ = ["HOLDERS", "has_tensors", "opened", "state_of"]
