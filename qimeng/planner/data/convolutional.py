"""Networks of convolutions: stages of residual, depthwise or dense blocks, and encoders with a decoder.

Deals in channels, sides and blocks. Knows nothing about how a convolution is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qimeng.planner.data.draft import Draft, Tensor
from qimeng.planner.data.products import linear

BATCHES, CHANNELS, SIDES = (16,), (32,), (7,)
"""Few sizes, so that networks share regions: what was found of one is known of the others."""

ACTIVATIONS = ("F.relu({x})", "F.relu({x})", "F.silu({x})")
OPERATORS = (40, 160)
"""Lines of `forward` before the head: drawn between the two; most are one operator, some are two or three."""


@dataclass(frozen=True)
class _Style:
    """What a network uses throughout.

    Attributes:
        base: name of the size that all channels are multiples of.
        activation: expression on `{x}`.
    """

    base: str
    activation: str


Block = Callable[[Draft, Tensor, int, _Style], Tensor]
"""Adds a block on a tensor of [batch, channels, height, width] whose channels are so many times the base."""


def convolution(
    draft: Draft, x: Tensor, channels: str, kernel: int = 1, stride: int = 1, alone: bool = False, bias: bool = False
) -> Tensor:
    """A convolution with padding that keeps the side, or halves it with a stride of 2.

    Args:
        draft: what it is added to.
        x: [batch, channels, height, width].
        channels: of the result.
        kernel: odd, its height and width.
        stride: 1 or 2.
        alone: each channel by itself (depthwise).
        bias: whether it adds one.
    """
    depth = "1" if alone else x.shape[1]
    shape = (x.shape[0], channels, *(_halved(s) if stride == 2 else s for s in x.shape[2:]))
    draft.products.append((*shape, depth, str(kernel * kernel)))
    options = "".join(
        (
            f", stride={stride}" if stride > 1 else "",
            f", padding={kernel // 2}" if kernel > 1 else "",
            f", groups={channels}" if alone else "",
            "" if bias else ", bias=False",
        )
    )
    weights = (channels, depth, str(kernel), str(kernel))
    layer = draft.module(
        f"nn.Conv2d({x.shape[1]}, {channels}, {kernel}{options})", weights, *([(channels,)] if bias else [])
    )
    return draft.let(f"{layer}({x})", shape)


def _normed(draft: Draft, x: Tensor, style: _Style, active: bool = True) -> Tensor:
    """`x` normalized, then the activation."""
    channels = x.shape[1]
    x = draft.let(f"{draft.module(f'nn.BatchNorm2d({channels})', *(((channels,),) * 4))}({x})", x.shape)
    return draft.let(style.activation.format(x=x), x.shape) if active else x


def _basic(draft: Draft, x: Tensor, times: int, style: _Style) -> Tensor:
    """Two convolutions of 3 x 3 beside the identity (He et al. 2016)."""
    y = _normed(draft, convolution(draft, x, x.shape[1], 3), style)
    y = _normed(draft, convolution(draft, y, x.shape[1], 3), style, active=False)
    return draft.let(style.activation.format(x=f"{y} + {x}"), x.shape)


def _bottleneck(draft: Draft, x: Tensor, times: int, style: _Style) -> Tensor:
    """A narrow convolution of 3 x 3 between two of 1 x 1, beside the identity (He et al. 2016)."""
    narrow = style.base if times < 4 else f"{times // 4} * {style.base}"
    y = _normed(draft, convolution(draft, x, narrow), style)
    y = _normed(draft, convolution(draft, y, narrow, 3), style)
    y = _normed(draft, convolution(draft, y, x.shape[1]), style, active=False)
    return draft.let(style.activation.format(x=f"{y} + {x}"), x.shape)


def _inverted(draft: Draft, x: Tensor, times: int, style: _Style) -> Tensor:
    """A wide depthwise convolution between two of 1 x 1, some with a gate of channels (Sandler et al. 2018)."""
    wide = f"{4 * times} * {style.base}"
    y = _normed(draft, convolution(draft, x, wide), style)
    y = _normed(draft, convolution(draft, y, wide, draft.rng.choice((3, 3, 5)), alone=True), style)
    if draft.rng.random() < 0.5:
        mean = draft.let(f"{y}.mean((2, 3), keepdim=True)", (*y.shape[:2], "1", "1"))
        gate = convolution(draft, mean, style.base, bias=True)
        gate = draft.let(style.activation.format(x=gate), gate.shape)
        y = draft.let(f"{y} * torch.sigmoid({convolution(draft, gate, wide, bias=True)})", y.shape)
    y = _normed(draft, convolution(draft, y, x.shape[1]), style, active=False)
    return draft.let(f"{y} + {x}", x.shape)


def _next_like(draft: Draft, x: Tensor, times: int, style: _Style) -> Tensor:
    """A depthwise convolution of 7 x 7, then two layers with channels last, scaled (Liu et al. 2022)."""
    channels = x.shape[1]
    y = convolution(draft, x, channels, 7, alone=True, bias=True)
    last = (x.shape[0], *x.shape[2:], channels)
    y = draft.let(f"{y}.permute(0, 2, 3, 1)", last)
    y = draft.let(f"{draft.module(f'nn.LayerNorm({channels})', (channels,), (channels,))}({y})", last)
    y = linear(draft, y, f"4 * {channels}", "layer")
    y = linear(draft, draft.let(f"F.gelu({y})", y.shape), channels, "layer")
    y = draft.let(f"{y} * {draft.parameter((channels,))}", last)
    return draft.let(f"{y}.permute(0, 3, 1, 2) + {x}", x.shape)


BLOCKS: tuple[Block, ...] = (_basic, _bottleneck, _inverted, _next_like)


def convolutional(draft: Draft) -> tuple[Tensor, ...]:
    """Family: a network of three stages of equal blocks, sides halved and channels doubled between them, and a head."""
    rng, style, x = draft.rng, _drawn_style(draft), _image(draft)
    block, times, most = rng.choice(BLOCKS), rng.choice((1, 2, 4)), rng.randint(*OPERATORS)
    x = _normed(draft, convolution(draft, x, _times(times, style), 3), style)
    for stage in range(3):
        while len(draft.lines) < most * (stage + 1) / 3:
            x = block(draft, x, times, style)
        if stage < 2:
            times *= 2
            x = _normed(draft, convolution(draft, x, _times(times, style), 3, stride=2), style)
    mean = draft.let(f"{x}.mean((2, 3))", x.shape[:2])
    return (linear(draft, mean, draft.size("CLASSES", (1000,)), "layer"),)


def dense(draft: Draft) -> tuple[Tensor, ...]:
    """Family: blocks in which each convolution reads all values before it (Huang et al. 2017), pooled in between."""
    style, x = _drawn_style(draft), _image(draft)
    layers, times = 4, 2
    x = convolution(draft, x, _times(times, style), 3)
    for stage in range(3):
        for _ in range(layers):
            y = _normed(draft, x, style)
            y = _normed(draft, convolution(draft, y, _times(4, style)), style)
            y = convolution(draft, y, style.base, 3)
            times += 1
            x = draft.let(f"torch.cat(({x}, {y}), 1)", (x.shape[0], _times(times, style), *x.shape[2:]))
        if stage < 2:
            times = max(1, times // 2)
            x = convolution(draft, _normed(draft, x, style), _times(times, style))
            x = draft.let(f"F.avg_pool2d({x}, 2)", (*x.shape[:2], *map(_halved, x.shape[2:])))
    mean = draft.let(f"{_normed(draft, x, style)}.mean((2, 3))", x.shape[:2])
    return (linear(draft, mean, draft.size("CLASSES", (1000,)), "layer"),)


def decoder(draft: Draft) -> tuple[Tensor, ...]:
    """Family: an encoder, and a decoder that reads the encoder's values at each side (Ronneberger et al. 2015)."""
    rng, style, x = draft.rng, _drawn_style(draft), _image(draft)
    block, depth = rng.choice((_basic, _inverted, _next_like)), rng.randint(1, 3)
    kept = []
    for stage in range(3):
        x = _normed(draft, convolution(draft, x, _times(2**stage, style), 3, stride=2 if stage else 1), style)
        for _ in range(depth):
            x = block(draft, x, 2**stage, style)
        kept.append(x)
    for stage in (1, 0):
        mode = rng.choice(("nearest", "bilinear"))
        up = draft.let(
            f"F.interpolate({x}, scale_factor=2, mode='{mode}')", (*x.shape[:2], *map(_doubled, x.shape[2:]))
        )
        both = (up.shape[0], _times(3 * 2**stage, style), *up.shape[2:])
        x = draft.let(f"torch.cat(({up}, {kept[stage]}), 1)", both)
        x = _normed(draft, convolution(draft, x, _times(2**stage, style), 3), style)
        for _ in range(depth):
            x = block(draft, x, 2**stage, style)
    return (convolution(draft, x, "3", bias=True),)


def _drawn_style(draft: Draft) -> _Style:
    draft.finish("self.eval()")
    return _Style(draft.size("CHANNELS", CHANNELS), draft.rng.choice(ACTIVATIONS))


def _image(draft: Draft) -> Tensor:
    side = f"4 * {draft.size('SIDE', SIDES)}"
    return draft.input((draft.size("BATCH", BATCHES), "3", side, side))


def _times(times: int, style: _Style) -> str:
    return style.base if times == 1 else f"{times} * {style.base}"


def _halved(side: str) -> str:
    times, _, name = side.partition(" * ")
    return name if times == "2" else f"{int(times) // 2} * {name}"


def _doubled(side: str) -> str:
    times, _, name = side.partition(" * ")
    return f"{2 * int(times)} * {name}" if name else f"2 * {side}"


__all__ = ["convolution", "convolutional", "decoder", "dense"]
