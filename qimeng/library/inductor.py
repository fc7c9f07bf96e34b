"""Regions by torch.compile: TorchInductor's code as one more candidate (PyTorch's documentation of `torch.compile`).

Deals in the text that compiles a region at its first call. Knows nothing about what Inductor makes of it.
"""

from __future__ import annotations

from typing import Any

from qimeng.device import Device
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered, heavy
from qimeng.program.implementation import Implementation

TEXT = '''
_NAME_made = []


def NAME(*inputs):
    """Compiled by torch.compile at the first call, in this process; TorchInductor keeps what it made on disk."""
    if not _NAME_made:
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1
        _NAME_made.append(torch.compile(NAME_region, OPTIONS))
    return tuple(_NAME_made[0](*inputs))
'''


REGION = "_region"
"""What the name of the region's function ends with, after the implementation's entry."""

COMPILE_S = 120.0
"""Seconds that the first call of such a region may take: 5 to 20 on a free machine, minutes where it tunes."""

ALONE = ("reduction", "scan", "attention", "other")
"""Operators that Inductor may compute faster than PyTorch's own call does, even alone."""


class Inductor(LibraryCall):
    """TorchInductor's kernels for the region.

    Args:
        name: the option.
        mode: of torch.compile; empty for its default. One that records CUDA graphs is `launch`'s.
    """

    def __init__(self, name: str, mode: str = ""):
        self.name, self.mode = name, mode

    @property
    def options(self) -> dict[str, Any]:
        """Of torch.compile, as the text has them."""
        return {**({"mode": self.mode} if self.mode else {}), "fullgraph": True, "dynamic": False}

    def check(self, region: Region, device: Device) -> None:
        """Anything but random operators, whose numbers differ from eager's, and pieces of PyTorch code."""
        odd = [n for n in region.ops if category(n) == "random" or n.literal is not None]
        if not heavy(region):
            raise NotOffered("a view is free")
        if odd:
            raise NotOffered(f"{odd[0].packet.removeprefix('aten.')} is left to PyTorch")
        if len(heavy(region)) < 2 and not self.mode and category(heavy(region)[0]) not in ALONE:
            raise NotOffered(f"{region.label()} is one operator, which PyTorch's own call computes as well")
        if self.mode and not any(category(n) in ("gemm", "convolution") for n in region.ops):
            raise NotOffered(f"{self.mode} tunes products and convolutions, and the region has none")

    def write(self, region: Region, prefix: str) -> Implementation:
        """The region's PyTorch function, and a function that compiles it once."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        text = region.function(prefix + REGION) + "\n" + TEXT.replace("NAME", prefix).replace("OPTIONS", options)
        return Implementation(LANGUAGE, text, prefix)


def compiles(implementation: Implementation) -> bool:
    """Whether the first call of `implementation` compiles it."""
    return implementation.language == LANGUAGE and "torch.compile(" in implementation.source


__all__ = ["ALONE", "COMPILE_S", "REGION", "Inductor", "compiles"]
