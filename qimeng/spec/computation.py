"""What the parts of `qimeng.spec` need to know of a spec; `KernelSpec`, which uses those parts, is one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from qimeng.spec.leaf import Leaf
from qimeng.spec.origin import Origin


class Computation(Protocol):
    """A module with its inputs, which can be made again at a smaller size. `KernelSpec` says what each member is."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def origin(self) -> Origin:
        """Where the module and its inputs come from."""

    @property
    def elements(self) -> int:
        """Elements of all tensors of a run together."""

    @property
    def is_long(self) -> bool:
        """Whether a call runs many operators."""

    @property
    def is_small(self) -> bool:
        """Whether a run on the CPU takes seconds at most."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Domain of each flattened input."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What is known of each flattened example input."""

    @property
    def ways(self) -> tuple[int, ...]:
        """How new values of each flattened example input are drawn."""

    def module(self, device: str = "cpu") -> torch.nn.Module:
        """A fresh module."""

    def inputs(self, seed: int, device: str, distribution: str) -> tuple[Any, ...]:
        """Its positional inputs."""

    def redrawn(self, seed: int, ways: tuple[int, ...]) -> tuple[Any, ...]:
        """Inputs, each redrawn in the given one of its ways."""

    def reduced(self) -> Computation:
        """The same on smaller inputs."""

    def tried_on(self, device: str) -> Computation:
        """The same at the size at which it is tried."""


__all__ = ["Computation"]
