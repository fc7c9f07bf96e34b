"""Specs of the families that `qimeng.planner.data.generate` does not draw: convolutions, windows, scans, recurrences.

Deals in texts with named sizes at their head, drawn from a seed. Each computation has pointwise operators before or
after it, so that its structure is no single operator. Knows nothing about any benchmark: `experiments.writer.examples`
leaves out what has the structure of a benchmark's problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qimeng.planner.data.generate import DTYPES
from qimeng.spec import KernelSpec

_HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"

POINTWISE = (
    "torch.relu({x})", "torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.silu({x})", "{x} * {c}", "{x} + {c}",
    "torch.abs({x})", "F.leaky_relu({x}, 0.1)", "torch.clamp({x}, -{c}, {c})", "F.softplus({x})", "{x} * {x}",
)  # fmt: skip
"""What stands before and after; `{c}` is a number."""


@dataclass
class _Text:
    """What a spec is put together from."""

    rng: random.Random
    sizes: dict[str, int]
    shape: str
    layers: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def size(self, name: str, least: int, most: int, step: int = 1) -> str:
        """A named size, drawn; its name."""
        self.sizes[name] = self.rng.randint(-(-least // step), most // step) * step
        return name

    def pointwise(self, least: int, most: int) -> None:
        """Some pointwise operators."""
        for text in self.rng.sample(POINTWISE, self.rng.randint(least, most)):
            self.lines.append("x = " + text.format(x="x", c=round(self.rng.uniform(0.2, 3.0), 2)))

    def source(self) -> str:
        sizes = "\n".join(f"{name} = {size}" for name, size in self.sizes.items())
        layers = "".join(f"\n        {line}" for line in self.layers)
        lines = "".join(f"\n        {line}" for line in self.lines)
        return (
            f"{_HEAD}\n{sizes}\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()"
            f"{layers}\n\n    def forward(self, x):{lines}\n        return x\n\n\n"
            f"def get_inputs():\n    return [torch.randn({self.shape})]\n\n\ndef get_init_inputs():\n    return []\n"
        )


def _image(rng: random.Random, dims: int) -> _Text:
    """Values of `dims` dimensions with channels."""
    text = _Text(rng, {}, "")
    names = [text.size("BATCH", 2, 16), text.size("CHANNELS", 8, 96, 4)]
    sides = ("LENGTH",) if dims == 1 else ("HEIGHT", "WIDTH")
    names += [text.size(name, 64, 2048) if dims == 1 else text.size(name, 12, 64) for name in sides]
    text.shape = ", ".join(names)
    return text


def convolution(rng: random.Random) -> _Text:
    """A convolution in one or two dimensions, plain, grouped, or of single channels."""
    dims = rng.choice((1, 2, 2))
    text = _image(rng, dims)
    kernel = rng.choice((1, 3, 3, 5))
    stride, padding = rng.choice((1, 1, 2)), rng.choice((0, kernel // 2))
    out, groups = text.size("CHANNELS_OUT", 8, 128, 8), ""
    if rng.random() < 0.3:
        out, groups = "CHANNELS", ", groups=CHANNELS"
        del text.sizes["CHANNELS_OUT"]
    bias = "" if rng.random() < 0.6 else ", bias=False"
    text.layers.append(
        f"self.conv = nn.Conv{dims}d(CHANNELS, {out}, {kernel}, stride={stride}, padding={padding}{groups}{bias})"
    )
    text.pointwise(0, 1)
    text.lines.append("x = self.conv(x)")
    text.pointwise(1, 2)
    return text


def window(rng: random.Random) -> _Text:
    """The maximum or mean of each window."""
    dims = rng.choice((1, 2))
    text = _image(rng, dims)
    kernel = rng.choice((2, 3, 4))
    stride = rng.choice((1, 2, kernel))
    name = rng.choice(("max_pool", "avg_pool"))
    text.pointwise(0, 2)
    text.lines.append(f"x = F.{name}{dims}d(x, {kernel}, stride={stride})")
    text.pointwise(1, 2)
    return text


def scan(rng: random.Random) -> _Text:
    """Sums, products or maxima up to each place of a row or column."""
    text = _Text(rng, {}, "")
    names = [text.size("ROWS", 16, 1024), text.size("COLUMNS", 32, 4096)]
    text.shape = ", ".join(names)
    dim = rng.choice((1, 1, -1, 0))
    text.pointwise(0, 2)
    text.lines.append(
        rng.choice(
            (
                f"x = torch.cumsum(x, {dim})",
                f"x = torch.cumsum(x, {dim})",
                f"x = torch.cumprod(torch.sigmoid(x) + 0.5, {dim})",
                f"x = torch.cummax(x, {dim}).values",
                f"x = torch.logcumsumexp(x, {dim})",
            )
        )
    )
    text.pointwise(1, 2)
    return text


def recurrence(rng: random.Random) -> _Text:
    """A recurrent layer over steps."""
    text = _Text(rng, {}, "")
    names = [text.size("BATCH", 2, 16), text.size("STEPS", 8, 48), text.size("WIDTH", 16, 96, 16)]
    text.size("HIDDEN", 16, 128, 16)
    text.shape = ", ".join(names)
    text.layers.append(f"self.layer = nn.{rng.choice(('LSTM', 'GRU', 'RNN'))}(WIDTH, HIDDEN, batch_first=True)")
    text.pointwise(0, 1)
    text.lines.append("x = self.layer(x)[0]")
    text.pointwise(1, 2)
    return text


FAMILIES: Mapping[str, Callable[[random.Random], _Text]] = {
    "convolution": convolution,
    "window": window,
    "scan": scan,
    "recurrence": recurrence,
}
"""What is drawn, by name; each is as likely as any other."""


def further(seed: int, index: int) -> tuple[str, KernelSpec]:
    """Family and spec number `index` of the sequence `seed`; the same two give the same spec."""
    rng = random.Random(f"further/{seed}/{index}")
    family = rng.choice(list(FAMILIES))
    text = FAMILIES[family](rng)
    dtype = rng.choice(DTYPES)
    if family == "scan":
        dtype = "float32"  # products and sums of many elements leave the range of half types
    return family, KernelSpec.from_source(text.source(), f"{seed}-{index}-{family}", dtype=dtype)


__all__ = ["FAMILIES", "convolution", "further", "recurrence", "scan", "window"]
