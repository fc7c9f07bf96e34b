"""Trials: draws of inputs and parameters with their expected results, and a pool that reuses them.

Deals in draws and expected tensors. Knows nothing about how they are computed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.workers.worker_setup import Draw
from qimeng.spec.perturb import share_of

SEARCH_TRIALS = 4
"""Trials of a candidate in a search."""
USES = 4
"""Times a trial is used before it is replaced by a new one."""
ALIKE = 4
"""Trials of one kind that the pool holds."""


@dataclass
class Trial:
    """One draw of inputs and parameters, with its expected results.

    Attributes:
        draw: the seeds.
        outputs: for each tensor that the spec returns.
        buffers: for each buffer that a call changes, by its key.
        eager: eager's outputs, where KernelBench's own rule is checked; else empty.
        uses: how often it was drawn from the pool.
        nearby: trials nearby that were made to widen its budgets, those that say nothing among them.
        allowing: whether its updates may be off by roundings of what is added.
    """

    draw: Draw
    outputs: list[Expected]
    buffers: dict[str, Expected]
    eager: list[torch.Tensor] = field(default_factory=list)
    uses: int = 0
    nearby: int = 0
    allowing: bool = False

    @property
    def expected(self) -> list[Expected]:
        """Outputs, then buffers, in the order in which a worker hands them over."""
        return [*self.outputs, *self.buffers.values()]

    def widen(self, other: Trial) -> None:
        """Let the budgets rest on `other`, a trial on inputs nearby, as well."""
        self.outputs = [a.widened(b) for a, b in zip(self.outputs, other.outputs, strict=True)]
        self.buffers = {key: e.widened(other.buffers[key]) for key, e in self.buffers.items()}

    @property
    def kind(self) -> tuple[str, int | None]:
        """Distribution of the inputs, and which share of the parameters' rows is changed; None where they are not."""
        seed = self.draw.parameter_seed
        return self.draw.distribution, None if seed is None else share_of(seed)

    @property
    def bytes(self) -> int:
        """Device memory that it holds."""
        tensors = (
            [e.value for e in self.expected] + [e.eager for e in self.expected if e.eager is not None] + self.eager
        )
        return sum(t.nbytes for t in tensors)


class TrialPool:
    """Trials that were made for one candidate and serve a few others, drawn at random.

    Args:
        capacity: bytes of device memory that it may hold.
    """

    def __init__(self, capacity: float):
        self._capacity = capacity
        self._trials: list[Trial] = []
        self._choose = random.SystemRandom()

    def take(self, kind: tuple[str, int | None], given: Sequence[Draw]) -> Trial | None:
        """A trial of this kind whose draw is none of `given`; None where a new one is due."""
        fitting = [t for t in self._trials if t.kind == kind and t.draw not in given]
        if not fitting or (len(fitting) < 2 and self._choose.random() >= 0.5):
            return None
        trial = self._choose.choice(fitting)
        trial.uses += 1
        if trial.uses >= USES:
            self._trials.remove(trial)
        return trial

    def keep(self, trial: Trial) -> None:
        """Keep a trial that was just made and used, if it fits; of its kind, the most used gives way to it.

        Some trials are made although the pool has some, so more are added than used up.
        """
        alike = [t for t in self._trials if t.kind == trial.kind]
        if len(alike) >= ALIKE:
            self._trials.remove(max(alike, key=lambda t: t.uses))
        if trial.bytes + sum(t.bytes for t in self._trials) <= self._capacity:
            trial.uses = 1
            self._trials.append(trial)

    def clear(self) -> None:
        """Forget all."""
        self._trials.clear()


__all__ = ["SEARCH_TRIALS", "USES", "Trial", "TrialPool"]
