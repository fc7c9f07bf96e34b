"""The same computation on smaller inputs.

Deals in finding sizes that the computation still accepts. Knows nothing about capture: `qimeng.graph.verify` makes
sure that the smaller one does the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qimeng.spec.leaf import Leaf
from qimeng.spec.origin import ExampleOrigin, Origin, SourceOrigin

ENOUGH = 1 << 16
"""No tensor of a reduced computation should have more elements than this (the Triton interpreter is slow)."""
MOST = 1 << 22
"""Where nothing that small runs, the smallest that does is taken, up to this many elements a tensor."""
LIMITS = (256, 128, 64, 32, 16, 8)
"""Largest sizes tried, one after the other."""
SMALL = 64
"""Sizes up to this stay as they are, where that is small enough."""


def shrink(sizes: Iterable[int], limit: int) -> dict[int, int]:
    """Each size above `limit` to a smaller one: halved while even; odd ones to a small odd number.

    Different sizes stay different where they can, so that a mixed-up dimension shows.

    >>> shrink([4096, 1024, 4095, 48], 64)
    {4096: 64, 4095: 63, 1024: 32, 48: 48}
    """
    table: dict[int, int] = {}
    used: set[int] = set()
    for size in sorted(set(sizes), reverse=True):
        small = size
        while small > limit and small % 2 == 0:
            small //= 2
        if small > limit:
            small = limit // 2 + (size % (limit // 2) | 1)
        if size > limit:
            while small in used and small % 2 == 0 and small > 8:
                small //= 2
        used.add(small)
        table[size] = small
    return table

MOST = 1 << 21
"""Largest tensor, in elements, of a reduced computation; a larger one is not worth running on a CPU."""


def reduce_origin(origin: Origin, training: bool) -> Origin:
    """`origin` at a smaller size; itself where it is small already or no smaller size runs.

    Sizes are tried under fake tensors, the largest first; what is small enough is then run for real.
    """
    whole = _largest(origin, training, fake=True)
    if whole is not None and whole <= ENOUGH:
        return origin
    smaller: list[tuple[int, Origin]] = []
    for candidate in _candidates(origin):
        size = _largest(candidate, training, fake=True)
        if size is None or (whole is not None and size >= whole):
            continue
        if size <= ENOUGH and _largest(candidate, training, fake=False) is not None:
            return candidate
        smaller.append((size, candidate))
    for size, candidate in sorted(smaller, key=lambda pair: pair[0]):
        if size <= MOST and _largest(candidate, training, fake=False) is not None:
            return candidate
    return origin


def _candidates(origin: Origin) -> Iterator[Origin]:
    if isinstance(origin, SourceOrigin):
        yield from _smaller_sources(origin)
    elif isinstance(origin, ExampleOrigin):
        yield from _smaller_examples(origin)


# ---- files: rewrite the sizes at the top of the file


@dataclass(frozen=True)
class _Constant:
    """A module-level assignment of an int or of several: its place in the file and its values."""

    place: int
    values: tuple[int, ...]
    many: str  # "", "(" or "["


def _smaller_sources(origin: SourceOrigin) -> Iterator[SourceOrigin]:
    tree = ast.parse(origin.text)
    constants = list(_constants(tree, origin))
    if not constants:
        return
    everything = [v for c in constants for v in c.values]
    for limit in LIMITS:
        table = shrink([v for v in everything if v > min(limit, SMALL)], limit)
        yield replace(origin, text=_rewrite(tree, constants, table))
    for skipped in sorted(constants, key=lambda c: max(c.values)):
        for limit in LIMITS[2:]:
            rest = [c for c in constants if c is not skipped]
            table = shrink([v for c in rest for v in c.values if v > limit], limit)
            yield replace(origin, text=_rewrite(tree, rest, table))


def _constants(tree: ast.Module, origin: SourceOrigin) -> Iterator[_Constant]:
    """Assignments whose right side names nothing: sizes derived from others follow by themselves."""
    for place, node in enumerate(tree.body):
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            continue
        if any(isinstance(n, (ast.Name, ast.Call, ast.Attribute)) for n in ast.walk(node.value)):
            continue
        value = getattr(origin.namespace, node.targets[0].id)
        if type(value) is int and value > LIMITS[-1]:
            yield _Constant(place, (value,), "")
        elif type(value) in (tuple, list) and value and all(type(v) is int for v in value):
            yield _Constant(place, tuple(value), "(" if type(value) is tuple else "[")


def _rewrite(tree: ast.Module, constants: Iterable[_Constant], table: dict[int, int]) -> str:
    new = ast.parse(ast.unparse(tree))
    for c in constants:
        values = [table.get(v, v) for v in c.values]
        node = new.body[c.place]
        assert isinstance(node, ast.Assign)
        text = {"": repr(values[0]), "(": repr(tuple(values)), "[": repr(values)}[c.many]
        node.value = ast.parse(text, mode="eval").body
    return ast.unparse(new) + "\n"


# ---- examples: change the inputs' shapes


def _smaller_examples(origin: ExampleOrigin) -> Iterator[ExampleOrigin]:
    tensors = [leaf for leaf in origin.leaves if leaf.dtype is not None and leaf.shape]
    if not tensors:
        return
    if origin.shrinkable:
        sizes = [s for leaf in tensors for s in leaf.shape]
        for limit in LIMITS:
            table = shrink([s for s in sizes if s > min(limit, SMALL)], limit)
            yield replace(origin, leaves=tuple(_resized(leaf, [table.get(s, s) for s in leaf.shape], table) for leaf in origin.leaves))
    batch = tensors[0].shape[0]
    for size in (64, 16, 8, 2):
        if size < batch:
            leaves = [
                _resized(leaf, [size, *leaf.shape[1:]], {}) if leaf.dtype is not None and leaf.shape[:1] == (batch,) else leaf
                for leaf in origin.leaves
            ]
            yield replace(origin, leaves=tuple(leaves))


def _resized(leaf: Leaf, shape: list[int], table: dict[int, int]) -> Leaf:
    if leaf.dtype is None:
        return leaf
    new = leaf.with_shape(tuple(shape))
    if leaf.domain == "index" and table:
        new = replace(new, high=max(leaf.low, min(leaf.high, min(table.values()) - 1)))
    return new


# ---- does it run, and how large is it


class _Watch(TorchDispatchMode):
    """Remembers the largest tensor that any operator yields."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in _pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


def _largest(origin: Origin, training: bool, fake: bool) -> int | None:
    """Elements of the largest tensor of a run, inputs and parameters included; None where it does not run."""
    import contextlib

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    try:
        with mode, torch.no_grad():
            module = origin.module(0, "cpu").train(training)
            inputs = origin.inputs(0, "cpu")
            held = [*module.parameters(), *module.buffers(), *_pytree.tree_leaves(inputs)]
            with _Watch() as watch:
                module(*inputs)
        return max([watch.largest, *(t.numel() for t in held if isinstance(t, torch.Tensor))])
    except Exception:  # a size that the user's code refuses, in whatever way, is no candidate
        return None
