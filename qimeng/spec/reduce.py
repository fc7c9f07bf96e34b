"""The same computation on smaller inputs.

Deals in finding sizes that the computation still accepts. Knows nothing about capture: `qimeng.graph.verify` makes
sure that the smaller one does the same.
"""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qimeng.spec.fake import fake_tensors
from qimeng.spec.leaf import Leaf
from qimeng.spec.origin import ExampleOrigin, Origin, SourceOrigin, in_mode

ENOUGH = 1 << 16
"""No tensor of a reduced computation should have more elements than this (the Triton interpreter is slow)."""
MOST = 1 << 21
"""Where nothing that small runs, the smallest that does is taken, with up to this many elements in a tensor that is
no parameter; a larger one is not worth running on a CPU."""
RUNNABLE = 1 << 27
"""Elements of all tensors together up to which a run on the CPU takes seconds at most."""
LIMITS = (256, 128, 64, 32, 16, 8)
"""Largest sizes tried, one after the other."""
SMALL = 64
"""Sizes up to this stay as they are, where that is small enough."""

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What fake tensors raise where they, and not the computation, are at their end."""


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


def reduce_origin(origin: Origin, training: bool) -> Origin:
    """`origin` at a smaller size; itself where it is small already or no smaller size runs.

    Sizes are tried under fake tensors, the largest first; what is small enough is then run for real.
    """
    whole = _size(origin, training, fake=True)
    if whole is not None and whole.largest <= ENOUGH:
        return origin
    smaller: list[tuple[int, Origin]] = []
    for candidate in _candidates(origin):
        size = _size(candidate, training, fake=True)
        if size is None or (whole is not None and size.total >= whole.total):
            continue
        if size.largest <= ENOUGH and _size(candidate, training, fake=False) is not None:
            return candidate
        if size.moving <= MOST and size.total <= RUNNABLE:
            smaller.append((size.total, candidate))
    for _, candidate in sorted(smaller, key=lambda pair: pair[0]):
        if _size(candidate, training, fake=False) is not None:
            return candidate
    return origin


def _candidates(origin: Origin) -> Iterator[Origin]:
    if isinstance(origin, SourceOrigin):
        yield from _smaller_sources(origin)
    elif isinstance(origin, ExampleOrigin):
        yield from _smaller_examples(origin)


# ---- files: rewrite the sizes outside the module


def _smaller_sources(origin: SourceOrigin) -> Iterator[SourceOrigin]:
    sizes = _rewritten(origin.text, {})[1]
    for limit in LIMITS:
        table = shrink([s for s in sizes if s > min(limit, SMALL)], limit)
        yield replace(origin, text=_rewritten(origin.text, table)[0])
    for factor in (2, 4, 8, 16, 32, 64):
        table = {s: s // factor for s in sizes if s % factor == 0 and s // factor >= LIMITS[-1]}
        yield replace(origin, text=_rewritten(origin.text, table)[0])
    for kept in sorted({s for s in sizes if s > LIMITS[-1]}):
        for limit in LIMITS[2:]:
            table = shrink([s for s in sizes if s > limit and s != kept], limit)
            yield replace(origin, text=_rewritten(origin.text, table)[0])


def _rewritten(text: str, table: dict[int, int]) -> tuple[str, list[int]]:
    """The file with its sizes changed by `table`, and the sizes that stand in it.

    Sizes are integers, or sums and products of integers, in assignments at the top of the file and in the two
    functions that make inputs; what is derived from names follows by itself, and the module is left alone.
    """
    tree, rewrite = ast.parse(text), _Sizes(table)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            node.value = rewrite.visit(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"):
            node.body = [rewrite.visit(statement) for statement in node.body]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", rewrite.seen


class _Sizes(ast.NodeTransformer):
    def __init__(self, table: dict[int, int]):
        self.table, self.seen = table, list[int]()

    def visit(self, node: ast.AST) -> Any:
        value = _integer(node)
        if value is None:
            return self.generic_visit(node)
        self.seen.append(value)
        return ast.Constant(self.table.get(value, value))


def _integer(node: ast.AST) -> int | None:
    """The value of an expression of integers alone."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _integer(node.left), _integer(node.right)
        if left is not None and right is not None and not (isinstance(node.op, ast.FloorDiv) and right == 0):
            return _ARITHMETIC[type(node.op)](left, right)
    return None


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


# ---- examples: change the inputs' shapes


def _smaller_examples(origin: ExampleOrigin) -> Iterator[ExampleOrigin]:
    tensors = [leaf for leaf in origin.leaves if leaf.dtype is not None and leaf.shape]
    if not tensors:
        return
    if origin.shrinkable:
        sizes = [s for leaf in tensors for s in leaf.shape]
        for limit in LIMITS:
            table = shrink([s for s in sizes if s > min(limit, SMALL)], limit)
            yield replace(
                origin,
                leaves=tuple(_resized(leaf, [table.get(s, s) for s in leaf.shape], table) for leaf in origin.leaves),
            )
    batch = tensors[0].shape[0]
    for size in (64, 16, 8, 2):
        if size < batch:
            leaves = [
                _resized(leaf, [size, *leaf.shape[1:]], {})
                if leaf.dtype is not None and leaf.shape[:1] == (batch,)
                else leaf
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


def elements(origin: Origin, training: bool) -> int:
    """Elements of all tensors of a run together, inputs and parameters included; 0 where that cannot be told."""
    size = _size(origin, training, fake=True)
    return size.total if size else 0


# ---- does it run, and how large is it


@dataclass
class _Size:
    """Elements of the tensors of a run: of the largest, of the largest that is no parameter, of all together."""

    largest: int = 0
    moving: int = 0
    total: int = 0

    def add(self, tree: Any, held: bool = False) -> None:
        """Count the tensors of `tree`; `held` where they are parameters or buffers."""
        for t in _pytree.tree_leaves(tree):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
                self.moving = max(self.moving, 0 if held else t.numel())
                self.total += t.numel()


class _Watch(TorchDispatchMode):
    """Counts every tensor that an operator yields."""

    def __init__(self, size: _Size):
        super().__init__()
        self.size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size.add(out)
        return out


def _size(origin: Origin, training: bool, fake: bool) -> _Size | None:
    """How large a run is; None where it does not run."""
    mode: Any = fake_tensors() if fake else contextlib.nullcontext()
    size = _Size()
    try:
        with mode, torch.no_grad():
            module = in_mode(origin.module(0, "cpu"), training)
            inputs = origin.inputs(0, "cpu")
            size.add(inputs)
            size.add([*module.parameters(), *module.buffers()], held=True)
            with _Watch(size):
                module(*inputs)
    except NEEDS_VALUES:
        return size  # as far as it got: whether it runs shows when it runs for real
    except Exception:  # noqa: BLE001  a size that the user's code refuses, in whatever way, is no candidate
        return None
    return size
