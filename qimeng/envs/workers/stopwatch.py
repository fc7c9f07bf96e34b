"""Measures how long a call takes.

Deals in calls, clocks and samples in milliseconds. On a GPU: L2 flushed, synchronized, start event, call, end event,
then everything on the device drained. The device is kept busy for 0.1 ms before the start event, so that the launch
delay of the first kernel is not timed. (KernelBench's fill of 256 MB before the event has the same effect.) Every call
has its own inputs, so no result can be reused. Work that the events do not see, such as on another stream, counts as
well. Knows nothing about the call or its correctness.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.workers.sampled_output import OutputSampler, call_seed
from qimeng.interfaces import Timing

_now = time.perf_counter  # foreign code that replaces a name in `time` or `torch` does not reach what is bound here
_Event, _record, _elapsed_ms = torch.cuda.Event, torch.cuda.Event.record, torch.cuda.Event.elapsed_time
_sleep = torch.cuda._sleep
_drain = getattr(torch._C, "_cuda_synchronize", torch.cuda.synchronize)
FRESH_SHARE = 8
"""Input sets may take this fraction (one in) of the device's memory; larger inputs are held one set at a time."""
LEAD_MS, CYCLES_PER_MS = 0.1, 2_000_000
"""Lead before the start event, of a GPU at 2 GHz. What a candidate does on another stream meanwhile shows in the
profiler's kernels (`qimeng.envs.workers.kernel_launches.busy_ms`)."""
MOST_LEAD_MS = 0.4
"""The longest lead, for a program that the host launches too late for the usual one. It is short, because only the
judge's clock sees what the host computes meanwhile."""
SETS = 3
"""Sets of inputs that stay in memory while the next one is made, so that it lies elsewhere."""
LATE_SHARE = 0.01
"""Share of a call's device time by which its kernels may be launched too late; beyond it, the call is repeated."""
MOST_LATE, HOPELESS = 60, 8
"""Calls that may be repeated in one measurement, and as long as none was launched within the longest lead: the host's
way to the device may be long by nature (many kernels), and then what is beyond the lead is part of the time."""
LATE_S = 1.0
"""Seconds for which calls are repeated: a network that takes a second a call is launched from Python all along."""
FEW = 4
"""Calls that say of a slow program how slow it is."""
ENOUGH = 8
"""Minimum number of calls for a spread."""
HIDDEN_MS = 0.05
"""Wall time beyond the events and an empty call that is tolerated before it counts as time of the call."""


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        min_ms: device milliseconds that are measured at least.
        min_calls: calls that are measured at least.
        limit_s: wall seconds after which measuring ends in any case, once three calls were measured.
        warmup: calls before the first one that counts.
        max_calls: calls that are measured at most. A short call is mostly flush, lead and new inputs (0.8 ms, measured
            on an H200); beyond some dozens its median hardly moves.
        error: standard error of the median, over the median, at which measuring may end before `min_ms`, once `ENOUGH`
            calls were measured; 0 for never.
        resets: whether lines that a kernel asked the L2 cache to keep are given up before each call. The driver does
            that, all processes of a machine in turns; it is needless where no kernel asks for it.
        behind_ms: a call that takes longer is clearly behind what it is measured against: after `FEW` calls, all of
            them longer, measuring ends. 0 for never.
    """

    min_ms: float = 5.0
    min_calls: int = 10
    limit_s: float = 0.35
    warmup: int = 3
    max_calls: int = 30
    error: float = 0.0
    resets: bool = True
    behind_ms: float = 0.0

    @property
    def most_calls(self) -> int:
        """Calls that are made at most: to warm up, those that count (three in any case), those that are repeated."""
        return self.warmup + max(self.max_calls, 3) + MOST_LATE


@dataclass(frozen=True)
class Reading:
    """Milliseconds of one call.

    Attributes:
        device: between the events.
        wall: until everything was drained, without the lead.
        host: what the host took to launch all of it, from before the lead's own launch.
        late: how much of that was beyond the lead; the device may have waited so long for its work.
    """

    device: float
    wall: float
    host: float = 0.0
    late: float = 0.0


@dataclass(frozen=True)
class Samples:
    """Times of single calls in milliseconds.

    Attributes:
        device_ms: on the device.
        wall_ms: on the wall clock with synchronization.
        late_ms: how much of the first the device may have waited for the host (`Reading.late`); empty where not told.
    """

    device_ms: tuple[float, ...]
    wall_ms: tuple[float, ...]
    late_ms: tuple[float, ...] = ()

    def __add__(self, other: Samples) -> Samples:
        return Samples(self.device_ms + other.device_ms, self.wall_ms + other.wall_ms, self.late_ms + other.late_ms)

    @property
    def usual_late_ms(self) -> float:
        """Median of `late_ms`; 0 where not told."""
        return statistics.median(self.late_ms) if self.late_ms else 0.0

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


def median_error(samples: Sequence[float]) -> float:
    """Standard error of the median over the median, of samples as the normal distribution has them.

    The median's is sqrt(pi / 2) of the mean's (Kenney and Keeping, Mathematics of Statistics, 1962), and the
    interquartile range is 1.349 standard deviations.

    >>> round(median_error([1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0]), 3)
    0.351
    """
    return math.sqrt(math.pi / 2) / 1.349 * spread(samples) / math.sqrt(len(samples))


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

    def flush(self, resets: bool = True) -> None:
        """Write twice the size of the L2 cache; with `resets`, lines that a kernel asked to stay there go as well."""
        if self._flush is not None:
            if resets:
                _reset_persisting_lines()
            self._flush.add_(1)

    def synchronize(self) -> None:
        """Wait for the device: every stream of this process."""
        if self.device.type == "cuda":
            _drain()

    def once(
        self, call: Callable[..., Any], arguments: Sequence[Any], lead_ms: float = LEAD_MS, resets: bool = True
    ) -> tuple[Reading, Any]:
        """One call after a lead on the device: its times, and what it returned."""
        self.flush(resets)
        self.synchronize()
        if self.device.type != "cuda":
            began = _now()
            output = call(*arguments)
            wall = (_now() - began) * 1e3
            return Reading(wall, wall), output
        ready, start, end = (_Event(enable_timing=True) for _ in range(3))
        _record(ready)
        busy = _now()
        _sleep(int(lead_ms * CYCLES_PER_MS))
        began = _now()
        _record(start)
        output = call(*arguments)
        _record(end)
        host = (_now() - busy) * 1e3
        _drain()
        wall = (_now() - began) * 1e3
        device = _elapsed_ms(start, end)
        wall = max(wall - _elapsed_ms(ready, start), device)
        return Reading(device, wall, host, max(host - lead_ms, 0.0)), output

    def measure(
        self,
        call: Callable[..., Any],
        make_inputs: Callable[[int], Sequence[Any]],
        seed: int,
        effort: Effort = Effort(),
        sampler: OutputSampler | None = None,
    ) -> Samples:
        """Times of calls, each on inputs of its own.

        Call number n, those of the warm-up included, gets the inputs of `call_seed(seed, n)`. Where several sets fit
        into memory, they lie where an earlier set was given up, chosen at random; else there is one set at a time.

        A call whose kernels the host launched too late does not count, and is repeated with a longer lead. On a shared
        core of a virtual machine the host is half as fast, and programs of one short kernel would appear twice as slow.

        Args:
            call: what is timed.
            make_inputs: seed to arguments.
            seed: of all inputs.
            effort: how much to measure.
            sampler: is shown the output of every call that counts.
        """
        if sampler is not None:
            sampler.begin()
        inputs = make_inputs(call_seed(seed, 0))
        sets = [inputs]
        room = max(min(self._memory // FRESH_SHARE // max(_bytes(inputs), 1), SETS), 1)
        empty_ms = self._empty_ms()
        device_ms: tuple[float, ...] = ()  # what foreign code finds in a caller's frame it could change, were it a list
        wall_ms: tuple[float, ...] = ()
        late_ms: tuple[float, ...] = ()
        with _no_garbage_collection():
            began = _now()
            total, number = 0.0, 0
            lead_ms, fastest_ms, repeated = LEAD_MS, math.inf, 0
            while len(wall_ms) < 3 or (
                (total < effort.min_ms or len(wall_ms) < effort.min_calls)
                and len(wall_ms) < effort.max_calls
                and _now() - began < effort.limit_s
                and not _is_known(device_ms, effort)
                and not is_behind(device_ms, effort)
            ):
                if number:
                    inputs = ()  # where there is no room for two sets, the old one goes first
                    inputs = _next_inputs(sets, room, make_inputs, call_seed(seed, number))
                found, output = self.once(call, _aliases(inputs), lead_ms, effort.resets)
                fastest_ms = min(fastest_ms, found.host)
                is_late = found.late > LATE_SHARE * found.device
                if is_late:
                    lead_ms = min(max(lead_ms, 2 * found.host), MOST_LEAD_MS)
                if number < effort.warmup:
                    began = _now()
                elif is_late and repeated < _most_late(fastest_ms) and _now() - began < LATE_S:
                    repeated += 1
                else:
                    if sampler is not None:
                        sampler.show(number, output)
                    device_ms += (found.device,)
                    wall_ms += (found.wall,)
                    late_ms += (found.late,)
                    total += found.device
                del output
                number += 1
        hidden = statistics.median(w - d for d, w in zip(device_ms, wall_ms, strict=True)) - empty_ms
        if hidden > HIDDEN_MS:  # the host may have become slower, but a candidate may be at work now as well
            hidden -= min(max(self._empty_ms() - empty_ms, 0.0), HIDDEN_MS)
        if self.device.type == "cuda" and hidden > HIDDEN_MS:
            device_ms = tuple(d + hidden for d in device_ms)
        return Samples(device_ms, wall_ms, late_ms)

    def _empty_ms(self) -> float:
        """What the wall clock says beyond the events where nothing is called."""
        if self.device.type != "cuda":
            return 0.0
        samples = [self.once(lambda: None, ())[0] for _ in range(7)]
        return statistics.median(found.wall - found.device for found in samples)  # a busy host delays these as well


def _most_late(fastest_ms: float) -> int:
    """Calls that may be repeated where the host took so long to launch the fastest one."""
    return MOST_LATE if fastest_ms <= MOST_LEAD_MS else HOPELESS


def _is_known(device_ms: Sequence[float], effort: Effort) -> bool:
    """Whether the median is as certain as `effort` asks for."""
    return effort.error > 0 and len(device_ms) >= ENOUGH and median_error(device_ms) <= effort.error


def is_behind(device_ms: Sequence[float], effort: Effort) -> bool:
    """Whether these calls are clearly behind what `effort` measures against, and enough to say so."""
    return effort.behind_ms > 0 and len(device_ms) >= FEW and min(device_ms) > effort.behind_ms


def _next_inputs(
    sets: list[Sequence[Any]], room: int, make_inputs: Callable[[int], Sequence[Any]], seed: int
) -> Sequence[Any]:
    """Inputs of `seed`: beside those of `sets` as long as there is room for more, then instead of one of them."""
    if room < 2:
        sets.clear()
    elif len(sets) == room:
        sets.pop(_choose(room))  # gone before others are made: whoever waits for their end is called too early
    made = make_inputs(seed)
    sets.append(made)
    return made


def _aliases(inputs: Sequence[Any]) -> list[Any]:
    """The same content in new tensors that end with the call, so that finalizers run before the next call is prepared.

    With the tensors themselves, they would run later, outside of the measured time.
    """
    aliases: list[Any] = _pytree.tree_map(lambda x: x.data if isinstance(x, torch.Tensor) else x, list(inputs))
    return aliases


_choose = random.SystemRandom().randrange


def _reset_persisting_lines() -> None:
    """Release persisting lines of the L2 cache (the driver's call of this name)."""
    with contextlib.suppress(OSError, AttributeError):  # no such library, or one that is too old: nothing persists
        _driver().cuCtxResetPersistingL2Cache()


@lru_cache(1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _bytes(inputs: Sequence[Any]) -> int:
    return sum(x.nbytes for x in _pytree.tree_leaves(list(inputs)) if isinstance(x, torch.Tensor))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect(1)  # the youngest; all takes tens of milliseconds, and is done between two programs
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


__all__ = ["FRESH_SHARE", "SETS", "Effort", "Reading", "Samples", "Stopwatch", "is_behind", "median_error", "spread"]
