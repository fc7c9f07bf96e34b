"""Reductions, normalizations and what resembles a softmax, with pointwise chains around them.

Deals in values with a kept and a reduced axis. Knows nothing about matrix products.
"""

from __future__ import annotations

from qimeng.planner.data.draft import Draft, Shape, Tensor
from qimeng.planner.data.pointwise import binary, some, unary

WIDTHS = (
    64, 100, 128, 197, 256, 333, 512, 768, 1000, 1024, 1536, 2048, 2999, 3072, 4096, 5120, 8192, 12288, 16384, 32000,
    50257, 131072,
)  # fmt: skip
LENGTHS = (16, 49, 64, 100, 196, 256, 400, 784, 1024, 1025, 4096)
CHANNELS = (4, 8, 12, 16, 24, 32)

REDUCTIONS = (
    "torch.sum({x}, dim={d}{k})", "torch.mean({x}, dim={d}{k})", "torch.amax({x}, dim={d}{k})",
    "torch.amin({x}, dim={d}{k})", "torch.var({x}, dim={d}, unbiased=False{k})", "torch.logsumexp({x}, dim={d}{k})",
    "torch.linalg.vector_norm({x}, dim={d}{k})", "torch.std({x}, dim={d}{k})", "torch.mean({x} * {x}, dim={d}{k})",
    "torch.mean(torch.abs({x}), dim={d}{k})", "torch.sum({x} * {x}, dim={d}{k})",
)  # fmt: skip


def table(draft: Draft) -> Shape:
    """Rows of a width, sometimes in two axes."""
    width = draft.size("WIDTH", WIDTHS)
    if draft.rng.random() < 0.3:
        return draft.size("BATCH"), draft.size("LENGTH", LENGTHS), width
    return draft.size("ROWS"), width


def reduced(draft: Draft, x: Tensor, axis: int, keep: bool) -> Tensor:
    """`x` reduced along `axis`, which counts from the back."""
    text = draft.rng.choice(REDUCTIONS).format(x=x, d=axis, k=", keepdim=True" if keep else "")
    position = len(x.shape) + axis
    shape = (*x.shape[:position], *(("1",) if keep else ()), *x.shape[position + 1 :])
    return draft.let(text, shape)


def reduction(draft: Draft) -> tuple[Tensor, ...]:
    """Family: reductions of the last axis, of a middle one, of the first, or of all; chains before and after."""
    rng = draft.rng
    x = draft.input(table(draft))
    y = some(draft, x)
    way = rng.choice(("row", "row", "column", "two", "all", "spread"))
    if way == "all":
        y = y if y != x else unary(draft, x)
        return (draft.let(rng.choice(("torch.mean({y})", "torch.amax({y})", "torch.sum({y}) * 0.01")).format(y=y), ()),)
    if way == "spread":
        return (some(draft, binary(draft, y, reduced(draft, y, rng.choice((-1, -2)), keep=True))),)
    first = reduced(draft, y, -2 if way == "column" else -1, keep=False)
    if way == "two":
        second = reduced(draft, y, -1, keep=False)
        return (some(draft, binary(draft, first, second)),)
    return (unary(draft, first) if rng.random() < 0.6 or y == x else first,)


def normalized(draft: Draft, x: Tensor) -> Tensor:
    """`x` normalized along its last axis in one of the usual ways."""
    width = x.shape[-1]
    way = draft.rng.choice(("layer", "plain", "rms", "l2", "minmax", "standard", "max"))
    if way == "layer":
        return draft.let(f"{draft.module(f'nn.LayerNorm({width})', (width,), (width,))}({x})", x.shape)
    if way == "plain":
        return draft.let(f"F.layer_norm({x}, ({width},))", x.shape)
    if way == "rms":
        scale = draft.let(f"torch.rsqrt(torch.mean({x} * {x}, dim=-1, keepdim=True) + 1e-5)", (*x.shape[:-1], "1"))
        return draft.let(f"{x} * {scale} * {draft.parameter((width,))}", x.shape)
    if way == "l2":
        return draft.let(f"F.normalize({x}, dim=-1)", x.shape)
    if way == "max":
        return draft.let(f"{x} / (torch.amax(torch.abs({x}), dim=-1, keepdim=True) + 1e-5)", x.shape)
    column = (*x.shape[:-1], "1")
    if way == "minmax":
        low = draft.let(f"torch.amin({x}, dim=-1, keepdim=True)", column)
        high = draft.let(f"torch.amax({x}, dim=-1, keepdim=True)", column)
        return draft.let(f"({x} - {low}) / ({high} - {low} + 1e-5)", x.shape)
    centred = draft.let(f"{x} - torch.mean({x}, dim=-1, keepdim=True)", x.shape)
    spread = draft.let(f"torch.std({x}, dim=-1, keepdim=True)", column)
    return draft.let(f"{centred} / ({spread} + 1e-5)", x.shape)


def normalization(draft: Draft) -> tuple[Tensor, ...]:
    """Family: normalizations of rows, groups, channels or instances, with chains and residuals around them."""
    rng = draft.rng
    way = rng.choice(("row", "row", "row", "group", "batch", "instance"))
    if way == "row":
        x = draft.input(table(draft))
        before = some(draft, x)
        after = normalized(draft, before)
        return (some(draft, after, 4) if before != x else binary(draft, after, x),)
    batch, length = draft.size("BATCH"), draft.size("LENGTH", LENGTHS)
    groups = draft.size("GROUPS", (2, 4, 8, 16, 32))
    channels = f"{groups} * {draft.size('CHANNELS', CHANNELS)}"
    x = draft.input((batch, channels, length))
    y = some(draft, x)
    if way == "group":
        layer = draft.module(f"nn.GroupNorm({groups}, {channels})", (channels,), (channels,))
        y = draft.let(f"{layer}({y})", x.shape)
    elif way == "batch":
        layer = draft.module(f"nn.BatchNorm1d({channels})", *(((channels,),) * 4))
        y = draft.let(f"{layer}({y})", x.shape)
    else:
        mean = draft.let(f"torch.mean({y}, dim=-1, keepdim=True)", (batch, channels, "1"))
        variance = draft.let(f"torch.var({y}, dim=-1, unbiased=False, keepdim=True)", (batch, channels, "1"))
        y = draft.let(f"({y} - {mean}) * torch.rsqrt({variance} + 1e-5)", x.shape)
    return (unary(draft, some(draft, y)),)


def softmaxed(draft: Draft, x: Tensor) -> Tensor:
    """A distribution over the last axis of `x`, or its logarithm."""
    column = (*x.shape[:-1], "1")
    way = draft.rng.choice(("softmax", "log", "temperature", "masked", "by hand", "sigmoid", "quiet", "squared"))
    if way == "softmax":
        return draft.let(f"torch.softmax({x}, dim=-1)", x.shape)
    if way == "log":
        return draft.let(f"torch.log_softmax({x}, dim=-1)", x.shape)
    if way == "temperature":
        return draft.let(f"torch.softmax({x} / {draft.rng.choice(('0.5', '0.7', '2.0', '8.0'))}, dim=-1)", x.shape)
    if way == "masked" and len(draft.inputs) < 3:
        mask = draft.input(x.shape, "(torch.rand({shape}) > 0.3)")
        return draft.let(f"torch.softmax({x}.masked_fill({mask}, -1e4), dim=-1)", x.shape)
    if way == "sigmoid":
        gate = draft.let(f"torch.sigmoid({x})", x.shape)
        return draft.let(f"{gate} / (torch.sum({gate}, dim=-1, keepdim=True) + 1e-5)", x.shape)
    if way == "squared":
        gate = draft.let(f"torch.square(F.relu({x}))", x.shape)
        return draft.let(f"{gate} / (torch.mean({gate}, dim=-1, keepdim=True) + 1e-3)", x.shape)
    shifted = draft.let(f"torch.exp({x} - torch.amax({x}, dim=-1, keepdim=True))", x.shape)
    total = draft.let(f"torch.sum({shifted}, dim=-1, keepdim=True)", column)
    return draft.let(f"{shifted} / ({total} + 1)" if way == "quiet" else f"{shifted} / {total}", x.shape)


def softmax(draft: Draft) -> tuple[Tensor, ...]:
    """Family: softmax-like functions with chains around them, entropies, and weighted sums."""
    x = draft.input(table(draft))
    before = some(draft, x)
    y = softmaxed(draft, before)
    way = draft.rng.choice(("chain", "chain", "entropy", "weighted", "top"))
    if way == "entropy":
        return (draft.let(f"-torch.sum({y} * torch.log_softmax({before}, dim=-1), dim=-1)", x.shape[:-1]),)
    if way == "weighted":
        return (draft.let(f"torch.sum({y} * {binary(draft, x, before)}, dim=-1)", x.shape[:-1]),)
    if way == "top":
        return (draft.let(f"torch.amax({y}, dim=-1) - torch.mean({y}, dim=-1)", x.shape[:-1]),)
    return (some(draft, binary(draft, y, x)),)


__all__ = ["normalization", "normalized", "reduced", "reduction", "softmax", "softmaxed", "table"]
