"""The table from ATen operators to loop nests.

Deals in definitions: each entry says what one operator computes, in the builder's words. Formulas follow the PyTorch
documentation of each operator. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from qimeng.coder.template.axes import Unsupported
from qimeng.coder.template.ir import Expr
from qimeng.coder.template.ops import is_float
from qimeng.coder.template.rules import Builder

Rule = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
RULES: dict[str, Rule] = {}
"""Operator packet (``"aten.add"``) to its rule."""


def rule(*names: str) -> Callable[[F], F]:
    """Enter a function in `RULES` under each of `names`."""

    def enter(function: F) -> F:
        for name in names:
            RULES[f"aten.{name}"] = function
        return function

    return enter


def _out(node: Any) -> str:
    return str(node.metas[0].dtype)


def _num(b: Builder, x: Any, dtype: str) -> Any:
    """A tensor operand in the dtype that arithmetic towards `dtype` is done in."""
    if isinstance(x, Expr):
        return b.cast(x, "float32") if is_float(dtype) and not is_float(x.dtype) else x
    return float(x) if is_float(dtype) and not isinstance(x, bool) else x


def _binary(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Any, y: Any, alpha: Any = 1) -> Expr:
        d = _out(node)
        x, y = _num(b, x, d), _num(b, y, d)
        if alpha != 1:
            y = b.pw("mul", y, alpha) if isinstance(y, Expr) else y * alpha
        return b.pw(op, x, y, dtype=d)

    return apply


def _unary(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Expr) -> Expr:
        return b.pw(op, _num(b, x, _out(node)), dtype=_out(node))

    return apply


def _compare(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Any, y: Any) -> Expr:
        tensors = [a for a in (x, y) if isinstance(a, Expr)]
        floating = any(is_float(t.dtype) for t in tensors) or any(isinstance(a, float) for a in (x, y))
        if floating:
            x, y = _num(b, x, "float32"), _num(b, y, "float32")
        return b.pw(op, x, y, dtype="bool")

    return apply


for _name in ("add", "sub", "mul"):
    RULES[f"aten.{_name}"] = _binary(_name)
for _name in (
    "exp exp2 log log2 sqrt rsqrt sin cos erf expm1 log1p tanh sigmoid relu reciprocal abs neg floor ceil sign".split()
):
    RULES[f"aten.{_name}"] = _unary(_name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    RULES[f"aten.{_name}"] = _compare(_name)
for _name, _op in (
    ("logical_and", "and"),
    ("logical_or", "or"),
    ("logical_xor", "xor"),
    ("bitwise_and", "and"),
    ("bitwise_or", "or"),
):
    RULES[f"aten.{_name}"] = (lambda op: lambda b, node, x, y: b.pw(op, x, y, dtype=_out(node)))(_op)


@rule("div")
def _div(b: Builder, node: Any, x: Any, y: Any, rounding_mode: Any = None) -> Expr:
    if rounding_mode is not None or not is_float(_out(node)):
        raise Unsupported("division with rounding")
    return b.pw("div", _num(b, x, _out(node)), _num(b, y, _out(node)), dtype=_out(node))


@rule("rsub")
def _rsub(b: Builder, node: Any, x: Expr, y: Any, alpha: Any = 1) -> Expr:
    result: Expr = RULES["aten.sub"](b, node, y, x if alpha == 1 else b.pw("mul", x, alpha))
    return result


@rule("pow")
def _pow(b: Builder, node: Any, x: Any, y: Any) -> Expr:
    if isinstance(y, Expr) or not isinstance(x, Expr):
        raise Unsupported("pow with a tensor exponent")
    d = _out(node)
    x = _num(b, x, d)
    if float(y).is_integer() and 1 <= abs(y) <= 8:
        result = x
        for _ in range(abs(int(y)) - 1):
            result = b.pw("mul", result, x, dtype=d)
        return result if y > 0 else b.pw("reciprocal", result, dtype=d)
    if y == 0.5:
        return b.pw("sqrt", x, dtype=d)
    if y == -0.5:
        return b.pw("rsqrt", x, dtype=d)
    return b.pw("exp2", b.pw("mul", b.pw("log2", x, dtype=d), float(y)), dtype=d)


@rule("square")
def _square(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("mul", x, x, dtype=_out(node))


@rule("where")
def _where(b: Builder, node: Any, c: Expr, x: Any, y: Any) -> Expr:
    return b.pw("where", c, _num(b, x, _out(node)), _num(b, y, _out(node)), dtype=_out(node))


@rule("masked_fill")
def _masked_fill(b: Builder, node: Any, x: Expr, mask: Expr, value: Any) -> Expr:
    return b.pw("where", mask, _num(b, value, _out(node)), x, dtype=_out(node))


@rule("logical_not", "bitwise_not")
def _not(b: Builder, node: Any, x: Expr) -> Expr:
    if node.packet == "aten.bitwise_not" and x.dtype != "bool":
        raise Unsupported("bitwise not of integers")
    return b.pw("not", x, dtype="bool")


@rule("isnan", "isinf")
def _classify(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw(node.packet.removeprefix("aten."), x, dtype="bool")


@rule("maximum", "minimum")
def _extreme(b: Builder, node: Any, x: Expr, y: Any) -> Expr:
    name = node.packet.removeprefix("aten.")
    d = _out(node)
    return b.pw(name if is_float(d) else f"i{name}", _num(b, x, d), _num(b, y, d), dtype=d)


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(b: Builder, node: Any, x: Expr, low: Any = None, high: Any = None, min: Any = None, max: Any = None) -> Expr:
    low, high = min if low is None else low, max if high is None else high
    if node.packet == "aten.clamp_max":
        low, high = None, low
    if node.packet == "aten.hardtanh":
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    d = _out(node)
    prefix = "" if is_float(d) else "i"
    if low is not None:
        x = b.pw(prefix + "maximum", x, _num(b, low, d), dtype=d)
    if high is not None:
        x = b.pw(prefix + "minimum", x, _num(b, high, d), dtype=d)
    return x


@rule("relu6")
def _relu6(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("minimum", b.pw("maximum", x, 0.0), 6.0, dtype=_out(node))


@rule("leaky_relu")
def _leaky_relu(b: Builder, node: Any, x: Expr, slope: float = 0.01) -> Expr:
    return b.pw("where", b.pw("gt", x, 0.0, dtype="bool"), x, b.pw("mul", x, float(slope)), dtype=_out(node))


@rule("elu")
def _elu(b: Builder, node: Any, x: Expr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Expr:
    low = b.pw("mul", b.pw("expm1", b.pw("mul", x, float(input_scale))), float(alpha * scale))
    return b.pw("where", b.pw("gt", x, 0.0, dtype="bool"), b.pw("mul", x, float(scale)), low, dtype=_out(node))


@rule("selu")
def _selu(b: Builder, node: Any, x: Expr) -> Expr:
    return _elu(b, node, x, 1.6732632423543772, 1.0507009873554805)


@rule("celu")
def _celu(b: Builder, node: Any, x: Expr, alpha: float = 1.0) -> Expr:
    return _elu(b, node, x, alpha, 1.0, 1.0 / alpha)


@rule("silu")
def _silu(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("mul", x, b.pw("sigmoid", x), dtype=_out(node))


@rule("gelu")
def _gelu(b: Builder, node: Any, x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        cube = b.pw("mul", b.pw("mul", x, x), x)
        inner = b.pw("mul", b.pw("add", x, b.pw("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
        gate = b.pw("add", b.pw("tanh", inner), 1.0)
    else:
        gate = b.pw("add", b.pw("erf", b.pw("mul", x, math.sqrt(0.5))), 1.0)
    return b.pw("mul", b.pw("mul", x, 0.5), gate, dtype=_out(node))


@rule("softplus")
def _softplus(b: Builder, node: Any, x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    scaled = b.pw("mul", x, float(beta)) if beta != 1 else x
    soft = b.pw("log1p", b.pw("exp", scaled))
    soft = b.pw("mul", soft, 1.0 / beta) if beta != 1 else soft
    return b.pw("where", b.pw("gt", scaled, float(threshold), dtype="bool"), x, soft, dtype=_out(node))


@rule("mish")
def _mish(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("mul", x, b.pw("tanh", _softplus(b, node, x)), dtype=_out(node))


@rule("hardsigmoid", "hardswish")
def _hard(b: Builder, node: Any, x: Expr) -> Expr:
    gate = b.pw("mul", b.pw("minimum", b.pw("maximum", b.pw("add", x, 3.0), 0.0), 6.0), 1.0 / 6.0, dtype=_out(node))
    return gate if node.packet == "aten.hardsigmoid" else b.pw("mul", x, gate, dtype=_out(node))


@rule("log_sigmoid_forward")
def _log_sigmoid(b: Builder, node: Any, x: Expr) -> tuple[Expr, None]:
    low = b.pw("minimum", x, 0.0)
    return b.pw("sub", low, b.pw("log1p", b.pw("exp", b.pw("neg", b.pw("abs", x))))), None


@rule("addcmul", "addcdiv")
def _addc(b: Builder, node: Any, x: Expr, y: Expr, z: Expr, value: Any = 1) -> Expr:
    inner = b.pw("mul" if node.packet == "aten.addcmul" else "div", y, z)
    return b.pw("add", x, inner if value == 1 else b.pw("mul", inner, float(value)), dtype=_out(node))


@rule("clone", "alias", "detach", "lift_fresh_copy", "_to_copy", "copy")
def _copy(b: Builder, node: Any, x: Expr, **unused: Any) -> Expr:
    return b.cast(x, _out(node)) if x.dtype != _out(node) else b.redim(x, x.dims)


@rule("full", "full_like", "zeros_like", "ones_like", "zeros", "ones", "fill")
def _full(b: Builder, node: Any, *args: Any, **unused: Any) -> Expr:
    value = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}.get(node.packet.removeprefix("aten."))
    value = args[1] if value is None else value
    if isinstance(value, Expr):
        raise Unsupported("full with a tensor value")
    return b.redim(b.const(value, _out(node)), [b.axes.new(s) for s in node.metas[0].shape])


@rule("arange")
def _arange(b: Builder, node: Any, *args: Any, **unused: Any) -> Expr:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (args[0], args[1], args[2] if len(args) > 2 else 1)
    if (start, step) != (0, 1):
        raise Unsupported("arange that does not count from 0 by 1")
    return b.cast(b.index(b.axes.new(int(end))), _out(node))


@rule("tril", "triu")
def _triangle(b: Builder, node: Any, x: Expr, diagonal: int = 0) -> Expr:
    rows, cols = b.index(x.dims[-2]), b.index(x.dims[-1])
    rows = b.redim(rows, [x.dims[-2], ()])
    offset = b.pw("sub", cols, rows, dtype="int32")
    keep = b.pw("ge" if node.packet == "aten.triu" else "le", offset, int(diagonal), dtype="bool")
    return b.pw("where", keep, x, 0.0 if is_float(x.dtype) else 0, dtype=_out(node))


# -- views in the middle of a region


@rule("view", "_unsafe_view", "reshape")
def _view(b: Builder, node: Any, x: Expr, shape: Sequence[int]) -> Expr:
    return b.reshape(x, node.metas[0].shape)


@rule("permute")
def _permute(b: Builder, node: Any, x: Expr, order: Sequence[int]) -> Expr:
    return b.redim(x, [x.dims[i] for i in order])


@rule("transpose")
def _transpose(b: Builder, node: Any, x: Expr, i: int, j: int) -> Expr:
    dims = list(x.dims)
    dims[i], dims[j] = dims[j], dims[i]
    return b.redim(x, dims)


@rule("t")
def _t(b: Builder, node: Any, x: Expr) -> Expr:
    return b.redim(x, x.dims[::-1])


@rule("unsqueeze")
def _unsqueeze(b: Builder, node: Any, x: Expr, dim: int) -> Expr:
    at = dim % (len(x.dims) + 1)
    return b.redim(x, [*x.dims[:at], (), *x.dims[at:]])


@rule("squeeze")
def _squeeze(b: Builder, node: Any, x: Expr, dim: Any = None) -> Expr:
    rank = len(x.dims)
    drop = set(range(rank)) if dim is None else {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    return b.redim(x, [d for i, d in enumerate(x.dims) if i not in drop or d])


@rule("expand")
def _expand(b: Builder, node: Any, x: Expr, shape: Sequence[int], implicit: bool = False) -> Expr:
    sizes = node.metas[0].shape
    dims = [()] * (len(sizes) - len(x.dims)) + list(x.dims)
    return b.redim(x, [d or b.axes.new(s) for d, s in zip(dims, sizes, strict=True)])


# -- reductions and norms


def _dims(dims: Any) -> list[int] | None:
    if dims is None:
        return None
    return [dims] if isinstance(dims, int) else list(dims)


@rule("sum", "mean")
def _sum(b: Builder, node: Any, x: Expr, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    x = _num(b, x, _out(node))
    if x.dtype in ("bool", "int32") and not is_float(_out(node)):
        x = b.cast(x, _out(node))
    total = b.reduce("sum", x, _dims(dims), keepdim, _out(node))
    if node.packet == "aten.mean":
        return b.pw("mul", total, 1.0 / b.count(x, _dims(dims)), dtype=_out(node))
    return total


@rule("amax", "amin", "prod")
def _amax(b: Builder, node: Any, x: Expr, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Expr:
    kind = {"aten.amax": "max", "aten.amin": "min", "aten.prod": "prod"}[node.packet]
    return b.reduce(kind, x, _dims(dims), keepdim)


@rule("max", "min")
def _max(b: Builder, node: Any, x: Expr, dim: Any = None, keepdim: bool = False) -> Any:
    kind = node.packet.removeprefix("aten.")
    if isinstance(dim, Expr):
        return _extreme_of(b, node, x, dim)
    if dim is None:
        return b.reduce(kind, x, None)
    return b.reduce(kind, x, [dim], keepdim), b.reduce(f"arg{kind}", x, [dim], keepdim, "int64")


def _extreme_of(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    name = {"aten.max": "maximum", "aten.min": "minimum"}[node.packet]
    return b.pw(name if is_float(_out(node)) else f"i{name}", x, y, dtype=_out(node))


@rule("argmax", "argmin")
def _argmax(b: Builder, node: Any, x: Expr, dim: Any = None, keepdim: bool = False) -> Expr:
    return b.reduce(node.packet.removeprefix("aten."), x, _dims(dim), keepdim, "int64")


@rule("any", "all")
def _any(b: Builder, node: Any, x: Expr, dim: Any = None, keepdim: bool = False) -> Expr:
    flag = b.cast(b.pw("ne", x, 0, dtype="bool") if x.dtype != "bool" else x, "int32")
    kind = "max" if node.packet == "aten.any" else "min"
    return b.pw("ne", b.reduce(kind, flag, _dims(dim), keepdim), 0, dtype="bool")


@rule("var", "std", "var_mean")
def _var(b: Builder, node: Any, x: Expr, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    mean, m2, n = b.moments(x, _dims(dims), keepdim)
    free = n - (1 if correction is None else correction)
    var = b.pw("mul", m2, 1.0 / free if free > 0 else float("nan"), dtype=_out(node))
    if node.packet == "aten.std":
        return b.pw("sqrt", var)
    return (var, mean) if node.packet == "aten.var_mean" else var


@rule("linalg_vector_norm")
def _vector_norm(
    b: Builder, node: Any, x: Expr, ord: Any = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Expr:
    if ord == 2:
        return b.pw("sqrt", b.reduce("sum", b.pw("mul", x, x), _dims(dims), keepdim, "float32"), dtype=_out(node))
    if ord == 1:
        return b.reduce("sum", b.pw("abs", x), _dims(dims), keepdim, _out(node))
    if ord in (float("inf"), float("-inf")):
        return b.reduce("max" if ord > 0 else "min", b.pw("abs", x), _dims(dims), keepdim, _out(node))
    raise Unsupported(f"vector norm of order {ord}")


@rule("_softmax", "_log_softmax")
def _softmax(b: Builder, node: Any, x: Expr, dim: int, half: bool = False) -> Expr:
    shifted = b.pw("sub", x, b.reduce("max", x, [dim], True), dtype="float32")
    e = b.pw("exp", shifted)
    total = b.reduce("sum", e, [dim], True)
    if node.packet == "aten._softmax":
        return b.pw("div", e, total, dtype=_out(node))
    return b.pw("sub", shifted, b.pw("log", total), dtype=_out(node))


@rule("logsumexp")
def _logsumexp(b: Builder, node: Any, x: Expr, dims: Any, keepdim: bool = False) -> Expr:
    if b.count(x, _dims(dims)) == 1:
        return b.reduce("sum", x, _dims(dims), keepdim)
    top = b.reduce("max", x, _dims(dims), True)
    finite = b.pw("where", b.pw("isinf", top, dtype="bool"), 0.0, top)
    total = b.reduce("sum", b.pw("exp", b.pw("sub", x, finite)), _dims(dims), keepdim)
    low = (
        finite
        if keepdim
        else b.redim(
            finite,
            [
                d
                for i, d in enumerate(finite.dims)
                if i not in {k % len(x.dims) for k in _dims(dims) or range(len(x.dims))}
            ],
        )
    )
    return b.pw("add", b.pw("log", total), low, dtype=_out(node))


def _affine(b: Builder, x: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    if weight is not None:
        x = b.pw("mul", x, weight)
    return b.pw("add", x, bias) if bias is not None else x


def _normalize(b: Builder, x: Expr, dims: Sequence[int], eps: float) -> tuple[Expr, Expr, Expr, Expr, int]:
    """(x - mean) / sqrt(var + eps), mean, 1 / sqrt(var + eps), biased variance, count; statistics keep their dims."""
    mean, m2, n = b.moments(x, dims, True)
    var = b.pw("mul", m2, 1.0 / n)
    rstd = b.pw("rsqrt", b.pw("add", var, float(eps)))
    return b.pw("mul", b.pw("sub", x, mean, dtype="float32"), rstd), mean, rstd, var, n


@rule("native_layer_norm")
def _layer_norm(
    b: Builder, node: Any, x: Expr, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Expr, ...]:
    dims = list(range(len(x.dims) - len(shape), len(x.dims)))
    y, mean, rstd, _, _ = _normalize(b, x, dims, eps)
    return b.cast(_affine(b, y, weight, bias), _out(node)), mean, rstd


@rule("native_group_norm")
def _group_norm(
    b: Builder, node: Any, x: Expr, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Expr, ...]:
    grouped = b.reshape(x, (n, groups, c // groups, hw))
    y, mean, rstd, _, _ = _normalize(b, grouped, [2, 3], eps)
    params = [None if p is None else b.reshape(p, (1, groups, c // groups, 1)) for p in (weight, bias)]
    out = b.reshape(_affine(b, y, *params), node.metas[0].shape)
    flat = [b.redim(s, s.dims[:2]) for s in (mean, rstd)]
    return b.cast(out, _out(node)), flat[0], flat[1]


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
        y = b.pw("mul", b.pw("sub", x, column(running_mean), dtype="float32"), rstd)
        return b.cast(_affine(b, y, column(weight), column(bias)), _out(node)), None, None, running_mean, running_var
    y, mean, rstd, var, n = _normalize(b, x, [0, *range(2, rank)], eps)
    out = b.cast(_affine(b, y, column(weight), column(bias)), _out(node))
    flat_mean, flat_rstd, flat_var = (b.redim(s, [s.dims[1]]) for s in (mean, rstd, var))
    if running_mean is None or running_var is None:
        return out, flat_mean, flat_rstd
    keep, gain = 1.0 - float(momentum), float(momentum)
    new_mean = b.pw("add", b.pw("mul", running_mean, keep), b.pw("mul", flat_mean, gain))
    unbiased = b.pw("mul", flat_var, n / max(n - 1, 1))
    new_var = b.pw("add", b.pw("mul", running_var, keep), b.pw("mul", unbiased, gain))
    return out, flat_mean, flat_rstd, new_mean, new_var


@rule("gather")
def _gather(b: Builder, node: Any, x: Expr, dim: int, index: Expr, sparse_grad: bool = False) -> Expr:
    """Out = sum over j of (j == index) * x[j]; only for one index a row (as cross-entropy needs)."""
    at = dim % len(x.dims)
    if index.dims[at]:
        raise Unsupported("gather of several elements a row")
    position = b.redim(b.index(x.dims[at]), [x.dims[at] if i == at else () for i in range(len(x.dims))])
    hit = b.pw("eq", position, index, dtype="bool")
    picked = b.pw("where", hit, x, 0.0 if is_float(x.dtype) else 0, dtype=x.dtype)
    return b.reduce("sum", picked, [at], True)


# -- matrix products


@rule("mm", "bmm", "matmul")
def _mm(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    return b.dot(x, y, _out(node))


@rule("linear")
def _linear(b: Builder, node: Any, x: Expr, w: Expr, bias: Any = None) -> Expr:
    shape = node.metas[0].shape
    flat = x if len(x.dims) == 2 else b.redim(x, [tuple(a for d in x.dims[:-1] for a in d), x.dims[-1]])
    y = b.dot(flat, b.redim(w, w.dims[::-1]), _out(node))
    y = y if bias is None else b.pw("add", y, bias, dtype=_out(node))
    return y if len(x.dims) == 2 else b.reshape(y, shape)


@rule("addmm", "baddbmm")
def _addmm(b: Builder, node: Any, c: Expr, x: Expr, y: Expr, beta: Any = 1, alpha: Any = 1) -> Expr:
    product = b.dot(x, y, _out(node))
    product = product if alpha == 1 else b.pw("mul", product, float(alpha))
    return b.pw("add", product, c if beta == 1 else b.pw("mul", c, float(beta)), dtype=_out(node))


@rule("mv")
def _mv(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    return b.reduce("sum", b.pw("mul", x, y), [1])


@rule("dot")
def _dot(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    return b.reduce("sum", b.pw("mul", x, y), None)
