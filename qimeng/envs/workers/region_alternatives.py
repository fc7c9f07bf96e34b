"""Implementations of one region, on inputs that the region gets in a run on PyTorch.

Deals in one region at a time, in a worker. Knows nothing about the program around it, nor about right results.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from qimeng.backend.load import load_kernels
from qimeng.backend.registry import implementation_source
from qimeng.envs.workers.outputs import Facts, describe
from qimeng.envs.workers.service import Refused
from qimeng.envs.workers.tensor_bits import checksum
from qimeng.envs.workers.worker_inputs import tensors_of
from qimeng.program.program import Implementation


class RegionAlternatives:
    """The region at hand: its inputs, and the implementations that were loaded."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self._sums: list[int] = []
        self._loaded: dict[str, ModuleType] = {}

    def take(self, arguments: tuple[Any, ...]) -> None:
        """Have these inputs from now on."""
        self.arguments = arguments
        self._sums = [checksum(x) for x in tensors_of(arguments)]

    def has(self, implementation: Implementation) -> bool:
        """Whether it is loaded."""
        return implementation.digest in self._loaded

    def load(self, implementation: Implementation) -> None:
        """Load an implementation's text; its kernels were found before."""
        self._loaded[implementation.digest] = load_kernels(implementation_source(implementation), os.getcwd())

    def function(self, implementation: Implementation) -> Callable[..., Any]:
        """The function of an implementation that is loaded, with its prepared buffers."""
        module = self._loaded[implementation.digest]
        function, prepared = getattr(module, implementation.entry), ()
        if implementation.prepare:
            chosen = [self.arguments[i] for i in implementation.prepare_inputs]
            prepared = tuple(getattr(module, implementation.prepare)(*chosen))
        return lambda *arguments: function(*arguments, *prepared)

    def check(self) -> None:
        """Refuse a function that changed its inputs."""
        if [checksum(x) for x in tensors_of(self.arguments)] != self._sums:
            raise Refused("mutated", "the region's function changed its inputs in place")

    def described(self, output: Any) -> tuple[Facts, list[torch.Tensor]]:
        """Structure and tensors of what a function returned."""
        return describe(output, {f"input {i}": x for i, x in enumerate(tensors_of(self.arguments))})

    def forget(self) -> None:
        """Give up inputs and implementations."""
        self._loaded.clear()
        self.arguments, self._sums = (), []


__all__ = ["RegionAlternatives"]
