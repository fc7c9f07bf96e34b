"""How long a call takes.

Deals in calls, clocks and samples in milliseconds. On a GPU: L2 flushed, synchronized, start event, call, end event;
fresh inputs each time. Knows nothing about what is called or whether it is right.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.interfaces import Timing

_now = time.perf_counter  # foreign code that replaces it in `time` does not reach this one
FRESH_SHARE = 8
"""Input sets may take this fraction (one in) of the device's memory; larger inputs are made anew in place."""


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        min_ms: device milliseconds that are measured at least.
        min_calls: calls that are measured at least.
        limit_s: wall seconds after which measuring ends in any case, once three calls were measured.
        warmup: calls before the first one that counts.
    """

    min_ms: float = 5.0
    min_calls: int = 10
    limit_s: float = 0.35
    warmup: int = 3


@dataclass(frozen=True)
class Samples:
    """Times of single calls in milliseconds: on the device, and on the wall clock with synchronization."""

    device_ms: tuple[float, ...]
    wall_ms: tuple[float, ...]

    def __add__(self, other: Samples) -> Samples:
        return Samples(self.device_ms + other.device_ms, self.wall_ms + other.wall_ms)

    def timing(self) -> Timing:
        """Median, interquartile range over the median, median of the wall clock."""
        middle = statistics.median(self.device_ms)
        return Timing(middle, spread(self.device_ms), statistics.median(self.wall_ms), len(self.device_ms))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than four samples.

    >>> spread([1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0])
    1.0
    """
    if len(samples) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle if middle else 0.0


class Stopwatch:
    """Times calls on one device; keeps the buffer that flushes the L2 cache."""

    def __init__(self, device: torch.device):
        self.device = device
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._flush = torch.empty(2 * properties.L2_cache_size // 4, dtype=torch.int32, device=device)
            self._memory = properties.total_memory
        else:
            self._memory = 1 << 33

    def has_room(self, inputs: Sequence[Any]) -> bool:
        """Whether another set of inputs like these may stay in memory."""
        return _bytes(inputs) <= self._memory // FRESH_SHARE

    def flush(self) -> None:
        """Write twice the size of the L2 cache."""
        if self._flush is not None:
            self._flush.add_(1)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[..., Any], arguments: Sequence[Any]) -> tuple[float, float]:
        """Device and wall milliseconds of one call."""
        self.flush()
        self.synchronize()
        if self.device.type != "cuda":
            began = _now()
            call(*arguments)
            wall = (_now() - began) * 1e3
            return wall, wall
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = _now()
        start.record()
        output = call(*arguments)
        end.record()
        torch.cuda.synchronize(self.device)
        wall = (_now() - began) * 1e3
        del output
        return start.elapsed_time(end), wall

    def measure(
        self,
        call: Callable[..., Any],
        make_inputs: Callable[[int], Sequence[Any]],
        seeds: Sequence[int],
        effort: Effort = Effort(),
    ) -> Samples:
        """Times of calls on inputs that change from call to call.

        Args:
            call: what is timed.
            make_inputs: seed to arguments.
            seeds: one set of inputs a seed, as far as memory allows; sets beyond that are made in place of the first.
            effort: how much to measure.
        """
        sets = [make_inputs(seeds[0])]
        room = self._memory // FRESH_SHARE // max(_bytes(sets[0]), 1)
        sets += [make_inputs(seed) for seed in seeds[1 : max(room, 1)]]
        for number in range(effort.warmup):
            self.once(call, sets[number % len(sets)])
        device_ms: list[float] = []
        wall_ms: list[float] = []
        with _no_garbage_collection():
            began = _now()
            total = 0.0
            while (total < effort.min_ms or len(wall_ms) < effort.min_calls) and (
                _now() - began < effort.limit_s or len(wall_ms) < 3
            ):
                number = len(wall_ms)
                if len(sets) == 1 and len(seeds) > 1:
                    _refill(sets[0], make_inputs, seeds[number % len(seeds)])
                on_device, on_wall = self.once(call, sets[number % len(sets)])
                device_ms.append(on_device)
                wall_ms.append(on_wall)
                total += on_device
        return Samples(tuple(device_ms), tuple(wall_ms))


def _refill(inputs: Sequence[Any], make_inputs: Callable[[int], Sequence[Any]], seed: int) -> None:
    """New content where the inputs are."""
    new = make_inputs(seed)
    for old, fresh in zip(_pytree.tree_leaves(list(inputs)), _pytree.tree_leaves(list(new)), strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(fresh)


def _bytes(inputs: Sequence[Any]) -> int:
    return sum(x.nbytes for x in _pytree.tree_leaves(list(inputs)) if isinstance(x, torch.Tensor))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


__all__ = ["Effort", "Samples", "Stopwatch", "spread"]
