"""The outputs of some timed calls, kept to be looked at: which calls, is drawn after the call.

Deals in numbers of calls, seeds and copies of outputs. A program that is right only as long as nobody measures cannot
know which of its calls counts. Knows nothing about what the outputs should be.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
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


SLOTS, SMALL_BYTES = 4, 1 << 26
"""Outputs that are kept of small ones (64 MiB at most); of larger ones one is."""

_random = random.SystemRandom().random


def slots_of(nbytes: int) -> int:
    """How many outputs of `nbytes` are kept."""
    return SLOTS if nbytes <= SMALL_BYTES else 1


@dataclass(frozen=True)
class Kept:
    """The output of one call.

    Attributes:
        round: measurement that the call belongs to, from 0; -1 before any.
        call: number of the call in it, the calls of the warm-up included.
        tensors: copies of the tensors of its output.
    """

    round: int = -1
    call: int = -1
    tensors: tuple[torch.Tensor, ...] = ()


class Witness:
    """Keeps copies of the outputs of some of the calls that it is shown, each call as likely as any other.

    Attributes:
        kept: one output a slot; the slots are drawn apart, so that two may hold the same call.
    """

    def __init__(self) -> None:
        self._rounds, self._seen = 0, 0
        self.kept = [Kept()] * SLOTS

    def begin(self) -> None:
        """A measurement begins."""
        self._rounds += 1

    def show(self, call: int, output: Any) -> None:
        """Keep `output` in place of what a slot kept, with the probability of one in the number of calls shown."""
        self._seen += 1
        tensors = [x for x in _pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        count = slots_of(sum(x.nbytes for x in tensors))
        taken = [slot for slot in range(count) if self._draw() * self._seen < 1.0]
        if not taken:
            return
        for slot in taken:
            self.kept[slot] = Kept()  # their memory is what the copies need
        copies = Kept(self._rounds - 1, call, tuple(x.clone() for x in tensors))
        for slot in taken:
            self.kept[slot] = copies

    def _draw(self) -> float:
        """Uniform in [0, 1); a method, so that the seal sees another one that foreign code puts in its place."""
        return _random()


__all__ = ["Kept", "Witness", "call_seed", "slots_of"]
