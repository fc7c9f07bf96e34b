"""Reductions, softmax and normalizations as loop nests.

Deals in definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import SMALL, axis_of, dims_of, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.pointwise import binary, truth
from qimeng.coder.template.rules.powers import power
from qimeng.coder.template.rules.shapes import gathered
from qimeng.family import Unsupported


@rule("sum", "mean")
def _sum(b: Builder, node: Any, x: Expr, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    d = out_dtype(node)
    total = b.reduce("sum", operand(b, x, d), dims_of(dims), keepdim, d)
    if node.packet == "aten.mean":
        return b.pw("div", total, float(b.count(x, dims_of(dims))), dtype=d)
    return total


@rule("prod")
def _prod(b: Builder, node: Any, x: Expr, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    d = out_dtype(node)
    return b.reduce("prod", operand(b, x, d), dims_of(dims), keepdim, d)


def extreme(b: Builder, kind: str, x: Expr, dims: list[int] | None, keepdim: bool) -> Expr:
    """Smallest or largest value; of short integers by way of int32."""
    wide = operand(b, x, "int32") if x.dtype in SMALL else x
    return b.cast(b.reduce(kind, wide, dims, keepdim), x.dtype)


@rule("amax", "amin")
def _amax(b: Builder, node: Any, x: Expr, dims: Any = None, keepdim: bool = False) -> Expr:
    return extreme(b, {"aten.amax": "max", "aten.amin": "min"}[node.packet], x, dims_of(dims), keepdim)


@rule("max", "min")
def _max(b: Builder, node: Any, x: Expr, dim: Any = None, keepdim: bool = False) -> Any:
    kind = node.packet.removeprefix("aten.")
    if isinstance(dim, Expr):
        return binary({"max": "maximum", "min": "minimum"}[kind], b, x, dim, out_dtype(node))
    best = extreme(b, kind, x, dims_of(dim), keepdim)
    return best if dim is None else (best, position(b, f"arg{kind}", x, dims_of(dim), keepdim))


def position(b: Builder, kind: str, x: Expr, dims: list[int] | None, keepdim: bool) -> Expr:
    """Where the first smallest or largest value is (``"argmin"``, ``"argmax"``), counted along `dims`."""
    return b.reduce(kind, operand(b, x, "int32") if x.dtype in SMALL else x, dims, keepdim, "int64")


@rule("argmax", "argmin")
def _argmax(b: Builder, node: Any, x: Expr, dim: Any = None, keepdim: bool = False) -> Expr:
    return position(b, node.packet.removeprefix("aten."), x, dims_of(dim), keepdim)


MOST_LARGEST = 4
"""Largest values that are found one after another, each by two more reductions of the row."""


@rule("topk")
def _topk(
    b: Builder, node: Any, x: Expr, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[Expr, Expr]:
    """The k largest values and where they are: each is found among what was not taken before it."""
    if not largest:
        raise Unsupported("the smallest values, of which NaN is the last to be taken")
    if k > MOST_LARGEST or not is_float(x.dtype):
        raise Unsupported(f"the {k} largest of {x.dtype}; at most {MOST_LARGEST} floating values are found")
    d = axis_of(x, dim)
    size = b.axes.extent(b.axes.resolve(b.whole(x.dims[d])))
    wide = b.cast(x, compute_dtype(x.dtype))
    place = b.index(x.dims[d])
    place = b.redim(place, [x.dims[d], *[()] * (len(x.dims) - 1 - d)])
    nan, free = b.pw("isnan", wide, dtype="bool"), None
    values, places = [], []
    for _ in range(k):
        left = wide if free is None else b.pw("where", free, wide, float("-inf"), dtype=wide.dtype)
        best = b.reduce("max", left, [d], True)
        same = b.pw(
            "or",
            b.pw("eq", wide, best, dtype="bool"),
            b.pw("and", nan, b.pw("isnan", best, dtype="bool"), dtype="bool"),
            dtype="bool",
        )
        same = same if free is None else b.pw("and", same, free, dtype="bool")
        where = b.reduce("min", b.pw("where", same, place, size, dtype="int32"), [d], True)
        other = b.pw("ne", place, where, dtype="bool")
        free = other if free is None else b.pw("and", free, other, dtype="bool")
        values.append(best)
        places.append(where)
    axis = b.axes.new(k)
    return b.cast(_along(b, values, d, axis), x.dtype), b.cast(_along(b, places, d, axis), "int64")


def _along(b: Builder, parts: Sequence[Expr], d: int, axis: Dim) -> Expr:
    """Values of one element along dimension `d` as one tensor: the i-th at position i along `axis`."""
    rank, count = len(parts[0].dims), len(parts)
    number = b.redim(b.index(axis), [axis, *[()] * (rank - 1 - d)])
    joined = parts[-1]
    for i in range(count - 2, -1, -1):
        joined = b.pw("where", b.pw("le", number, i, dtype="bool"), parts[i], joined, dtype=joined.dtype)
    return joined


@rule("any", "all")
def _any(b: Builder, node: Any, x: Expr, dim: Any = None, keepdim: bool = False) -> Expr:
    kind = "max" if node.packet == "aten.any" else "min"
    flag = b.reduce(kind, b.cast(truth(b, x), "int32"), dims_of(dim), keepdim)
    return b.cast(b.pw("ne", flag, 0, dtype="bool"), out_dtype(node))


@rule("var", "std", "var_mean")
def _var(b: Builder, node: Any, x: Expr, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    mean, m2, n = b.moments(x, dims_of(dims), keepdim)
    free = n - (1 if correction is None else correction)
    var = b.pw("div", m2, float(max(free, 0)), dtype=out_dtype(node))
    if node.packet == "aten.std":
        return b.pw("sqrt", var)
    if node.packet == "aten.var_mean":  # what is infinite leaves no mean in PyTorch's way of computing it
        return var, b.pw("where", b.pw("isnan", m2, dtype="bool"), m2, mean)
    return var


@rule("linalg_vector_norm")
def _vector_norm(
    b: Builder, node: Any, x: Expr, ord: Any = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Expr:
    return _norm(b, x, ord, dims_of(dims), keepdim, out_dtype(node))


@rule("dist")
def _dist(b: Builder, node: Any, x: Expr, y: Expr, p: Any = 2) -> Expr:
    d = out_dtype(node)
    return _norm(b, b.pw("sub", operand(b, x, d), operand(b, y, d)), p, None, False, d)


@rule("_cdist_forward")
def _cdist(b: Builder, node: Any, x: Expr, y: Expr, p: Any, compute_mode: Any = None) -> Expr:
    """The norm of the difference of each row of `x` and each row of `y`; the largest difference passes over NaN."""
    y = b.own(y)
    rows = b.redim(x, [*x.dims[:-1], (), x.dims[-1]])
    columns = b.redim(y, [*y.dims[:-2], (), *y.dims[-2:]])
    apart = b.pw("sub", rows, columns)
    if p == float("inf"):
        apart = b.pw("where", b.pw("isnan", apart, dtype="bool"), 0.0, apart)
    return _norm(b, apart, p, [-1], False, out_dtype(node))


def _norm(b: Builder, x: Expr, ord: Any, where: list[int] | None, keepdim: bool, d: str) -> Expr:
    x = operand(b, x, d)
    if ord == 2:
        return b.pw("sqrt", b.reduce("sum", b.pw("mul", x, x, dtype=compute_dtype(d)), where, keepdim), dtype=d)
    size = b.pw("abs", x)
    if ord == 1:
        return b.reduce("sum", size, where, keepdim, d)
    if ord in (float("inf"), float("-inf")):
        return b.reduce("max" if ord > 0 else "min", size, where, keepdim, d)
    if ord == 0:
        return b.reduce("sum", operand(b, b.pw("ne", x, 0.0, dtype="bool"), d), where, keepdim, d)
    total = b.reduce("sum", power(b, size, ord, compute_dtype(d)), where, keepdim)
    return power(b, total, 1.0 / ord, d)


@rule("_softmax", "_log_softmax")
def _softmax(b: Builder, node: Any, x: Expr, dim: int, half: bool = False) -> Expr:
    x = operand(b, x, out_dtype(node))
    shifted = b.pw("sub", x, b.reduce("max", x, [dim], True), dtype=compute_dtype(x.dtype))
    e = b.pw("exp", shifted)
    total = b.reduce("sum", e, [dim], True)
    if node.packet == "aten._softmax":
        return b.pw("div", e, total, dtype=out_dtype(node))
    return b.pw("sub", shifted, b.pw("log", total), dtype=out_dtype(node))


@rule("logsumexp")
def _logsumexp(b: Builder, node: Any, x: Expr, dims: Any, keepdim: bool = False) -> Expr:
    x = operand(b, x, out_dtype(node))
    if b.count(x, dims_of(dims)) == 1:
        return b.pw("add", b.reduce("sum", x, dims_of(dims), keepdim), 0.0, dtype=out_dtype(node))
    top = b.reduce("max", x, dims_of(dims), True)
    finite = b.pw("where", b.pw("isinf", top, dtype="bool"), 0.0, top)
    total = b.reduce("sum", b.pw("exp", b.pw("sub", x, finite)), dims_of(dims), keepdim)
    gone = set() if keepdim else {axis_of(x, k) for k in dims_of(dims) or range(len(x.dims))}
    finite = b.redim(finite, [d for i, d in enumerate(finite.dims) if i not in gone])
    return b.pw("add", b.pw("log", total), finite, dtype=out_dtype(node))


def _affine(b: Builder, x: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    if weight is not None:
        x = b.pw("mul", x, weight)
    return b.pw("add", x, bias) if bias is not None else x


def _normalize(b: Builder, x: Expr, dims: Sequence[int], eps: float) -> tuple[Expr, Expr, Expr, Expr, int]:
    """(x - mean) / sqrt(var + eps), mean, 1 / sqrt(var + eps), biased variance, count; statistics keep their dims."""
    mean, m2, n = b.moments(x, dims, True)
    var = b.pw("mul", m2, 1.0 / n)
    rstd = b.pw("rsqrt", b.pw("add", var, float(eps)))
    return b.pw("mul", b.pw("sub", x, mean, dtype=mean.dtype), rstd), mean, rstd, var, n


@rule("native_layer_norm")
def _layer_norm(
    b: Builder, node: Any, x: Expr, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Expr, ...]:
    dims = list(range(len(x.dims) - len(shape), len(x.dims)))
    y, mean, rstd, _, _ = _normalize(b, x, dims, eps)
    return b.cast(_affine(b, y, weight, bias), out_dtype(node)), mean, rstd


@rule("native_group_norm")
def _group_norm(
    b: Builder, node: Any, x: Expr, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Expr, ...]:
    grouped = b.reshape(x, (n, groups, c // groups, hw))
    y, mean, rstd, _, _ = _normalize(b, grouped, [2, 3], eps)
    params = [None if p is None else b.reshape(p, (1, groups, c // groups, 1)) for p in (weight, bias)]
    out = b.reshape(_affine(b, y, *params), node.metas[0].shape)
    flat = [b.redim(s, s.dims[:2]) for s in (mean, rstd)]
    return b.cast(out, out_dtype(node)), flat[0], flat[1]


@rule(
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
)
def _batch_norm(b: Builder, node: Any, x: Expr, weight: Any, bias: Any, *rest: Any) -> tuple[Any, ...]:
    left = list(rest)
    running_mean, running_var = (left.pop(0), left.pop(0)) if not node.target.endswith("no_stats") else (None, None)
    training = left.pop(0) if node.packet != "aten._native_batch_norm_legit_no_training" else False
    momentum, eps = left
    rank = len(x.dims)

    def column(v: Any) -> Any:
        return None if v is None else b.redim(v, [(), v.dims[0], *[()] * (rank - 2)])

    if not training:
        rstd = b.pw("rsqrt", b.pw("add", column(running_var), float(eps)))
        y = b.pw("mul", b.pw("sub", x, column(running_mean), dtype=compute_dtype(x.dtype)), rstd)
        return (
            b.cast(_affine(b, y, column(weight), column(bias)), out_dtype(node)),
            None,
            None,
            running_mean,
            running_var,
        )
    y, mean, rstd, var, n = _normalize(b, x, [0, *range(2, rank)], eps)
    out = b.cast(_affine(b, y, column(weight), column(bias)), out_dtype(node))
    flat_mean, flat_rstd, flat_var = (b.redim(s, [s.dims[1]]) for s in (mean, rstd, var))
    if running_mean is None or running_var is None:
        return out, flat_mean, flat_rstd
    keep, gain = 1.0 - float(momentum), float(momentum)
    unbiased = b.pw("mul", flat_var, n / max(n - 1, 1))
    moved = [
        b.cast(b.pw("add", b.pw("mul", b.cast(old, new.dtype), keep), b.pw("mul", new, gain)), old.dtype)
        for old, new in ((running_mean, flat_mean), (running_var, unbiased))
    ]
    return out, flat_mean, flat_rstd, *moved


@rule("gather")
def _gather(b: Builder, node: Any, x: Expr, dim: int, index: Expr, sparse_grad: bool = False) -> Expr:
    """Out = sum over j of (j == index) * x[j]; only for one index a row (as cross-entropy needs)."""
    at = axis_of(x, dim)
    if index.dims[at]:
        return gathered(b, x, at, index)
    position = b.redim(b.index(x.dims[at]), [x.dims[at] if i == at else () for i in range(len(x.dims))])
    hit = b.pw("eq", position, index, dtype="bool")
    if not is_float(x.dtype):
        return b.reduce("sum", b.pw("where", hit, x, 0, dtype=x.dtype), [at], True)
    bits = "int64" if x.dtype == "float64" else "int32"  # a sum with zeros would lose the sign of -0
    picked = b.pw("where", hit, b.pw("bits", x, dtype=bits), 0, dtype=bits)
    return b.pw("from_bits", b.reduce("sum", picked, [at], True), dtype=x.dtype)


__all__ = ["MOST_LARGEST", "extreme", "position"]
