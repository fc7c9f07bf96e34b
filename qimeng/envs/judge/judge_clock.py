"""The judge's own clock: times batches of calls from outside the process that runs them.

Deals in batches of a candidate, of eager and of empty calls, all with the same inputs and protocol, in milliseconds of
this process. The clock starts, the inputs are written, the signal is given, all outputs are copied, the clock stops. A
process may change its own clocks, tables or memory, but it cannot have a right result without doing the work in this
span. The outputs to check are drawn after all were copied. `decide` has the last word on a time. Knows nothing about
events.
"""

from __future__ import annotations

import math
import os
import random
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.errors import error_budget
from qimeng.envs.judge.baseline import Baseline
from qimeng.envs.judge.clock_rule import ROUNDS, Readings, Ruling, decide
from qimeng.envs.judge.trials import Trial
from qimeng.envs.judge.verdicts import Judge, Verdict
from qimeng.envs.workers.channel import Malformed
from qimeng.envs.workers.forkserver import Process, WorkerFailed
from qimeng.envs.workers.outputs import difference, facts_from_json, without_shares
from qimeng.envs.workers.shared_buffers import ALIGNED, Layout, Remote, stage
from qimeng.envs.workers.stopwatch import Stopwatch
from qimeng.envs.workers.tensor_bits import BLOCK, block, blocks
from qimeng.envs.workers.worker_setup import Draw

NOT_TIMED = "not-timed"
"""Class of failure of a program that could not be timed. No speed is reported; judging it again may help."""
BATCH_MS = 5.0
"""Milliseconds that a batch takes at least, where that needs no more calls than `MOST_CALLS`."""
MOST_CALLS = {"cuda": 32, "cpu": 64}
FASTER = 8
"""How many times faster than eager a program may be and a batch of it still be long enough."""
QUEUED_LAUNCHES = 512
"""Maximum number of launches that are queued before the first starts. With more, the host would wait forever (the ring
of a channel holds about 1,024)."""
QUEUE_S = 2.0
"""Seconds after which a program that is still not queued is taken to wait for its own results."""
MEMORY_SHARE = 4
"""One in so many of the sets of inputs or outputs that a worker may hold goes into a batch: three processes have one
each."""
OTHERS = 4
"""One in so many calls of a first batch has inputs of another distribution than as given, and masks may differ there:
no program can count on what it is timed on. Later batches are like the calls whose time was reported, since a right
program may be slower on other inputs, such as where it takes an exact way."""
SLOTS, SMALL_BYTES = 4, 1 << 26
"""Outputs that are checked against the reference of small ones (64 MiB at most); of larger ones one is."""
LEAST_NORM = 1e-15
"""Below it, too many of the squares may be less than float32 has numbers for."""
SUSPECTS = 2
"""Number of suspicious outputs that are checked, besides the drawn ones."""

_random = random.SystemRandom()


@dataclass
class _Round:
    """The inputs of one batch.

    Attributes:
        draws: of each call.
        content: the inputs, as they lie in the memory; empty once they were used.
        seeds: of the calls' random numbers; none where nothing is drawn.
        others: inputs that are no tensors; see `qimeng.envs.workers.call_batch.Batch.run`.
    """

    draws: list[Draw]
    content: torch.Tensor
    seeds: list[int]
    others: list[list[tuple[int, Any]]]


class OuterClock:
    """Compares a worker's reported times with the judge's own clock.

    Args:
        judge: compares outputs; its references make the inputs.
        baseline: the process in which eager runs, never a candidate.
        operators: that a call of eager has; None where that is not known.
        now: seconds.
    """

    def __init__(
        self,
        judge: Judge,
        baseline: Baseline,
        operators: int | None = None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.judge, self.references, self.baseline = judge, judge.references, baseline
        self._operators, self._now = operators, now
        self._stopwatch: Stopwatch | None = None
        self._value = 0
        device = self.references.device
        self._can_queue = device.type == "cuda" and not self.references.random
        self._queues, self._eager_waits = self._can_queue, False
        self._device = device
        self._clocks = ("wall",) if device.type == "cuda" else ("cpu", "wall")

    def check(self, worker: Process, told_ms: float, eager_ms: float, late_ms: float = 0.0) -> Verdict:
        """Whether the program that `worker` has loaded takes the reported time, and is right while timed.

        Args:
            worker: with the program loaded.
            told_ms: the program's time as reported by its worker.
            eager_ms: eager's time, measured alike in a process of its own.
            late_ms: how much of that the device may have waited for the host.

        Returns:
            A verdict whose failure is ``"clock"`` where the time is refuted, `NOT_TIMED` where it is uncertain,
            ``"wrong"`` where a call of the batch was.
        """
        self._queues = self._can_queue
        calls = self._calls(told_ms, eager_ms)
        times = {clock: Readings(calls) for clock in self._clocks}
        ruling = Ruling(None, "nothing was measured")
        while len(times[self._clocks[0]].candidate) < ROUNDS:
            first = not times[self._clocks[0]].candidate
            seed = self.references.parameter_seed() if first else self.references.timed_parameter_seed()
            batch, layout = self._prepared(calls, seed, OTHERS if first else 0)
            try:
                times, candidate, eager, problem = self._measured(worker, batch, layout, times)
            except Malformed as error:
                raise WorkerFailed("protocol", f"the answer makes no sense: {error}") from error
            if problem:
                return Verdict(failure="wrong", error=f"in a call that was timed: {problem}")
            unlike = [n for n in range(calls) if calls == 1 or not _alike(layout, n, candidate, eager)]
            del eager  # this and the inputs are as large as what a trial needs
            batch.content = torch.empty(0)
            if unlike and (verdict := self._checked(layout, batch, candidate, unlike[:SUSPECTS])).failure:
                return verdict
            if all(found.candidate for found in times.values()):
                ruling = self._ruling(times, told_ms, eager_ms, late_ms)
            if ruling.ok:
                break
            candidate = torch.empty(0)
        if ruling.ok is None:
            return Verdict(failure=NOT_TIMED, error=f"not timed: {ruling.text}")
        if not ruling.ok:
            return Verdict(failure="clock", error=ruling.text)
        drawn = _random.sample(range(calls), min(calls, self._slots())) if calls > 1 else []
        return self._checked(layout, batch, candidate, drawn)

    # -- parts

    def _ruling(self, times: dict[str, Readings], told_ms: float, eager_ms: float, late_ms: float) -> Ruling:
        """Combined ruling of all clocks: each can refute a time, and the first can confirm it."""
        kind = self._device.type
        first, *others = (decide(times[clock], told_ms, eager_ms, kind, late_ms) for clock in self._clocks)
        return next((r for r in others if first.ok and r.ok is False), first)

    def _calls(self, told_ms: float, eager_ms: float) -> int:
        """Number of calls in a batch. Eager's time counts too, so a false report cannot choose it."""
        refs = self.references
        wanted = int(BATCH_MS / max(told_ms, eager_ms / FASTER)) + 1
        room = min(refs.input_sets, refs.output_sets) // MEMORY_SHARE
        queued = QUEUED_LAUNCHES // (3 * (self._operators or 20) + 4) if self._queues else wanted
        return max(1, min(wanted, MOST_CALLS[self._device.type], room, queued))

    def _slots(self) -> int:
        """Outputs of a batch that are checked against the reference."""
        nbytes = max(sum(self.references.output_bytes), self.references.input_bytes)
        return SLOTS if nbytes <= SMALL_BYTES else 1

    def _prepared(self, calls: int, parameter_seed: int | None, others: int = OTHERS) -> tuple[_Round, Layout]:
        """New inputs: most as given, one in so many (`others`) from other distributions; 0 for none."""
        refs = self.references
        names = [d for d in refs.distributions if d not in refs.dropped] or ["given"]
        draws = []
        for _ in range(calls):
            name = _random.choice(names) if others and _random.randrange(others) == 0 else "given"
            draws.append(Draw(refs.draw_seed(), name, parameter_seed))
        leaves = [leaf for leaf in refs.facts.leaves if leaf.is_tensor]
        layout, content = Layout((), (), 0, 0), torch.empty(0, dtype=torch.uint8)
        numbers = []
        for number, draw in enumerate(draws):
            made = _pytree.tree_leaves(refs.inputs(draw))
            tensors = [x for x in made if isinstance(x, torch.Tensor)]
            numbers.append([(i, x) for i, x in enumerate(made) if not isinstance(x, torch.Tensor)])
            if number == 0:
                layout = Layout.of([tensors] * calls, leaves)
                content = torch.zeros(layout.first_output, dtype=torch.uint8, device=self._device)
            stage(layout, number, tensors, content)
        refs.tidy()
        seeds = [draw.seed for draw in draws] if refs.random else []
        return _Round(draws, content, seeds, numbers if any(numbers) else []), layout

    def _measured(
        self, worker: Process, batch: _Round, layout: Layout, before: dict[str, Readings]
    ) -> tuple[dict[str, Readings], torch.Tensor, torch.Tensor, str | None]:
        """One batch of each kind: `before` with its times, all outputs of candidate and eager, what is wrong.

        Eager and the empty calls run while the worker is paused. If some calls of the candidate's batch were not
        queued, its times are dropped.
        """
        queued = self._queues
        with worker.paused(), self._armed(self.baseline.running(), batch, layout) as remote:
            nothing, _, _ = self._timed(self.baseline.running(), remote, batch, nothing=True)
            eager, copied, _ = self._timed(self.baseline.running(), remote, batch, nothing=False)
            if len(batch.draws) == 1:  # it is large, and the candidate's is held against the reference in any case
                copied = torch.empty(0)
            again, _, _ = self._timed(self.baseline.running(), remote, batch, nothing=True)
        with self._armed(worker, batch, layout) as remote:
            candidate, outputs, facts = self._timed(worker, remote, batch)
            changed = not torch.equal(remote.inputs()[ALIGNED:], batch.content[ALIGNED:])
        problem = "the call changed its inputs" if changed else self._structure(facts, len(batch.draws))
        if self._queues != queued:
            return {clock: Readings(len(batch.draws)) for clock in self._clocks}, outputs, copied, problem
        how = self._queues, self._queues and self._eager_waits
        rounds = {c: ((nothing[c], again[c]), eager[c], candidate[c], *how) for c in self._clocks}
        after = {clock: before[clock].with_round(*rounds[clock]) for clock in self._clocks}
        return after, outputs, copied, problem

    @contextmanager
    def _armed(self, process: Process, batch: _Round, layout: Layout) -> Iterator[Remote]:
        """The memory of `process` for a batch."""
        refs = self.references
        draw = replace(batch.draws[0], seed=refs.draw_seed(), distribution="given")
        limit_s = self.judge.limit_s
        handed, files = process.call("arm", limit_s, warm_up=draw, layout=layout, mutated=refs.mutated)
        remote = Remote(layout, handed, files, self._device)
        try:
            yield remote
        finally:
            remote.close()
            if process.alive:
                process.call("release", limit_s, tidy=refs.plan.tidy)

    def _timed(
        self, process: Process, remote: Remote, batch: _Round, **options: Any
    ) -> tuple[dict[str, float], torch.Tensor, list[Any]]:
        """Milliseconds from before the inputs are there until all outputs are copied; those, and their structure.

        On the CPU, the process's own processor time comes first, because it excludes others on the same cores.
        """
        limit_s = self.judge.limit_s
        copies = torch.zeros(remote.layout.nbytes - remote.layout.first_output, dtype=torch.uint8, device=self._device)
        self._value += 1
        signal = torch.tensor([self._value], dtype=torch.int32).view(torch.uint8).to(self._device)
        waits = self._eager_waits and process is self.baseline.running() and not options.get("nothing")
        facts = self._queued(process, remote, batch, signal, options) if self._queues and not waits else None
        self._synchronize()
        began, cpu = self._now(), process.cpu_seconds()
        remote.write(batch.content)
        self._flush()
        remote.signal(signal)
        self._synchronize()
        if facts is not None:
            process.call("finish", limit_s)
        else:
            facts, files = process.call("fire", limit_s, seeds=batch.seeds, others=batch.others, **options)
            _close(files)
        remote.read(copies)
        self._synchronize()
        times = {"wall": (self._now() - began) * 1e3, "cpu": (process.cpu_seconds() - cpu) * 1e3}
        return times, copies, facts

    def _queued(
        self, process: Process, remote: Remote, batch: _Round, signal: torch.Tensor, options: dict[str, Any]
    ) -> list[Any] | None:
        """The structure of what the calls will return, once all are queued; None where that cannot be.

        A program that waits for its own results cannot be queued. It is released, and not queued again. Where that is
        eager, as with a loop over the rows that an expert gets, others are queued all the same.
        """
        if batch.others:
            self._queues = False
            return None
        try:
            process.send("queue", value=self._value, **options)
            late = not select.select([process.channel_fd, process.status_fd], [], [], QUEUE_S)[0]
            if late:
                if process is not self.baseline.running():
                    self._queues = False
                elif options.get("nothing"):  # this driver cannot
                    self._can_queue = self._queues = False
                else:
                    self._eager_waits = True
                remote.write(batch.content)
                remote.signal(signal)
                self._synchronize()
            facts, files = process.answer(self.judge.limit_s)
            _close(files)
            if late:
                process.call("finish", self.judge.limit_s)
                return None
            return list(facts) if isinstance(facts, list) else []
        except WorkerFailed as failed:
            remote.signal(signal)  # else its device would wait for ever
            if failed.kind != "error" or process is not self.baseline.running():
                raise
            self._can_queue = self._queues = False  # this driver or this module cannot: the host is in all batches
            return None

    def _structure(self, facts: Any, calls: int) -> str | None:
        """How what a timed call returned differs from eager's in structure, class, type; None where none does."""
        if not isinstance(facts, list) or len(facts) != calls:
            raise Malformed("no list of what was returned")
        expected = without_shares(self.references.facts)
        texts = (difference(without_shares(facts_from_json(item)), expected) for item in facts)
        return next((text for text in texts if text is not None), None)

    def _checked(self, layout: Layout, batch: _Round, copies: torch.Tensor, numbers: Sequence[int]) -> Verdict:
        """Hold the outputs of some calls against the reference."""
        for number in numbers:
            trial = self.references.make(batch.draws[number])
            if trial is None:  # its distribution is dropped
                continue
            text = self._wrong(trial, _outputs(layout, number, copies))
            if text is not None:
                return Verdict(failure="wrong", error=f"in a call that was timed: {text}")
        return Verdict()

    def _wrong(self, trial: Trial, outputs: Sequence[torch.Tensor]) -> str | None:
        for number, (actual, expected) in enumerate(zip(outputs, trial.outputs, strict=True)):
            error, text = error_budget.check(actual, expected)
            if text and self.references.look_again(trial, number, actual, error) is None:
                return f"output {number} on inputs {trial.draw.distribution!r}: {text}"
        return None

    def _flush(self) -> None:
        """The judge clears the inputs from the L2 cache before the signal."""
        if self._device.type == "cuda":
            self._stopwatch = self._stopwatch or Stopwatch(self._device)
            self._stopwatch.flush()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _outputs(layout: Layout, number: int, copies: torch.Tensor) -> list[torch.Tensor]:
    """What call `number` returned, of a copy of all outputs."""
    places = layout.outputs[number]
    return [replace(place, offset=place.offset - layout.first_output).of(copies) for place in places]


def _alike(layout: Layout, number: int, mine: torch.Tensor, eager: torch.Tensor) -> bool:
    """Quick check whether call `number` agrees with eager: within a tenth of the root mean square, or of the elements.

    This is no verdict; suspicious outputs are then checked closely.
    """
    for a, b in zip(_outputs(layout, number, mine), _outputs(layout, number, eager), strict=True):
        if a.dtype.is_floating_point:
            near = _quickly_near(a, b)
            if not (_norm(a, b) <= 0.1 * _norm(None, b) if near is None else near):
                return False
        elif sum(int((block(a, w) != block(b, w)).sum()) for w in blocks(a.shape)) > 0.1 * a.numel():
            return False
    return True


def _quickly_near(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    """Whether `a` is within a tenth of the root mean square of `b`; None where float32 cannot tell.

    That is where something is not finite, or where squares may leave its range.
    """
    difference, size = 0.0, 0.0
    for where in blocks(b.shape):
        mine, other = block(a, where), block(b, where)
        precision = torch.promote_types(other.dtype, torch.float32)
        difference = math.hypot(difference, float(torch.linalg.vector_norm(mine - other, dtype=precision)))
        size = math.hypot(size, float(torch.linalg.vector_norm(other, dtype=precision)))
    return difference <= 0.1 * size if LEAST_NORM < size < math.inf and math.isfinite(difference) else None


def _norm(x: torch.Tensor | None, y: torch.Tensor) -> float:
    """Root of the sum of the squares of `x - y`, or of `y`, where `y` is finite; part by part, in float64."""
    parts = [torch.zeros((), dtype=torch.float64, device=y.device)]
    for where in blocks(y.shape):
        others = torch.atleast_1d(block(y, where)).split(BLOCK, -1)
        mine = torch.atleast_1d(block(x, where)).split(BLOCK, -1) if x is not None else (None,) * len(others)
        for a, b in zip(mine, (part.double() for part in others), strict=True):
            found = b if a is None else a.double() - b
            parts.append(torch.linalg.vector_norm(torch.where(b.isfinite(), found, 0.0)))
    return float(torch.stack(parts).norm())


def _close(files: Sequence[int]) -> None:
    for fd in files:
        os.close(fd)


__all__ = ["NOT_TIMED", "OuterClock"]
