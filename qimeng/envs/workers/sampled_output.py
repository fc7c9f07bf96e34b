"""Keeps the output of a timed call for a check. The call is drawn after it ran.

Deals in numbers of calls, seeds and copies of outputs. So a program cannot know which of its calls will be checked.
Knows nothing about the expected outputs.
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


_random = random.SystemRandom().random


@dataclass(frozen=True)
class SampledOutput:
    """The output of one call.

    Attributes:
        round: measurement that the call belongs to, from 0; -1 before any.
        call: number of the call in it, the calls of the warm-up included.
        tensors: copies of the tensors of its output.
    """

    round: int = -1
    call: int = -1
    tensors: tuple[torch.Tensor, ...] = ()


class OutputSampler:
    """Keeps a copy of the output of one of the calls that it is shown, each as likely as any other.

    Used for template programs. For others, the judge sees timed calls itself (`qimeng.envs.judge.judge_clock`).
    """

    def __init__(self) -> None:
        self._rounds, self._seen = 0, 0
        self.sample = SampledOutput()

    def begin(self) -> None:
        """A measurement begins."""
        self._rounds += 1

    def show(self, call: int, output: Any) -> None:
        """Keep `output` in place of what was kept, with the probability of one in the number of calls shown."""
        self._seen += 1
        if self._draw() * self._seen < 1.0:
            self.sample = SampledOutput()  # its memory is what the copies need
            tensors = [x for x in _pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
            self.sample = SampledOutput(self._rounds - 1, call, tuple(x.clone() for x in tensors))

    def _draw(self) -> float:
        """Uniform in [0, 1). It is a method, so that the seal detects a replacement by untrusted code."""
        return _random()


__all__ = ["SampledOutput", "OutputSampler", "call_seed"]
