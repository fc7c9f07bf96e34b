"""The same computation on smaller inputs.

Deals in finding sizes that the computation still accepts. Knows nothing about capture: `qimeng.program.verify` makes
sure that the smaller one does the same.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree

from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.fake import fake_tensors, made_fake
from qimeng.spec.leaf import Leaf, unexpanded
from qimeng.spec.origin import ExampleOrigin, Origin, SourceOrigin, in_mode
from qimeng.spec.patience import BRIEF_S, TooLong, left_s, patience
from qimeng.spec.sizes import rewritten
from qimeng.spec.structure import STRUCTURED
from qimeng.spec.ties import tied
from qimeng.spec.ways import Drawn, ruled

T = TypeVar("T")

ENOUGH = 1 << 16
"""No tensor of a reduced computation should have more elements than this (the Triton interpreter is slow)."""
MOST = 1 << 21
"""If nothing that small runs, the smallest size that does is used, with up to this many elements in a tensor other than
a parameter. Larger ones are too slow on a CPU."""
RUNNABLE = 1 << 27
"""Elements of all tensors together up to which a run on the CPU takes seconds at most."""
MUCH = 1 << 24
"""Elements of all tensors together that a smaller computation rarely has; so many need not be counted on."""
LONG = 100
"""Operators above which a call is long: it takes seconds to try at every size, and on a GPU no longer at its own."""
SEARCH_S = 4.0
"""Seconds of the processor after which no further size is tried: a run of a network without memory takes one or more.
A busy machine changes no size then."""
SHARE = 0.25
"""Part of the time for a user's code (`qimeng.spec.patience.left_s`) that one run may take; without values, compute."""
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
"""Errors that fake tensors raise because of their own limits, not because of the computation."""


def shrink(sizes: Iterable[int], limit: int) -> dict[int, int]:
    """Each size above `limit` to a smaller one: halved while even; odd ones to a small odd number.

    Different sizes stay different if possible, so that swapped dimensions show.

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


def reduce_origin(origin: Origin, training: bool) -> tuple[Origin, int | None]:
    """`origin` at a smaller size; itself where it is small already or no smaller size runs.

    With it the `elements` of a run at that size, where they are known.

    Sizes are tried under fake tensors, the largest first; what is small enough is then run for real. A run ends as soon
    as it is known to be too large, since a Python loop over steps takes seconds.
    """
    whole = _size(origin, training, fake=True, own=True, enough=lambda s: s.largest > ENOUGH and s.total > MUCH)
    if whole is not None and whole.largest <= ENOUGH:
        return origin, whole.total

    @cache
    def total() -> float:
        size = _size(origin, training, fake=True, own=True)
        return math.inf if size is None else size.total

    def as_large(size: _Size) -> bool:
        return whole is not None and size.total >= whole.total and (not whole.ended or size.total >= total())

    try:
        found, count = _smaller(origin, training, as_large)
    except TooLong:  # it ends at its own size, and perhaps at no other
        found, count = origin, None
    is_known = found is origin and whole is not None and (whole.slow or not whole.ended)
    return found, whole.total if whole is not None and is_known else count


def _smaller(origin: Origin, training: bool, as_large: Callable[[_Size], bool]) -> tuple[Origin, int | None]:
    """`origin` at a size that is not `as_large` as its own; itself where no such size runs."""
    smaller: list[tuple[int, int, Origin]] = []
    larger: list[tuple[int, Origin]] = []
    for number, candidate in enumerate(_in_time(_candidates(origin))):
        size = _size(candidate, training, fake=True, enough=_is_known)
        if size is None or size.moving > MOST or size.total > RUNNABLE:
            continue
        if size.ended:
            larger.append((number, candidate))
        elif as_large(size):
            continue
        elif size.largest <= ENOUGH and _size(candidate, training, fake=False) is not None:
            return candidate, size.total
        else:
            smaller.append((size.total, number, candidate))
    for number, candidate in _in_time(larger):
        size = _size(candidate, training, fake=True, enough=lambda s: s.moving > MOST or s.total > RUNNABLE)
        if size is not None and not size.ended and not as_large(size):
            smaller.append((size.total, number, candidate))
    for count, _, candidate in sorted(smaller, key=lambda found: found[:2]):
        if _size(candidate, training, fake=False) is not None:
            return candidate, count
    return origin, None


def _is_known(size: _Size) -> bool:
    """Whether a run is too large to be tried with values, or not small though it could be: parameters are no larger."""
    return size.moving > MOST or size.total > RUNNABLE or size.held <= ENOUGH < size.largest


def _in_time(items: Iterable[T]) -> Iterator[T]:
    end = time.thread_time() + SEARCH_S
    for item in items:
        if time.thread_time() > end:
            return
        yield item


def _candidates(origin: Origin) -> Iterator[Origin]:
    if isinstance(origin, SourceOrigin):
        yield from _smaller_sources(origin)
    elif isinstance(origin, ExampleOrigin):
        yield from _smaller_examples(origin)


# ---- files: rewrite the sizes outside the module


def _smaller_sources(origin: SourceOrigin) -> Iterator[SourceOrigin]:
    tried = {origin.text, rewritten(origin.text, {})[0]}
    for table in _tables(rewritten(origin.text, {})[1]):
        text = rewritten(origin.text, table)[0]
        if text not in tried:
            tried.add(text)
            yield replace(origin, text=text)


def _tables(sizes: Sequence[int]) -> Iterator[dict[int, int]]:
    """Sizes to smaller ones: all of them by limits, then by factors, then all but one."""
    for limit in LIMITS:
        yield shrink([s for s in sizes if s > min(limit, SMALL)], limit)
    for factor in (2, 4, 8, 16, 32, 64):
        yield {s: s // factor for s in sizes if s % factor == 0 and s // factor >= LIMITS[-1]}
    for kept in sorted({s for s in sizes if s > LIMITS[-1]}):
        for limit in LIMITS[2:]:
            yield shrink([s for s in sizes if s > limit and s != kept], limit)


# ---- examples: change the inputs' shapes


WHOLE = ("offsets", "permutation", "fixed")
"""Domains that a part of an input does not keep, so that such inputs cannot be cut."""


def _smaller_examples(origin: ExampleOrigin) -> Iterator[ExampleOrigin]:
    tensors = [leaf for leaf in origin.leaves if leaf.shape]
    if not tensors or any(leaf.domain in WHOLE for leaf in tensors):
        return
    if origin.shrinkable:
        sizes = [s for leaf in tensors for s in leaf.shape]
        for limit in LIMITS:
            table = shrink([s for s in sizes if s > min(limit, SMALL)], limit)
            yield from _cut(origin, [[table.get(s, s) for s in leaf.shape] for leaf in origin.leaves], table)
    batch = tensors[0].shape[0]
    for size in (64, 16, 8, 2):
        if size < batch:
            shapes = [[size, *x.shape[1:]] if x.shape[:1] == (batch,) else list(x.shape) for x in origin.leaves]
            yield from _cut(origin, shapes, {})


def _cut(origin: ExampleOrigin, shapes: list[list[int]], table: dict[int, int]) -> Iterator[ExampleOrigin]:
    """`origin` with only the first elements of its examples; None if these lack a property of the whole."""
    leaves = [cut(leaf, shape, table) for leaf, shape in zip(origin.leaves, shapes, strict=True)]
    pairs = zip(origin.leaves, leaves, strict=True)
    if all(new.domain == old.domain or old.domain not in STRUCTURED for old, new in pairs):
        yield replace(origin, leaves=tied(leaves))


def cut(leaf: Leaf, shape: list[int], table: dict[int, int]) -> Leaf:
    """The first elements of an example in each dimension, its rows normalized again, indices within the new sizes."""
    if not leaf.shape or tuple(shape) == leaf.shape and not table:
        return leaf
    part = unexpanded(leaf.value)
    for dim, size in enumerate(shape):
        part = part.narrow(dim, 0, min(size, part.shape[dim]))
    way = leaf.ways[0] if leaf.ways else None
    if isinstance(way, Drawn) and way.rule:
        part = ruled(part, way.rule, way.dim)
    if leaf.domain == "index" and table and part.numel():
        low, most = int(part.min()), min(table.values()) - 1
        low = min(low, most)
        part = part.where(part <= most, low + (part - low).remainder(most + 1 - low))
    out = torch.empty_strided(shape, _packed(leaf, shape), dtype=leaf.value.dtype)
    unexpanded(out).copy_(part)
    return Leaf.of(out)


def _packed(leaf: Leaf, shape: list[int]) -> list[int]:
    """Strides of a smaller tensor whose dimensions lie in memory in the same order."""
    old = leaf.value.stride()
    stride, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=lambda i: (old[i], leaf.shape[i] == 1, -i)):
        if old[i]:
            stride[i] = step
            step *= max(shape[i], 1)
    return stride


def elements(origin: Origin, training: bool) -> int:
    """Elements of all tensors of a run together, inputs and parameters included; 0 where that cannot be told.

    A run of more than `RUNNABLE` elements, or of too many operators, is counted in part.
    """
    size = _size(origin, training, fake=True, own=True, enough=lambda s: s.total > RUNNABLE)
    return size.total if size else 0


def is_long(origin: Origin, training: bool) -> bool:
    """Whether a call runs more than `LONG` operators; it is run without values until that is known."""
    size = _size(origin, training, fake=True, own=True, enough=lambda s: s.operators > LONG)
    return size is not None and size.operators > LONG


# ---- does it run, and how large is it


@dataclass
class _Size:
    """Elements of the tensors of a run: of the largest, of the largest that is no parameter, of all together.

    `held` is the largest parameter, `operators` how many ran. `ended` says that the run was ended early, so that these
    are lower bounds, and `slow` that it was for its time.
    """

    largest: int = 0
    moving: int = 0
    held: int = 0
    total: int = 0
    operators: int = 0
    ended: bool = False
    slow: bool = False

    def add(self, tree: Any, held: bool = False) -> None:
        """Count the tensors of `tree`; `held` where they are parameters or buffers."""
        for t in _pytree.tree_leaves(tree):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
                self.moving = max(self.moving, 0 if held else t.numel())
                self.held = max(self.held, t.numel() if held else 0)
                self.total += t.numel()


class _Enough(BaseException):
    """Ends a run whose size is known well enough. Not an `Exception`, so that the called code does not catch it."""


class _Watch(DispatchMode):
    """Counts every tensor that an operator yields."""

    def __init__(self, size: _Size, enough: Callable[[_Size], bool]):
        super().__init__()
        self.size, self.enough = size, enough

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size.add(out)
        self.size.operators += 1
        if self.enough(self.size):
            raise _Enough
        return out


def _size(
    origin: Origin, training: bool, fake: bool, own: bool = False, enough: Callable[[_Size], bool] = lambda _: False
) -> _Size | None:
    """Size of a run, at the computation's `own` size or another; None if it does not run.

    Args:
        origin: makes the computation.
        training: its mode.
        fake: without values.
        own: whether this is the user's own size, which may take longer; without values the size is that of what ran.
        enough: whether nothing more need be known of a run of this size.

    Raises:
        TooLong: it does not end in time.
    """
    mode: Any = fake_tensors() if fake else contextlib.nullcontext()
    size = _Size()
    try:
        with mode, torch.no_grad():
            made = made_fake(lambda: origin.module(0, "cpu")) if fake else origin.module(0, "cpu")
            module = in_mode(made, training)
            inputs = origin.examples(0, "cpu")
            size.add(inputs)
            size.add([*module.parameters(), *module.buffers()], held=True)
            left = left_s()
            most = SHARE * left if own else min(SHARE * left, BRIEF_S)
            with patience("forward", left, busy=most) if fake else patience("forward", most), _Watch(size, enough):
                module(*inputs)
    except _Enough:
        size.ended = True
    except TooLong:
        if not own or not fake:
            raise
        size.ended = size.slow = True  # a long loop takes far longer without values than with them
    except NEEDS_VALUES:
        return size  # as far as it got: whether it runs shows when it runs for real
    except Exception:  # noqa: BLE001  a size that the user's code refuses, in whatever way, is no candidate
        return None
    return size


__all__ = ["MUCH", "NEEDS_VALUES", "RUNNABLE", "SHARE", "cut", "elements", "is_long", "reduce_origin", "shrink"]
