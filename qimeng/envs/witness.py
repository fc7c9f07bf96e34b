"""The output of one timed call, kept to be looked at: which call it is, is drawn after the call.

Deals in numbers of calls, seeds and copies of outputs. A program that is right only as long as nobody measures cannot
know which of its calls counts. Knows nothing about what the outputs should be.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree


def call_seed(seed: int, number: int) -> int:
    """Seed of the inputs of call `number` (from 0) of a measurement with `seed`: 62 bits.

    >>> call_seed(1, 0) == call_seed(1, 0) and call_seed(1, 0) != call_seed(1, 1) != call_seed(2, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


_random = random.SystemRandom().random


class Witness:
    """Keeps a copy of the output of one of the calls that it is shown, each as likely as any other.

    Attributes:
        round: measurement that the call belongs to, from 0; -1 before any.
        call: number of the call in it, the calls of the warm-up included.
        tensors: copies of the tensors of its output.
    """

    def __init__(self, draw: Callable[[], float] = _random):
        self._draw = draw
        self._rounds, self._seen = 0, 0
        self.round, self.call = -1, -1
        self.tensors: list[torch.Tensor] = []

    def begin(self) -> None:
        """A measurement begins."""
        self._rounds += 1

    def show(self, call: int, output: Any) -> None:
        """Keep `output` in place of the one kept so far, with the probability of one in the number of calls shown."""
        self._seen += 1
        if self._draw() * self._seen >= 1.0:
            return
        self.tensors = []  # their memory is what the copies need
        self.round, self.call = self._rounds - 1, call
        self.tensors = [x.clone() for x in _pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]


__all__ = ["Witness", "call_seed"]
