"""Calls of every ATen operator that the templates claim, and of compositions in which a value decides.

Deals in PyTorch calls by operator. Knows nothing about kernels, and nothing about the values that are put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.trust.attention_cases import attention_cases
from experiments.trust.case import HEAVY, Case
from experiments.trust.scan_cases import scan_cases
from experiments.trust.shape_cases import shape_cases
from experiments.trust.special_values import COLUMNS


def cases() -> list[Case]:
    """All of them."""
    groups = (_unary, _activations, _binary, _powers, _constants, _casts, _reductions, _statistics, _views, _products,
              _compositions, shape_cases, attention_cases, scan_cases)  # fmt: skip
    return [case for group in groups for case in group()]


UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh erf erfc exp exp2 expm1 floor frac isinf isnan log "
    "log10 log2 logical_not neg reciprocal round rsqrt sign sin sinh sqrt square tan tanh trunc"
).split()
ACTIVATIONS = "celu elu hardsigmoid hardtanh leaky_relu relu relu6 selu silu softplus".split()
BINARY = "add sub mul div maximum minimum atan2 hypot eq ne lt le gt ge".split()
LOGICAL = [f"{kind}_{op}" for kind in ("logical", "bitwise") for op in ("and", "or", "xor")]
COPIES = "alias clone detach lift_fresh_copy".split()


def _aten(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.aten, name).default  # type: ignore[no-any-return]


def _with(f: Callable[..., Any], *more: Any, **options: Any) -> Callable[..., Any]:
    return lambda *tensors: f(*tensors, *more, **options)


def _with_tensor(f: Callable[..., Any], number: Any, dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: f(x, torch.tensor(number, dtype=dtype, device=x.device))


def _doubled(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(x) * 2


def _plus(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(x) + x


def _as(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: x.to(dtype).clone()


def _unary() -> Iterator[Case]:
    for name in UNARY:
        yield Case(name, "", getattr(torch, name))
    yield Case("log1p", "", torch.log1p, scale=torch.zeros_like)  # PyTorch's for the CPU has no subnormal results
    grown = lambda x: x.sigmoid() * (1 + x.abs().nan_to_num(posinf=0.0) / 32)  # noqa: E731 - x log2(e) rounds
    yield Case("sigmoid", "", torch.sigmoid, scale=grown)
    for name in ("lgamma", "digamma"):
        f = getattr(torch, name)
        yield Case(name, "", f, ulps=HEAVY, scale=_with_zeros(f))
        yield Case(name, "of a row", lambda r, f=f: f(r * 4), "r", HEAVY, lambda r, f=f: _with_zeros(f)(r * 4))
    for name in COPIES:
        yield Case(name, "", _doubled(_aten(name)))
    yield Case("copy", "", lambda x, y: torch.ops.aten.copy.default(x, y) * 1, "xy")


def _with_zeros(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The size of a function and, of negative numbers, also how fast it changes between its zeros and poles."""

    def size(x: Tensor) -> Tensor:
        found, near = f(x).abs(), torch.where(x < 0, 8 + x.abs(), 1.0)
        return found + near * (1 + (x - x.round()).abs().reciprocal().clamp(max=1e6) ** 2) * (x < 3)

    return size


def _activations() -> Iterator[Case]:
    for name in ACTIVATIONS:
        yield Case(name, "", getattr(functional, name))
    yield Case("mish", "", functional.mish, scale=lambda x: x.abs() * 2.0**-110)  # e^x becomes subnormal before
    yield Case("hardswish", "", lambda x: functional.hardswish(x * 0.125))  # PyTorch's overflows before
    yield Case("gelu", "tanh", lambda x: functional.gelu(x, approximate="tanh"), ulps=HEAVY, scale=torch.abs)
    yield Case("gelu", "erf", functional.gelu, scale=torch.abs)
    yield Case("log_sigmoid_forward", "", functional.logsigmoid)
    yield Case("_prelu_kernel", "", lambda x, y: torch.ops.aten._prelu_kernel(x, y), "xy")
    for slope in (0.0, -0.5, float("inf")):
        yield Case("leaky_relu", f"slope {slope}", lambda x, s=slope: functional.leaky_relu(x, s))
    for alpha in (0.0, 2.0):
        yield Case("elu", f"alpha {alpha}", lambda x, a=alpha: functional.elu(x, a))
    for alpha in (0.5, 2.0):
        yield Case("celu", f"alpha {alpha}", lambda x, a=alpha: functional.celu(x, a))
    for beta, threshold in ((2.0, 5.0), (-1.0, 20.0), (0.5, 1.0)):
        yield Case("softplus", f"{beta}, {threshold}", lambda x, b=beta, t=threshold: functional.softplus(x, b, t))
    for low, high in ((-1, 1), (2, -2), (0, 0), (0, 6), (-1.5, None), (None, 2.5), (float("-inf"), float("inf"))):
        yield Case("clamp", f"{low} to {high}", lambda x, lo=low, hi=high: torch.clamp(x, lo, hi))
    yield Case("clamp", "tensors", torch.clamp, "xyz")
    yield Case("clamp_min", "", lambda x: torch.clamp_min(x, 0))
    yield Case("clamp_max", "", lambda x: torch.clamp_max(x, 0))
    yield Case("hardtanh", "0 to 6", lambda x: functional.hardtanh(x, 0, 6))


def _binary() -> Iterator[Case]:
    for name in (*BINARY, *LOGICAL):
        yield Case(name, "", getattr(torch, name), "xd" if name == "div" else "xy")
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for number in (0, -1, 0.5, 300):
            yield Case(name, f"with {number}", _with(getattr(torch, name), number))
        for number, dtype in ((2**32 + 1, torch.int64), (0.1, torch.float64), (True, torch.bool)):
            yield Case(
                name, f"with a tensor of no dimensions, {number}", _with_tensor(getattr(torch, name), number, dtype)
            )
    for name in ("add", "sub", "mul", "rsub"):
        for number in (0, -0.0, 2, -3, 0.1, 300, float("inf")):
            yield Case(name, f"with {number}", _with(getattr(torch, name), number))
    for number in (2, -3, 7, 0.1, 3e38, 1e-40, float("inf")):
        yield Case("div", f"by {number}", lambda x, n=number: torch.div(x, n))
    for name in ("add", "sub", "rsub"):
        yield Case(name, "alpha", _with(getattr(torch, name), alpha=3), "sy", HEAVY, _sizes)
    for mode in ("trunc", "floor"):
        yield Case("div", mode, lambda x, y, m=mode: torch.div(x, y, rounding_mode=m), "xd")
        for number in (2, -3, 7, 0.1):
            yield Case("div", f"{mode} by {number}", lambda x, m=mode, n=number: torch.div(x, n, rounding_mode=m))
    for name in ("fmod", "remainder"):
        yield Case(name, "", getattr(torch, name), "xd")
        for number in (2, -3, 7, 0.75):
            yield Case(name, f"by {number}", _with(getattr(torch, name), number))
    for name in ("addcmul", "addcdiv"):
        f = getattr(torch, name)
        yield Case(name, "", f, "xyz", HEAVY, _of_three)
        yield Case(name, "value", lambda x, y, z, f=f: f(x, y, z, value=-2), "xyz", HEAVY, _of_three)
    yield Case("where", "", torch.where, "mxy")
    yield Case("where", "number", lambda m, x: torch.where(m, x, -1.5), "mx")
    yield Case("where", "NaN condition", lambda x, y: torch.where(x != 0, x, y), "xy")
    yield Case("masked_fill", "", lambda x, m: torch.masked_fill(x, m, float("-inf")), "xm")
    yield Case("masked_fill", "-0", lambda x, m: torch.masked_fill(x, m, -0.0), "xm")
    yield Case("masked_fill", "200", lambda x, m: torch.masked_fill(x, m, 100), "xm")
    for number in (0, 1, 3, 7):
        yield Case("__lshift__", str(number), lambda x, n=number: torch.ops.aten.__lshift__.Scalar(x, n))
        yield Case("__rshift__", str(number), lambda x, n=number: torch.ops.aten.__rshift__.Scalar(x, n))
        yield Case("bitwise_left_shift", str(number), lambda x, n=number: torch.bitwise_left_shift(x, n))
        yield Case("bitwise_right_shift", str(number), lambda x, n=number: torch.bitwise_right_shift(x, n))


def _sizes(x: Tensor, y: Tensor) -> Tensor:
    return x.abs() + 3 * y.abs()


def _of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x.abs() + 2 * torch.maximum((y * z).abs(), torch.where(z == 0, 0.0, (y / z).abs()))


def _powers() -> Iterator[Case]:
    for y in (
        -3,
        -2,
        -1.5,
        -1,
        -0.5,
        -0.3,
        0,
        0.0,
        0.25,
        1 / 3,
        0.5,
        1,
        1.5,
        2,
        2.5,
        3,
        7,
        16,
        float("inf"),
        float("nan"),
    ):
        yield Case("pow", f"to {y!r}", lambda x, y=y: torch.pow(x, y), "x", HEAVY, _with(_grown, y))
    for base in (2.0, 0.5, 10.0, 1.0, 0.0, -2.0, 3):
        yield Case(
            "pow",
            f"of {base}",
            lambda x, b=base: torch.pow(b, x),
            "x",
            HEAVY,
            lambda x, b=base: _grown(torch.tensor(b), x),
        )
    for y in (70, -101, 0.1):
        yield Case("pow", f"to {y} of a row", lambda r, y=y: torch.pow(r, y), "r", HEAVY, _with(_grown, y))
    yield Case("pow", "tensors", torch.pow, "xy", HEAVY, _grown)
    yield Case("pow", "of a row's", lambda r: torch.pow(r, r[:, 1:2]), "r", HEAVY, lambda r: _grown(r, r[:, 1:2]))


def _grown(x: Tensor, y: Any) -> Tensor:
    """A power times its exponent of 2: as 2^(y log2 x), an error of the exponent counts as often."""
    found = torch.pow(x, y).abs()
    return found * (1 + found.log2().abs().nan_to_num(0.0, 0.0, 0.0) / 8)


CONSTANTS = (300, 200, -1, 70000.0, 0.1, 3.7, -3.7, 1e-46, 2**40, -(2**31) - 1, 1e-7, -0.0, float("inf"), True, 0)


def _constants() -> Iterator[Case]:
    """Constants that are cast: they wrap and round as their dtype does."""
    for value in CONSTANTS:
        for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"):
            if _castable(value, name):
                yield Case("full_like", f"{value} to {name}", _constant_call(value, name))
    for name in ("ones_like", "zeros_like"):
        yield Case(name, "", _plus(getattr(torch, name)))
    yield Case("full", "", lambda x: torch.full(x.shape, 2.7, dtype=x.dtype, device=x.device) + x)
    yield Case("ones", "", lambda x: torch.ones(x.shape, dtype=x.dtype, device=x.device) + x)
    yield Case("zeros", "", lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device) + x)
    yield Case("fill", "", lambda x: torch.ops.aten.fill.Scalar(x, 3) * x)
    yield Case("arange", "", lambda s: torch.arange(s.shape[1], dtype=s.dtype, device=s.device) + s, "s")
    yield Case("arange", "steps", lambda s: torch.arange(3, 3 + 2 * s.shape[1], 2, device=s.device) + s, "s")
    yield Case("full_like", "computed with", lambda x: (torch.full_like(x, 2) * 3 + 1) / 7 + x)
    yield Case("full_like", "special", lambda x: torch.log(torch.full_like(x, -0.0)) * x, ulps=HEAVY)


def _castable(value: Any, name: str) -> bool:
    """Whether C++ says what the cast gives; a floating number outside an integer's range it does not."""
    if not isinstance(value, float) or name == "bool" or "float" in name:
        return True
    facts = torch.iinfo(getattr(torch, name))
    return facts.min <= value <= facts.max


def _constant_call(value: Any, name: str) -> Callable[[Tensor], Tensor]:
    dtype = getattr(torch, name)

    def call(x: Tensor) -> Tensor:
        made = torch.full_like(x, value).to(dtype)
        return made + (x == 0).to(dtype) if dtype is not torch.bool else made ^ (x == 0)

    return call


def _casts() -> Iterator[Case]:
    for name in ("float32", "float16", "bfloat16", "float64", "bool"):
        yield Case("_to_copy", f"to {name}", _as(getattr(torch, name)), composed=True)
    for name in ("int64", "int32", "int16", "int8", "uint8"):
        yield Case("_to_copy", f"to {name}", _as(getattr(torch, name)), "s", composed=True)
    yield Case("_to_copy", "", lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.float32))


def _total(r: Tensor) -> Tensor:
    return r.abs().nan_to_num(posinf=0.0).sum(-1)


def _reductions() -> Iterator[Case]:
    yield Case("sum", "", lambda r: r.sum(-1), "r", HEAVY, _total)
    yield Case("sum", "columns", lambda r: r.sum(0), "r", HEAVY, lambda r: _total(r.T))
    yield Case("sum", "all", lambda r: r[17:20].sum(), "r", HEAVY, lambda r: _total(r[17:20].flatten()))
    yield Case("sum", "booleans", lambda r: (r > 0).sum(-1), "r")
    yield Case("mean", "", lambda r: r.mean(-1), "r", HEAVY, lambda r: _total(r) / COLUMNS)
    yield Case(
        "prod", "", lambda r: (r.sign() * 1.25).prod(-1) if r.is_floating_point() else r.prod(-1), "r", 2 * HEAVY
    )
    yield Case("prod", "rows", lambda r: r.prod(-1), "r", 2 * HEAVY)
    for name in ("amax", "amin"):
        for label, dim in (("", -1), ("columns", 0), ("all", (0, 1))):
            yield Case(name, label, _with(getattr(torch, name), dim), "r")
    for name in ("max", "min"):
        f = getattr(torch, name)
        yield Case(name, "", lambda r, f=f: f(r, -1), "r")
        yield Case(name, "columns", lambda r, f=f: f(r, 0, keepdim=True), "r")
        yield Case(name, "all", lambda r, f=f: f(r[17:20]), "r")
        yield Case(name, "of two", f, "xy")
    for name in ("argmax", "argmin"):
        for label, where in (("", (-1,)), ("columns", (0,)), ("all", ())):
            yield Case(name, label, _with(getattr(torch, name), *where), "r")
    for name in ("any", "all"):
        for label, dim in (("", -1), ("columns", 0)):
            yield Case(name, label, _with(getattr(torch, name), dim), "r")
        yield Case(name, "everything", getattr(torch, name), "r")
    for order in (0, 0.5, 1, 2, 3, float("inf"), float("-inf")):
        yield Case("linalg_vector_norm", f"{order}", lambda r, o=order: torch.linalg.vector_norm(r, o, -1), "r", HEAVY)


def _spread(r: Tensor) -> Tensor:
    """Largest deviation of a row, squared: what a variance may be wrong of."""
    return ((r - r.mean(-1, keepdim=True)) ** 2).mean(-1) + 1e-6 * r.abs().amax(-1) ** 2


def _statistics() -> Iterator[Case]:
    for correction in (COLUMNS, COLUMNS + 3):  # of rows that vary by more than the smallest numbers, or not at all
        yield Case("var", f"correction {correction}", lambda r, c=correction: torch.var(r[:7], -1, correction=c), "r")
    for correction in (0, 1):
        label = f"correction {correction}"
        yield Case("var", label, lambda r, c=correction: torch.var(r, -1, correction=c), "r", HEAVY, _spread)
        yield Case("std", label, lambda r, c=correction: torch.std(r, -1, correction=c), "r", HEAVY)
    yield Case("var", "one element", lambda r: torch.var(r[:, :1], -1), "r")
    yield Case(
        "var_mean", "", lambda r: torch.var_mean(r, -1, correction=1), "r", HEAVY, lambda r: r.abs().amax(-1) ** 2 + 1
    )
    yield Case("_softmax", "", lambda r: torch.softmax(r, -1), "r", HEAVY)
    yield Case("_softmax", "columns", lambda r: torch.softmax(r, 0), "r", HEAVY)
    yield Case(
        "_log_softmax", "", lambda r: torch.log_softmax(r, -1), "r", HEAVY, lambda r: r.abs() + r.abs().amax(-1, True)
    )
    yield Case("logsumexp", "", lambda r: torch.logsumexp(r, -1), "r", HEAVY, lambda r: r.abs().amax(-1) + 4)
    yield Case(
        "logsumexp", "columns", lambda r: torch.logsumexp(r, 0, keepdim=True), "r", HEAVY, lambda r: r.abs().amax(0) + 4
    )
    yield Case("logsumexp", "one element", lambda r: torch.logsumexp(r[:, :1], -1), "r")
    size = lambda r: 1 + r.abs().amax(-1, True) / (r.std(-1, keepdim=True) + 3e-3)  # noqa: E731
    yield Case("native_layer_norm", "", lambda r: functional.layer_norm(r, (COLUMNS,)), "r", HEAVY, size)
    groups = lambda r: functional.group_norm(r.reshape(-1, COLUMNS, 1), 1)  # noqa: E731
    yield Case("native_group_norm", "", groups, "r", HEAVY, lambda r: size(r)[:, :, None])
    large = lambda r: torch.full((1, 1, 1), 1e3, device=r.device)  # noqa: E731
    one = lambda r: r[17:20].T[:, :, None].contiguous()  # noqa: E731
    norm = lambda r, training: functional.batch_norm(one(r), *_stats(r), training=training)  # noqa: E731
    yield Case("_native_batch_norm_legit_functional", "", lambda r: norm(r, True), "r", HEAVY, large)
    yield Case("_native_batch_norm_legit_no_training", "", lambda r: norm(r, False), "r", HEAVY, large)
    bare = lambda r: functional.batch_norm(one(r), None, None, training=True)  # noqa: E731
    yield Case("_native_batch_norm_legit", "", bare, "r", HEAVY, large)
    yield Case("gather", "", lambda r: torch.gather(r, 1, (r[:, :1] > 0).long() * 3), "r")


def _stats(r: Tensor) -> tuple[Tensor, Tensor]:
    return r[17:20, 0] * 1, r[17:20, 1].abs() + 1


def _bounds(x: Tensor) -> Tensor:
    return torch.arange(5, device=x.device).to(x.dtype) * 2 + 1


def _views() -> Iterator[Case]:
    """Views between two operators, where a kernel follows them itself."""
    n = COLUMNS
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda r: (r + 1).view(-1, 1, n) * 2,
        "_unsafe_view": lambda r: torch.ops.aten._unsafe_view(r + 1, [-1]) * 2,
        "reshape": lambda r: torch.ops.aten.reshape(r + 1, [n, -1]) * 2,
        "permute": lambda r: (r + 1).permute(1, 0) * 2,
        "transpose": lambda r: (r + 1).transpose(0, 1) * 2,
        "t": lambda r: (r + 1).t() * 2,
        "unsqueeze": lambda r: (r + 1).unsqueeze(1) * 2,
        "squeeze": lambda r: (r + 1)[:, None].squeeze(1) * 2,
        "expand": lambda r: (r + 1)[None].expand(3, -1, -1) * 2,
        "repeat": lambda r: (r + 1).repeat(2, 1) * 2,
        "tril": lambda r: torch.tril(r, 1),
        "triu": lambda r: torch.triu(r, -2),
    }
    for name, call in calls.items():
        yield Case(name, "", call, "r")


def _products() -> Iterator[Case]:
    """Products; what those of whole matrices do with special values is the matter of their own tests."""
    size = lambda q, *_: q.abs().nan_to_num() @ q.abs().nan_to_num() + 1  # noqa: E731
    row = lambda q: size(q)[:, 0]  # noqa: E731
    yield Case("mm", "", lambda q: torch.mm(q, q), "q", HEAVY, size)
    yield Case("bmm", "", lambda q: torch.bmm(q[None], q[None]), "q", HEAVY, size)
    yield Case("matmul", "", lambda q: torch.ops.aten.matmul(q, q), "q", HEAVY, size)
    yield Case("linear", "", lambda q: functional.linear(q, q.T, q[0]), "q", HEAVY, lambda q: size(q) + q.abs())
    yield Case(
        "addmm", "", lambda q: torch.addmm(q, q, q, beta=2, alpha=3), "q", HEAVY, lambda q: 3 * size(q) + 2 * q.abs()
    )
    yield Case(
        "baddbmm", "", lambda q: torch.baddbmm(q[None], q[None], q[None]), "q", HEAVY, lambda q: size(q) + q.abs()
    )
    yield Case("mv", "", lambda q: torch.mv(q, q[:, 0].contiguous()), "q", HEAVY, row)
    yield Case("addmv", "", lambda q: torch.addmv(q[:, 0], q, q[:, 0]), "q", HEAVY, lambda q: row(q) + q[:, 0].abs())
    yield Case("addmv", "beta 0", lambda q: torch.addmv(q[:, 2], q, q[:, 0], beta=0), "q", HEAVY, row)
    yield Case("dot", "", lambda q: torch.dot(q[0], q[0]), "q", HEAVY)


def _compositions() -> Iterator[Case]:
    """Where a sign of zero, a rounding of a quotient or a NaN decides, and functions that PyTorch takes apart."""
    calls: dict[str, tuple[Callable[..., Any], str]] = {
        "atan2 of a negated": (lambda x, y: torch.atan2(y, -x), "xy"),
        "inverse of a negated relu": (lambda x: 1 / -torch.relu(x + 0.0), "x"),
        "negated by where": (lambda x, y: 1 / torch.where(x < 0, -y, y), "xy"),
        "inverse of a rounded": (lambda x: 1 / torch.round(x), "x"),
        "inverse of a trunc": (lambda x: 1 / torch.trunc(x), "x"),
        "inverse of a ceil": (lambda x: 1 / torch.ceil(x), "x"),
        "inverse of a root": (lambda x: 1 / torch.sqrt(x), "x"),
        "inverse of a tanh": (lambda x: 1 / torch.tanh(x), "x"),
        "floor of a quotient": (lambda x, y: torch.floor(x / y), "xy"),
        "ceil of an inverse": (lambda x: torch.ceil(1 / x), "x"),
        "floor of a quotient by a row's": (lambda s: torch.floor((s * 21) / (s[:, :1].abs() + 1) / 7), "s"),
        "trunc of a product with an inverse": (lambda s: torch.trunc(s * 49 * torch.reciprocal(s.abs() + 1)), "s"),
        "quotient compared": (lambda x, y: x / y >= 1, "xy"),
        "quotient cast": (lambda s: (s * 35 / 7).to(torch.int32), "s"),
        "index of a quotient": (lambda r: (r / r.abs().amax(-1, keepdim=True)).argmax(-1), "r"),
        "difference of a value and itself": (lambda x: x - x, "x"),
        "quotient of a value and itself": (lambda x: x / x, "x"),
        "product with zero": (lambda x: x * 0, "x"),
        "floor_divide": (torch.floor_divide, "xd"),
        "copysign": (torch.copysign, "xy"),
        "signbit": (torch.signbit, "x"),
        "nan_to_num": (torch.nan_to_num, "x"),
        "nan_to_num with numbers": (lambda x: torch.nan_to_num(x, 1.0, 2.0, -3.0), "x"),
        "logaddexp": (torch.logaddexp, "xy"),
        "xlogy": (torch.xlogy, "xy"),
        "lerp": (lambda x, y: torch.lerp(x, y, 0.25), "xy"),
        "fmax": (torch.fmax, "xy"),
        "fmin": (torch.fmin, "xy"),
        "heaviside": (torch.heaviside, "xy"),
        "threshold": (lambda x: functional.threshold(x if x.is_floating_point() else x.clamp(0, 100), 0.5, -7.0), "x"),
        "hardshrink": (functional.hardshrink, "x"),
        "softshrink": (functional.softshrink, "x"),
        "softsign": (functional.softsign, "x"),
        "sinc": (torch.sinc, "x"),
        "logit": (lambda x: torch.logit(x, 1e-3), "x"),
        "glu": (lambda r: functional.glu(r[:, :36], -1), "r"),
        "isfinite": (torch.isfinite, "x"),
        "isclose": (lambda x, y: torch.isclose(x, y, equal_nan=True), "xy"),
        "sgn": (torch.sgn, "x"),
        "deg2rad": (torch.deg2rad, "x"),
        "fractions scaled": (lambda x, s: torch.ldexp(x, s), "xs"),
        "buckets": (lambda x: torch.bucketize(x, _bounds(x)), "x"),
        "buckets from the right": (lambda x: torch.bucketize(x, _bounds(x), right=True, out_int32=True), "x"),
        "search": (lambda x: torch.searchsorted(_bounds(x), x, side="right"), "x"),
        "hinge": (lambda x, m: functional.hinge_embedding_loss(x, m.to(x.dtype) * 2 - 1, reduction="none"), "xm"),
        "round to decimals": (lambda x: torch.round(x, decimals=2), "x"),
        "round to hundreds": (lambda x: torch.round(x, decimals=-2), "x"),
        "amax of negated": (lambda r: 1 / (-r[:, :1]).amax(-1), "r"),
        "logsumexp of a column of -inf": (lambda r: torch.logsumexp(r - float("inf"), -1), "r"),
        "softmax with a mask": (lambda r: torch.softmax(r.masked_fill(r < 0, float("-inf")), -1), "r"),
        "normalize": (lambda r: functional.normalize(r, dim=-1), "r"),
        "divided by its sum": (lambda r: r / r.sum(-1, keepdim=True), "r"),
        "divided by its largest": (lambda r: r / r.abs().amax(-1, keepdim=True), "r"),
        "nansum": (torch.nansum, "r"),
        "aminmax": (lambda r: torch.aminmax(r, dim=-1), "r"),
        "count_nonzero": (lambda r: torch.count_nonzero(r, -1), "r"),
        "nan_to_num of a variance": (lambda r: torch.nan_to_num(r[:7].var(-1, correction=COLUMNS), -1.0, 7.0), "r"),
        "clamped power": (lambda x: torch.clamp(x * x - 1e-4, min=0.0) ** -1.5, "x"),
        "hypot of infinities": (lambda x: torch.hypot(x, -x), "x"),
    }
    scales: dict[str, Callable[..., Tensor]] = {
        "logaddexp": lambda x, y: x.abs() + y.abs() + 1,
        "lerp": lambda x, y: x.abs() + y.abs(),
        "divided by its sum": lambda r: (r / r.sum(-1, True)).abs() * (1 + _total(r)[:, None] / r.sum(-1, True).abs()),
        "nansum": lambda r: r.abs().nan_to_num(posinf=0.0).sum(),
        "clamped power": lambda x: ((x * x - 1e-4).clamp(min=0.0) ** -1.5) * (1 + 1e-4 / (x * x - 1e-4).abs()) * 8,
        "logit": lambda x: torch.logit(x, 1e-3).abs() + 1,
    }
    for name, (call, takes) in calls.items():
        yield Case(name, "", call, takes, HEAVY, scales.get(name), composed=True)


__all__ = ["Case", "cases"]
