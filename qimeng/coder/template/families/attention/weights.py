"""What the weights of a second product are: a numerator for each key, a softmax's maximum and sum, factors a row.

The sum over keys of ``exp(x - max) / sum * v`` is ``sum(exp(x - max) * v) / sum``: whatever does not change along the
keys is applied to the product instead of to its operand. Deals in expressions. Knows nothing about kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr, constant
from qimeng.coder.template.nest.ir import Nest
from qimeng.family import Unsupported

Step = tuple[str, Any]
"""``("mul", x)``, ``("div", x)``, or ``("keep", x)`` and ``("drop", x)``: 0 where the condition is false, or true."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights as they are computed while walking the keys.

    Attributes:
        numerator: what multiplies the values, where there is no softmax; else the exponential.
        scores: the argument of the softmax; None without one.
        pair: its maximum and sum; None without one.
        sums: further sums over the keys.
        steps: what is done to a row of the product afterwards, in this order.
    """

    numerator: Expr
    scores: Expr | None
    pair: Expr | None
    sums: tuple[Expr, ...]
    steps: tuple[Step, ...]

    def tile(self) -> list[Expr]:
        """What is computed for each query and key."""
        return [self.scores if self.scores is not None else self.numerator, *(e.args[0] for e in self.sums)]


def weights_of(nest: Nest, expr: Expr, keys: frozenset[int]) -> Weights:
    """The weights `expr`, reduced with the values over the axes `keys`.

    Raises:
        Unsupported: a reduction that is neither of one softmax nor a sum, or is needed before it is complete.
    """
    reductions = nest.reductions()
    if any(frozenset(e.reduced) != keys for e in reductions):
        raise Unsupported("a reduction beside two matrix products that is not over the keys")
    pairs = [e for e in reductions if e.param == "sumexp"]
    sums = tuple(e for e in reductions if e.param == "sum")
    if len(pairs) > 1 or len(pairs) + len(sums) < len(reductions):
        raise Unsupported("a reduction over the keys that is neither a sum nor that of one softmax")
    steps: list[Step] = []
    e = expr
    while (inner := _without_row_factor(e, keys, steps)) is not None:
        e = inner
    scores = _softmax_argument(e, pairs[0]) if pairs else None
    if pairs and scores is None:
        raise Unsupported("weights that are not the exponentials of their softmax")
    walked = scores if scores is not None else e
    if walked.level or any(s.args[0].level for s in sums):
        raise Unsupported("weights that need a reduction over the keys before the products")
    return Weights(e, scores, pairs[0] if pairs else None, sums, tuple(reversed(steps)))


def _without_row_factor(e: Expr, keys: frozenset[int], steps: list[Step]) -> Expr | None:
    """What is left of `e` when the outermost step that does not change along the keys is noted; None if there is none.

    Roundings to the operands' dtype are left out: the numerator is rounded instead.
    """

    def along(a: Any) -> bool:
        return isinstance(a, Expr) and bool(a.depends & keys)

    inner: Expr
    if e.op in ("identity", "round") or (e.op == "cast" and is_float(e.args[0].dtype)):
        inner = e.args[0]
        return inner
    if e.op == "mul" and along(e.args[0]) != along(e.args[1]):
        inner, factor = e.args if along(e.args[0]) else e.args[::-1]
        steps.append(("mul", factor))
        return inner
    if e.op == "div" and along(e.args[0]) and not along(e.args[1]):
        steps.append(("div", e.args[1]))
        inner = e.args[0]
        return inner
    if e.op == "where" and not along(e.args[0]):
        condition, yes, no = e.args
        if along(no) and is_zero(yes):
            steps.append(("drop", condition))
            inner = no
            return inner
        if along(yes) and is_zero(no):
            steps.append(("keep", condition))
            inner = yes
            return inner
    return None


def is_zero(e: Any) -> bool:
    """Whether `e` is the number 0."""
    return number(e) == 0


def number(e: Any) -> float | None:
    """The number that `e` is, where it is one."""
    known = constant(e) if isinstance(e, Expr) else None
    if isinstance(e, Expr):
        return None if known is None else float(known.param)
    return float(e)


def _softmax_argument(e: Expr, pair: Expr) -> Expr | None:
    """`x` where `e` is ``exp(x - max(x))`` with the maximum of `pair`."""
    if e.op != "exp" or e.args[0].op != "sub":
        return None
    x, top = (_plain(a) for a in e.args[0].args)
    same = top.op == "part" and top.param == "max" and top.args[0] is pair and x is _plain(pair.args[0])
    return x if same else None


def _plain(e: Expr) -> Expr:
    while e.op == "identity":
        e = e.args[0]
    return e


__all__ = ["Step", "Weights", "is_zero", "number", "weights_of"]
