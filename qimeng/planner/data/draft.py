"""A generated computation under construction: named sizes, tensors, the lines of a module, and finally its text.

Deals in names and lines of Python. Knows nothing about which operators make sense together, or how large anything is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

Shape = tuple[str, ...]
"""Sizes as they stand in the source: a name, a number, or a product of them (``"2 * WIDTH"``)."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in `forward`: the expression that names it, and its shape."""

    name: str
    shape: Shape

    def __str__(self) -> str:
        return self.name


class Draft:
    """Collects inputs, parameters and lines; `text` prints a file with `Model`, `get_inputs` and `get_init_inputs`.

    Args:
        rng: what every choice is drawn from.

    Attributes:
        pools: name of each size to the values it may have; an empty tuple for the one that is chosen last, so that
            the inputs get the bytes asked for.
        inputs: the module's inputs.
        parameters: shapes of its parameters.
        values: what `forward` computes, in order.
        lines: of `forward`, one for each value.
        products: for each matrix product the sizes whose product is its multiplications.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.pools: dict[str, tuple[int, ...]] = {}
        self.inputs: list[Tensor] = []
        self.parameters: list[Shape] = []
        self.values: list[Tensor] = []
        self.lines: list[str] = []
        self.products: list[Shape] = []
        self._makers: list[str] = []
        self._init: list[str] = []
        self._last: list[str] = []

    def size(self, name: str, pool: tuple[int, ...] = ()) -> str:
        """A new size called `name` (numbered where that is taken), one of `pool`."""
        unique, number = name, 2
        while unique in self.pools:
            unique, number = f"{name}{number}", number + 1
        self.pools[unique] = pool
        return unique

    def input(self, shape: Shape, make: str = "torch.randn({shape})") -> Tensor:
        """A new input of `shape`, made by the expression `make`."""
        names = "xyzuvwabcde"
        made = Tensor(names[len(self.inputs)], shape)
        self.inputs.append(made)
        self._makers.append(make.format(shape=", ".join(shape)))
        return made

    def parameter(self, shape: Shape, make: str = "torch.randn({shape})") -> Tensor:
        """A new parameter of `shape`, made by the expression `make`."""
        name = f"weight{len(self.parameters) + 1}"
        self.parameters.append(shape)
        self._init.append(f"self.{name} = nn.Parameter({make.format(shape=', '.join(shape))})")
        return Tensor(f"self.{name}", shape)

    def module(self, expression: str, *shapes: Shape) -> str:
        """A new sub-module made by `expression`, which holds parameters of `shapes`."""
        name = f"layer{len(self._init) + 1}"
        self.parameters.extend(shapes)
        self._init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def finish(self, line: str) -> None:
        """A line at the end of the constructor, when all layers are there."""
        self._last.append(line)

    def let(self, expression: str, shape: Shape) -> Tensor:
        """A new line of `forward`."""
        made = Tensor(f"h{len(self.values) + 1}", shape)
        self.values.append(made)
        self.lines.append(f"{made} = {expression}")
        return made

    def text(self, sizes: Mapping[str, int], *results: Tensor) -> str:
        """The whole file, which returns `results`."""
        returned = ", ".join(map(str, results))
        arguments = ", ".join(map(str, self.inputs))
        lines = ["import torch", "import torch.nn as nn", "import torch.nn.functional as F", ""]
        lines += [f"{name} = {sizes[name]}" for name in self.pools]
        lines += ["", "", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in (*self._init, *self._last)]
        lines += ["", f"    def forward(self, {arguments}):"]
        lines += [f"        {line}" for line in self.lines]
        lines += [f"        return {returned}", "", "", "def get_inputs():"]
        lines += [f"    return [{', '.join(self._makers)}]", "", "", "def get_init_inputs():", "    return []"]
        return "\n".join(lines) + "\n"


def elements(shape: Shape, sizes: Mapping[str, int]) -> int:
    """Number of elements of `shape`.

    >>> elements(("ROWS", "2 * WIDTH"), {"ROWS": 3, "WIDTH": 5})
    30
    """
    factors = [f for s in shape for f in s.split(" * ")]
    return math.prod(int(f) if f.isdigit() else sizes[f] for f in factors)


__all__ = ["Draft", "Shape", "Tensor", "elements"]
