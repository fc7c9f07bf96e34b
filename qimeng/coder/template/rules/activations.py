"""Activation functions and clamps as loop nests.

Deals in definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

import math
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.pointwise import binary


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(b: Builder, node: Any, x: Expr, low: Any = None, high: Any = None, min: Any = None, max: Any = None) -> Expr:
    low, high = min if low is None else low, max if high is None else high
    if node.packet == "aten.clamp_max":
        low, high = None, low
    if node.packet == "aten.hardtanh":
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    d = out_dtype(node)
    if low is not None:
        x = binary("maximum", b, low, x, d)
    return binary("minimum", b, high, x, d) if high is not None else x


@rule("relu")
def _relu(b: Builder, node: Any, x: Expr) -> Expr:
    d = out_dtype(node)
    return b.pw("relu", x, dtype=d) if is_float(d) else b.pw("imaximum", x, 0, dtype=d)


@rule("_prelu_kernel")
def _prelu(b: Builder, node: Any, x: Expr, slope: Expr) -> Expr:
    return b.pw("where", b.pw("gt", x, 0.0, dtype="bool"), x, b.pw("mul", x, slope), dtype=out_dtype(node))


@rule("relu6")
def _relu6(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("minimum", 6.0, b.pw("maximum", 0.0, x), dtype=out_dtype(node))


@rule("leaky_relu")
def _leaky_relu(b: Builder, node: Any, x: Expr, slope: float = 0.01) -> Expr:
    return b.pw("where", b.pw("gt", x, 0.0, dtype="bool"), x, b.pw("mul", x, float(slope)), dtype=out_dtype(node))


@rule("elu")
def _elu(b: Builder, node: Any, x: Expr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Expr:
    low = b.pw("mul", b.pw("expm1", b.pw("mul", x, float(input_scale))), float(alpha * scale))
    return b.pw("where", b.pw("gt", x, 0.0, dtype="bool"), b.pw("mul", x, float(scale)), low, dtype=out_dtype(node))


@rule("selu")
def _selu(b: Builder, node: Any, x: Expr) -> Expr:
    return _elu(b, node, x, 1.6732632423543772, 1.0507009873554805)


@rule("celu")
def _celu(b: Builder, node: Any, x: Expr, alpha: float = 1.0) -> Expr:
    return _elu(b, node, x, alpha, 1.0, 1.0 / alpha)


@rule("silu")
def _silu(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("mul", x, b.pw("sigmoid", x), dtype=out_dtype(node))


@rule("gelu")
def _gelu(b: Builder, node: Any, x: Expr, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        cube = b.pw("mul", b.pw("mul", x, x), x)
        inner = b.pw("mul", b.pw("add", x, b.pw("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
        # (1 + tanh u) / 2 = sigmoid(2 u), which does not cancel where tanh is near -1
        return b.pw("mul", x, b.pw("sigmoid", b.pw("mul", inner, 2.0)), dtype=out_dtype(node))
    gate = b.pw("add", b.pw("erf", b.pw("mul", x, math.sqrt(0.5))), 1.0)
    return b.pw("mul", b.pw("mul", x, 0.5), gate, dtype=out_dtype(node))


def _beyond(b: Builder, x: Expr) -> Expr:
    """log(1 + e^-|x|): how far log(1 + e^x) is above the larger of x and 0. The power is in [0, 1]."""
    return b.pw("log1p", b.pw("exp", b.pw("neg", b.pw("abs", x))))


@rule("softplus")
def _softplus(b: Builder, node: Any, x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    scaled = b.pw("mul", x, float(beta)) if beta != 1 else x
    soft = b.pw("add", b.pw("maximum", scaled, 0.0), _beyond(b, scaled))
    soft = b.pw("mul", soft, 1.0 / beta) if beta != 1 else soft
    return b.pw("where", b.pw("gt", scaled, float(threshold), dtype="bool"), x, soft, dtype=out_dtype(node))


@rule("mish")
def _mish(b: Builder, node: Any, x: Expr) -> Expr:
    """Mish as x n / (n + 2) with n = e^x (e^x + 2): no logarithm, nothing cancels.

    Above 20 the quotient is 1 to double precision, and e^x would overflow.
    """
    e = b.pw("exp", b.pw("minimum", x, 20.0))
    n = b.pw("mul", e, b.pw("add", e, 2.0))
    return b.pw("mul", x, b.pw("mul", n, b.pw("inverse", b.pw("add", n, 2.0))), dtype=out_dtype(node))


@rule("hardsigmoid", "hardswish")
def _hard(b: Builder, node: Any, x: Expr) -> Expr:
    gate = b.pw(
        "mul", b.pw("minimum", b.pw("maximum", b.pw("add", x, 3.0), 0.0), 6.0), 1.0 / 6.0, dtype=out_dtype(node)
    )
    return gate if node.packet == "aten.hardsigmoid" else b.pw("mul", x, gate, dtype=out_dtype(node))


@rule("log_sigmoid_forward")
def _log_sigmoid(b: Builder, node: Any, x: Expr) -> tuple[Expr, None]:
    low = b.pw("minimum", x, 0.0)
    return b.pw("sub", low, _beyond(b, x)), None
