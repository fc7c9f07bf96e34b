"""How the values that reach a region travel to the processes of its judge: as they are, or where large as a law.

Deals in captured tensors. A tensor of hundreds of megabytes would take a second to pickle, send and read in each
process; so every process draws it anew, with the quantiles of what was captured and from the same seed. Scales of
single rows are lost with that; the milestones, which run the whole program, have them. Knows nothing about regions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from qimeng.spec.law import KNOTS, Law
from qimeng.spec.leaf import (
    Leaf,
    domain_of,
    infer_domain,
    is_plain,
    placed,
    readable,
    sample,
    unexpanded,
    ways_like,
)
from qimeng.spec.origin import ExampleOrigin
from qimeng.spec.source import Source
from qimeng.spec.structure import distinct
from qimeng.spec.ways import Drawn

LARGE_BYTES = 1 << 23
"""Bytes of a value above which it travels as a law."""
LOOKED_AT = 1 << 16
"""Elements that a law is made from."""
LAWFUL = ("real", "positive")
"""Domains whose values a law says all about."""


@dataclass(frozen=True, eq=False)
class DrawnLeaf(Leaf):
    """A large value, of which shape, strides, dtype and law are kept; `value` has no memory.

    Attributes:
        seed: of the example.
    """

    seed: int = 0

    @property
    def content(self) -> str:
        """What stands for the example's values: its seed, which is made from its law."""
        return str(self.seed)

    def example(self, device: str) -> Any:
        """The example, the same in every process with this kind of device."""
        return self.draw(Source(self.seed, device))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "seed": self.seed}


def leaf_of(x: torch.Tensor, may_draw: bool) -> Leaf:
    """`x` as an example.

    Args:
        x: what was captured, on any device.
        may_draw: whether a large value may travel as a law.
    """
    small = x.nbytes <= LARGE_BYTES or x.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    if may_draw and not small and is_plain(unexpanded(x)):
        part = sample(x).flatten()
        part = part[:: max(1, part.numel() // LOOKED_AT)].cpu()
        domain = infer_domain(part)
        if domain in LAWFUL and bool(part.isfinite().all()) and bool((part != part[0]).any()):
            law = _law(part)
            seed = int.from_bytes(hashlib.blake2b(law.left.numpy().tobytes(), digest_size=6).digest())
            empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return DrawnLeaf(empty, domain, (Drawn(law),), seed=seed)
    domain = domain_of(x)  # looked at where it is: a CPU takes most of a second for a law of millions of values
    return Leaf(placed(x, "cpu"), domain, tuple(way.to("cpu") for way in ways_like(x.detach(), domain)))


def all_different(leaf: Leaf) -> Leaf:
    """`leaf`, a table of positions of which a row has none twice; so do the ones that are drawn in its place.

    The values alone show it in long rows only. An operator such as a scatter may mean something else where a position
    comes twice.
    """
    if leaf.domain != "index" or not leaf.shape or leaf.shape[-1] < 2 or not leaf.value.numel():
        return leaf
    return replace(leaf, limited=distinct(readable(unexpanded(leaf.value))))


def _law(part: torch.Tensor) -> Law:
    """The quantiles of `part`, numbers that occur often included."""
    ordered = part.double().sort().values
    ends = ordered[torch.linspace(0, len(ordered) - 1, KNOTS + 1).round().long()]
    return Law(ends[:-1].clone(), ends.diff())


@dataclass(frozen=True, eq=False)
class DrawnOrigin(ExampleOrigin):
    """A module some of whose parameters are drawn on the device where it is made; it holds empty ones in their place.

    Attributes:
        drawn: key of each such parameter or buffer, and how it is drawn.
    """

    drawn: tuple[tuple[str, Leaf], ...] = ()

    def module(self, seed: int, device: str) -> torch.nn.Module:
        """A copy of the module, all its parameters there."""
        module = super().module(seed, device)
        for key, leaf in self.drawn:
            path, _, last = key.rpartition(".")
            home, value = module.get_submodule(path), leaf.example(device)
            if last in home._parameters:
                home._parameters[last] = torch.nn.Parameter(value, requires_grad=False)
            else:
                home._buffers[last] = value
        return module

    @property
    def content(self) -> str:
        """As of any module, and the layout of what is drawn; the values of weights do not count."""
        return "\n".join([super().content, *(f"{key} {leaf.layout}" for key, leaf in self.drawn)])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "drawn": self.drawn}


__all__ = ["DrawnLeaf", "DrawnOrigin", "all_different", "leaf_of"]
