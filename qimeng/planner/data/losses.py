"""Losses: two or more inputs of one shape, a distance between them, a mean.

Deals in predictions and targets. Knows nothing about matrix products.
"""

from __future__ import annotations

from qimeng.planner.data.draft import Draft, Tensor
from qimeng.planner.data.pointwise import number, some
from qimeng.planner.data.rows import table

DISTANCES = (
    "torch.square({x} - {y})",
    "torch.abs({x} - {y})",
    "F.smooth_l1_loss({x}, {y}, reduction='none', beta={c})",
    "F.huber_loss({x}, {y}, reduction='none', delta={c})",
    "F.softplus(-{x} * {y})",
    "F.relu({c} - {x} * {y})",
    "torch.log(torch.cosh(torch.clamp({x} - {y}, -8, 8)))",
    "torch.sqrt(torch.square({x} - {y}) + {c})",
    "torch.sigmoid({y}) * (F.logsigmoid({y}) - F.logsigmoid({x}))",
    "F.relu({x}) - {x} * torch.sigmoid({y}) + torch.log1p(torch.exp(-torch.abs({x})))",
    "torch.exp(torch.clamp({x}, max=4.0)) - {y} * {x}",
    "torch.where(torch.abs({x} - {y}) < {c}, torch.square({x} - {y}), torch.abs({x} - {y}))",
)
"""Of a prediction and a target, element by element."""

ROWS = (
    "F.cosine_similarity({x}, {y}, dim=-1)",
    "torch.linalg.vector_norm({x} - {y}, dim=-1)",
    "torch.sum(torch.softmax({y}, dim=-1) * (torch.log_softmax({y}, dim=-1) - torch.log_softmax({x}, dim=-1)), dim=-1)",
    "-torch.sum(torch.softmax({y}, dim=-1) * torch.log_softmax({x}, dim=-1), dim=-1)",
    "1 - 2 * torch.sum(torch.sigmoid({x}) * torch.sigmoid({y}), dim=-1) / "
    "(torch.sum(torch.sigmoid({x}), dim=-1) + torch.sum(torch.sigmoid({y}), dim=-1))",
    "torch.logsumexp({x}, dim=-1) - torch.mean({x} * {y}, dim=-1)",
)
"""Of a prediction and a target, row by row."""


def loss(draft: Draft) -> tuple[Tensor, ...]:
    """Family: losses by element or by row, weighted or not, with a mean, a row's mean, or none."""
    rng = draft.rng
    shape = table(draft)
    x, y = draft.input(shape), draft.input(shape)
    prediction, target = some(draft, x, 2), some(draft, y, 2)
    if rng.random() < 0.4:
        value = draft.let(rng.choice(ROWS).format(x=prediction, y=target), shape[:-1])
    else:
        value = draft.let(rng.choice(DISTANCES).format(x=prediction, y=target, c=number(draft)), shape)
    if rng.random() < 0.4:
        weight = draft.input((*value.shape[:-1], "1") if len(value.shape) > 1 else value.shape, "torch.rand({shape})")
        value = draft.let(f"{value} * {weight}", value.shape)
    way = rng.choice(("mean", "mean", "sum", "rows", "none"))
    if way == "mean":
        return (draft.let(f"torch.mean({value})", ()),)
    if way == "sum":
        return (draft.let(f"torch.sum({value}) * 0.001", ()),)
    if way == "rows" and len(value.shape) == len(shape):
        return (draft.let(f"torch.mean({value}, dim=-1)", shape[:-1]),)
    return (some(draft, draft.let(f"{value} * {number(draft)}", value.shape), 2),)


__all__ = ["loss"]
