"""Chains of pointwise operators.

Deals in expressions whose values stay finite for any real operand of moderate size. Knows nothing about reductions.
"""

from __future__ import annotations

from qimeng.planner.data.draft import Draft, Shape, Tensor

UNARY = (
    "F.relu({x})", "F.gelu({x})", "F.gelu({x}, approximate='tanh')", "F.silu({x})", "torch.sigmoid({x})",
    "torch.tanh({x})", "F.softplus({x})", "F.hardswish({x})", "F.hardtanh({x}, -{c}, {c})", "F.elu({x})",
    "F.leaky_relu({x}, {c} * 0.1)", "torch.abs({x})", "torch.clamp({x}, -{c}, {c})", "torch.sin({x})",
    "torch.cos({x})", "torch.erf({x})", "torch.exp(-torch.abs({x}))", "torch.log1p(torch.abs({x}))",
    "torch.sqrt(torch.abs({x}) + {c})", "torch.rsqrt({x} * {x} + {c})", "{x} * {c}", "{x} + {c}", "{c} - {x}",
    "{x} / (1 + torch.abs({x}))", "{x} * torch.sigmoid({c} * {x})", "torch.where({x} > 0, {x}, {c} * {x})",
    "torch.reciprocal({x} * {x} + 1)", "torch.atan({x})", "F.selu({x})", "F.mish({x})", "F.logsigmoid({x})",
    "torch.square({x}) * 0.1", "torch.clamp({x}, min={c})", "F.hardsigmoid({x})", "F.relu6({x})",
)  # fmt: skip
"""Of one operand; `c` is a number drawn for it."""

BINARY = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "torch.maximum({x}, {y})", "torch.minimum({x}, {y})",
    "{x} / (torch.abs({y}) + {c})", "torch.where({y} > 0, {x}, {y})", "{x} + {c} * {y}", "torch.lerp({x}, {y}, 0.25)",
    "{x} * torch.sigmoid({y})", "F.silu({x}) * {y}", "F.gelu({x}) * {y}", "torch.tanh({x} + {y})",
    "torch.addcmul({y}, {x}, {y}, value={c})", "({x} - {y}) * ({x} - {y})", "torch.abs({x} - {y})",
)  # fmt: skip
"""Of two operands."""

NUMBERS = ("0.1", "0.25", "0.5", "0.75", "1.5", "2.0", "1.702")


def number(draft: Draft) -> str:
    """A constant."""
    return draft.rng.choice(NUMBERS)


def unary(draft: Draft, x: Tensor) -> Tensor:
    """One operator on `x`."""
    return draft.let(draft.rng.choice(UNARY).format(x=x, c=number(draft)), x.shape)


def binary(draft: Draft, x: Tensor, y: Tensor) -> Tensor:
    """One operator on `x` and `y`, which is as large or broadcasts to it."""
    return draft.let(draft.rng.choice(BINARY).format(x=x, y=y, c=number(draft)), x.shape)


def partner(draft: Draft, x: Tensor) -> Tensor:
    """Something to combine `x` with: an earlier value, a new input, or a vector of parameters along one axis."""
    rng = draft.rng
    earlier = [t for t in (*draft.inputs, *draft.values) if t.shape == x.shape and t != x]
    way = rng.choice(("earlier", "input", "vector", "column"))
    if way == "earlier" and earlier:
        return rng.choice(earlier)
    if way == "input" and len(draft.inputs) < 3:
        return draft.input(x.shape)
    if way == "column" and len(x.shape) > 1 and len(draft.inputs) < 3:
        return draft.input((*x.shape[:-1], "1"))
    if len(x.shape) == 1 or not _fixed(draft, x.shape[-1]):
        return rng.choice(earlier) if earlier else draft.input(x.shape)
    return draft.parameter((x.shape[-1],))


def chain(draft: Draft, x: Tensor, length: int) -> Tensor:
    """`length` operators, the first on `x`; about a third combine two tensors."""
    for _ in range(length):
        x = binary(draft, x, partner(draft, x)) if draft.rng.random() < 0.35 else unary(draft, x)
    return x


def some(draft: Draft, x: Tensor, most: int = 3) -> Tensor:
    """A chain of 0 to `most` operators on `x`."""
    return chain(draft, x, draft.rng.randint(0, most))


def any_shape(draft: Draft) -> Shape:
    """A shape of one to four axes, the first chosen last."""
    rank = draft.rng.choice((1, 2, 2, 2, 3, 3, 4))
    axes = (
        ("WIDTH", (64, 100, 128, 197, 256, 333, 512, 768, 1000, 1024, 2048, 4096, 4099, 8192, 16384)),
        ("LENGTH", (7, 16, 49, 64, 100, 128, 196, 256, 512, 1023)),
        ("CHANNELS", (3, 8, 16, 32, 48, 64, 96, 128)),
    )
    return (draft.size("ROWS"), *(draft.size(*axis) for axis in reversed(axes[: rank - 1])))


def pointwise(draft: Draft) -> tuple[Tensor, ...]:
    """Family: chains of two to nine pointwise operators; sometimes two results."""
    x = draft.input(any_shape(draft))
    result = chain(draft, x, draft.rng.randint(2, 9))
    if draft.rng.random() < 0.2:
        return result, unary(draft, result)
    return (result,)


def _fixed(draft: Draft, size: str) -> bool:
    return bool(draft.pools.get(size))


__all__ = ["any_shape", "binary", "chain", "number", "partner", "pointwise", "some", "unary"]
