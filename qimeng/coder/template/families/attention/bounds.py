"""Which keys a query can see: causal masks, sliding windows, masks that are loaded, so that whole blocks are skipped.

A mask is a choice (`where`) between a score and what makes a weight of 0: -inf before a softmax or a relu, 0 after it.
Where its condition compares positions (key - query <= offset, or >=) the bounds are known; where it reads a mask that
many programs share, a small kernel looks which blocks of it hide all (`guard`). Deals in expressions. Knows nothing
about kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from qimeng.coder.template.families.attention.weights import number
from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.nest.ir import Nest

SHARED = 4
"""Heads and batch elements that a mask must be the same for, so that reading it beforehand costs little."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where weights are 0 whatever the scores: a key is seen where ``low <= key - query <= high``, and by conditions.

    Attributes:
        high: the largest difference; None without one.
        low: the least difference; None without one.
        query: axes that count the position of the query, outermost first; empty where there are no bounds.
        masks: the choices that are settled inside the bounds, with what each is there.
        conditions: what is read to know more, each with its value where a key is seen.
    """

    high: int | None = None
    low: int | None = None
    query: Dim = ()
    masks: tuple[tuple[Expr, Expr], ...] = ()
    conditions: tuple[tuple[Expr, bool], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.query or self.conditions)

    @property
    def read_along(self) -> frozenset[int]:
        """The axes that the conditions change along."""
        return frozenset(a for c, _ in self.conditions for a in c.depends)


Linear = tuple[dict[int, int], int]
"""Axis to coefficient, and a constant."""


def bounds_of(nest: Nest, expr: Expr, keys: Dim, rows: Dim, scores: frozenset[int], softmax: bool) -> Bounds:
    """The bounds of the weights or scores `expr`.

    Args:
        nest: the nest.
        expr: the scores of a softmax, or weights without one.
        keys: axes of the keys.
        rows: axes of the queries.
        scores: every axis that there are scores along.
        softmax: which of the two.
    """
    high: int | None = None
    low: int | None = None
    query: Dim = ()
    masks, conditions = [], []
    for choice, condition, inner, seen in choices_of(expr, softmax):
        parts = all_of(condition, seen)
        found = [_compared(nest, c, keys, rows, seen) for c in parts]
        conditions += [(c, seen) for c, f in zip(parts, found, strict=True) if f is None and _is_read(c, keys)]
        known = [f for f in found if f is not None]
        if len({dim for *_, dim in known} | ({query} if query else set())) > 1:
            continue
        for side, offset, dim in known:
            query = dim
            if side == "high":
                high = offset if high is None else min(high, offset)
            else:
                low = offset if low is None else max(low, offset)
        if len(known) == len(found):
            masks.append((choice, inner))
    bounds = Bounds(high, low, query, tuple(masks), tuple(conditions))
    shared = prod(nest.axes.sizes(scores - bounds.read_along))
    return bounds if shared >= SHARED else replace(bounds, conditions=())


def _is_read(condition: Expr, keys: Dim) -> bool:
    """Whether a condition is made of tensors and positions alone, and changes along the keys."""
    below = reach([condition], lambda e: False)
    return bool(condition.depends & set(keys)) and all(e.op not in ("dot", "reduce", "part") for e in below)


def choices_of(e: Expr, softmax: bool) -> Iterator[tuple[Expr, Expr, Expr, bool]]:
    """Choices on the way down whose other branch makes a weight of 0.

    Yields:
        The choice, its condition, the branch that counts, and the condition's value there.
    """
    masked = -math.inf if softmax else 0.0
    while True:
        if e.op in ("identity", "round"):
            e = e.args[0]
        elif e.op == "relu" and not softmax:
            e, masked = e.args[0], -math.inf
        elif e.op == "where":
            condition, yes, no = e.args
            if number(no) == masked and isinstance(yes, Expr):
                yield e, condition, yes, True
                e = yes
            elif number(yes) == masked and isinstance(no, Expr):
                yield e, condition, no, False
                e = no
            else:
                return
        else:
            return


def all_of(condition: Any, seen: bool) -> list[Expr]:
    """The conditions that all hold where `condition` is `seen`."""
    if condition.op == "identity":
        return all_of(condition.args[0], seen)
    if condition.op == "and" and seen:
        return [c for a in condition.args for c in all_of(a, True)]
    if condition.op == "or" and not seen:
        return [c for a in condition.args for c in all_of(a, False)]
    return [condition]


def _compared(nest: Nest, e: Expr, keys: Dim, rows: Dim, seen: bool) -> tuple[str, int, Dim] | None:
    """``("high", offset, query)`` or ``("low", …)`` where `e` says so of positions, or its opposite does."""
    while e.op in ("identity", "not"):
        seen = seen != (e.op == "not")
        e = e.args[0]
    if e.op not in ("le", "lt", "ge", "gt"):
        return None
    sides = [linear(nest, a) for a in e.args]
    if sides[0] is None or sides[1] is None:
        return None
    (left, a), (right, b) = sides[0], sides[1]
    table = {atom: left.get(atom, 0) - right.get(atom, 0) for atom in {*left, *right}}
    constant = a - b
    op = e.op if seen else {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}[e.op]
    table = {atom: c for atom, c in table.items() if c}
    key = {atom: c for atom, c in table.items() if atom in keys}
    if key == _walk(nest, keys, -1):  # the other way round: query - key
        table, constant = {atom: -c for atom, c in table.items()}, -constant
        op = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}[op]
    elif key != _walk(nest, keys, 1):
        return None
    others = {atom: c for atom, c in table.items() if atom not in keys}
    query = tuple(atom for atom in rows if atom in others)
    if not query or others != _walk(nest, query, -1):
        return None
    # key - query + constant <op> 0
    return {
        "le": ("high", -constant, query),
        "lt": ("high", -constant - 1, query),
        "ge": ("low", -constant, query),
        "gt": ("low", -constant + 1, query),
    }[op]


def _walk(nest: Nest, dim: Dim, times: int) -> dict[int, int]:
    found, step = {}, times
    for atom in reversed(dim):
        found[atom] = step
        step *= nest.axes.size(atom)
    return found


def linear(nest: Nest, e: Any) -> Linear | None:
    """`e` as a sum of multiples of positions along axes and a constant; None for anything else."""
    if not isinstance(e, Expr):
        return ({}, int(e)) if float(e).is_integer() else None
    if e.op == "const":
        return ({}, int(e.param)) if float(e.param).is_integer() else None
    if e.op == "index":
        return _walk(nest, tuple(e.reduced), 1), 0
    if e.op == "identity" or (e.op == "cast" and e.dtype in ("int32", "int64", "float32")):
        return linear(nest, e.args[0])
    if e.op in ("add", "sub", "mul"):
        found = [linear(nest, a) for a in e.args]
        if found[0] is None or found[1] is None:
            return None
        (left, a), (right, b) = found[0], found[1]
        if e.op == "mul":
            if left and right:
                return None
            table, factor = (left, b) if left else (right, a)
            return {atom: c * factor for atom, c in table.items()}, a * b
        sign = 1 if e.op == "add" else -1
        return {atom: left.get(atom, 0) + sign * right.get(atom, 0) for atom in {*left, *right}}, a + sign * b
    return None


__all__ = ["Bounds", "all_of", "bounds_of", "choices_of", "linear"]
