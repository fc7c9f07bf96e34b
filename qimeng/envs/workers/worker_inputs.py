"""Inputs of a program in other forms: those that it was not made for, and new ones in the memory of old ones.

Deals in trees of tensors. Knows nothing about programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.workers.poison import fenced


def foreign_inputs(leaves: Sequence[Any], placed: bool) -> Iterator[tuple[str, list[Any]]]:
    """In words, and as leaves: inputs whose first tensor has another shape, stride, dtype or device.

    Args:
        leaves: the inputs that the program was made for.
        placed: whether parameters or buffers say which device it is on; without them, any device is right.
    """
    number = next((i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.numel() > 1), None)
    if number is None:
        return
    x = leaves[number]
    dim = next(d for d, size in enumerate(x.shape) if size > 1)
    spread = [2 * max(s, 1) for s in x.stride()]
    other = torch.float64 if x.dtype is not torch.float64 else torch.float32
    for what, y in (
        ("a shorter tensor", x.narrow(dim, 0, x.shape[dim] - 1)),
        ("one dimension more", x.unsqueeze(0)),
        ("other strides", torch.empty_strided(x.shape, spread, dtype=x.dtype, device="meta")),
        ("another dtype", torch.empty_strided(x.shape, x.stride(), dtype=other, device="meta")),
        ("another device", torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if placed else None),
    ):
        if y is None:
            continue
        yield what, [*leaves[:number], y, *leaves[number + 1 :]]


def put_into(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    """`new` with the content of its tensors in those of `old`, as far as they can hold it."""
    before, (leaves, tree) = _pytree.tree_leaves(list(old)), _pytree.tree_flatten(new)
    for i, (x, y) in enumerate(zip(before, leaves, strict=True)):
        fits = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype is y.dtype
        if fits and x.stride() == y.stride() and x.is_contiguous():
            leaves[i] = x.copy_(y)
    return tuple(_pytree.tree_unflatten(leaves, tree))


def with_fences(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of `inputs` with a fence around each tensor."""
    leaves, tree = _pytree.tree_flatten(inputs)
    return tuple(_pytree.tree_unflatten([fenced(x) if isinstance(x, torch.Tensor) else x for x in leaves], tree))


def apart(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether no tensor is in both."""
    return not {id(x) for x in tensors_of(some)} & {id(x) for x in tensors_of(others)}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    return [x for x in _pytree.tree_leaves(list(tree)) if isinstance(x, torch.Tensor)]


__all__ = ["apart", "foreign_inputs", "put_into", "tensors_of", "with_fences"]
