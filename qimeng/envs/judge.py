"""The verdict on what a candidate hands over.

Deals in trials, a worker's answers and budgets: structure, values, changed inputs, buffers, memory shared by two calls,
the judge's own clock, the output of a timed call. Which check covers which way to be wrong is listed in
`docs/judging.md`. Knows nothing about gates, patches or compilers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from qimeng.envs import accuracy
from qimeng.envs.accuracy import Error, Expected
from qimeng.envs.channel import Malformed
from qimeng.envs.forkserver import Process, WorkerFailed
from qimeng.envs.outputs import Facts, Leaf, difference, facts_from_json, facts_to_json, hand_over, take
from qimeng.envs.reference import References
from qimeng.envs.timing import MOST_LEAD_MS
from qimeng.envs.trials import Trial
from qimeng.envs.witness import slots_of
from qimeng.envs.worker import Draw
from qimeng.interfaces import Accuracy

RUNS = 3
"""Times that the first trial is run."""
RUNS_OVERLAPPING = 16
"""The same where a kernel may be wrong now and then (`qimeng.envs.kernel_facts.overlapping_reads`)."""
NOT_REPEATABLE = "not repeatable bit for bit: {} runs on the same inputs differ, each within its error budget"

CLOCK_SHARE = {"cuda": 0.8, "cpu": 0.4}
"""Least share of the judge's own time that an event time must reach; judge and worker may be given a CPU's cores in
turn."""
CLOCK_FROM_MS = {"cuda": 0.1, "cpu": 1.0}
"""Where eager is shorter, calls are not held against the judge's clock: hand-over, or on a GPU what a call costs the
host, takes as long as they do. The output of a timed call is checked there too."""
CLOCK_SLACK_MS = {"cuda": 0.2, "cpu": 1.0}
"""What hand-over may take longer than when it was measured: all calls together on a GPU; on the CPU each call, since
that is also what fresh inputs cost where caches are not flushed before a timed call."""
LAUNCH_MS = {"cuda": MOST_LEAD_MS, "cpu": 0.0}
"""What launching a call may cost the host, which events do not count."""
CLOCK_BESIDE = 0.25
"""Share of what making inputs and handing outputs over takes in the judge by which it may take longer in a worker."""
CLOCK_BATCH_MS = 10.0
CLOCK_CALLS = {"cuda": 64, "cpu": 8}
"""Calls that the judge's clock times together: for so long, at most so many, so that hand-over counts for little."""


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        accuracy: errors beside their budgets, of the output nearest to (or farthest above) its budget.
        failure: class of the failure; None where everything is right.
        error: why, in words.
        notes: what is to be said of a program that is right.
    """

    accuracy: Accuracy | None = None
    failure: str | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True where everything is right."""
        return self.failure is None


class Tally:
    """Collects errors over outputs and trials; the output nearest to its budget, or farthest above, is what counts."""

    def __init__(self) -> None:
        self.worst, self.error, self.budget = -1.0, Error(), Error()
        self.kernelbench: bool | None = None
        self.trials = 0

    def add(self, error: Error, expected: Expected) -> None:
        """Note the error of one output."""
        if not accuracy.is_float(expected.value):
            return
        budget = expected.budget
        share = max(error.max / budget.max, error.rms / budget.rms)
        if share > self.worst:
            self.worst, self.error, self.budget = share, error, budget

    def accuracy(self, reference: str, dropped: Iterable[str]) -> Accuracy:
        """The result.

        Args:
            reference: what the errors are against.
            dropped: distributions that were not used.
        """
        error, budget = self.error, self.budget
        return Accuracy(
            error.max,
            error.rms,
            budget.max,
            budget.rms,
            self.kernelbench,
            reference,
            self.trials,
            tuple(sorted(dropped)),
        )


@dataclass(frozen=True)
class Comparison:
    """What `Judge.compare` found.

    Attributes:
        facts: structure of what was handed over.
        tensors: what was handed over; empty where the structure is wrong.
        error: what is wrong, in words; None where nothing is.
    """

    facts: Facts
    tensors: list[torch.Tensor]
    error: str | None


class Judge:
    """Compares what a worker hands over with what it should be.

    Args:
        references: makes the trials.
        limit: tells how many seconds a call may take.
    """

    def __init__(self, references: References, limit: Callable[[], float]):
        self.references, self._limit = references, limit

    @property
    def limit_s(self) -> float:
        """Seconds that a call may take."""
        return self._limit()

    def check(
        self,
        worker: Process,
        trials: Iterable[Trial],
        between: Callable[[], None] = lambda: None,
        runs: int = RUNS,
    ) -> Verdict:
        """Try the program that the worker has loaded.

        The first trial is run a few times; every run has to be right, and runs that differ are noted. The outputs of
        the first call are looked at again after the last, since none may have touched them.

        Args:
            worker: with the program loaded.
            trials: what to try it on.
            between: called between two runs.
            runs: of the first trial.

        Raises:
            WorkerFailed: the worker crashed, hung, ran out of memory, or its program raised.
        """
        refs, tally = self.references, Tally()
        source = iter(trials)
        trial = next(source, None)
        first: tuple[Trial, Facts] | None = None
        sums: set[tuple[int, ...]] = set()
        error: str | None = None
        number = 0
        while trial is not None and error is None:
            if number:
                between()
            found, error = self._one(worker, number, trial, tally, runs)
            first = first or (trial, found.facts)
            if number < runs:
                sums.add(tuple(accuracy.checksum(x) for x in found.tensors))
                tally.trials = 1
            del found
            number += 1
            if error is None and number > 1:
                worker.call("release", self.limit_s, keep=[0], tidy=refs.plan.tidy)
            if number >= runs:
                if refs.plan.tidy:
                    first[0].eager.clear()
                trial = None  # its memory may be what the next one needs
                trial = next(source, None) if error is None else None
        if error is None and first is not None:
            error = self._look_again(worker, *first)
        worker.call("release", self.limit_s, tidy=refs.plan.tidy)
        notes = (NOT_REPEATABLE.format(runs),) if len(sums) > 1 else ()
        return Verdict(tally.accuracy(refs.kind, refs.dropped), None if error is None else "wrong", error, notes)

    def check_guards(self, worker: Process) -> Verdict:
        """Whether the program refuses inputs of another shape, stride, dtype, device or number than it was made for.

        A specification fixes these; on anything else a program has to raise ValueError, whatever it could compute.
        """
        accepted, _ = worker.call("foreign", self.limit_s, seed=self.references.draw_seed())
        if not isinstance(accepted, list):
            raise WorkerFailed("protocol", "the answer makes no sense: no list of what was accepted")
        if not accepted:
            return Verdict()
        what = ", ".join(str(a) for a in accepted)[:300]
        return Verdict(failure="wrong", error=f"inputs that it was not made for raise no ValueError: {what}")

    def check_clock(self, worker: Process, trials: Iterable[Trial], device_ms: float) -> Verdict:
        """Hold an event time against the judge's own clock, which stops after its copy of the output.

        A busy host delays one call, a cheat delays all.

        Args:
            worker: with the program loaded.
            trials: one call for each, until one agrees; the outputs are checked as well.
            device_ms: the time that the worker's events gave.
        """
        verdict = Verdict()
        for trial in trials:
            verdict = self._check_clock(worker, trial, device_ms)
            if verdict.failure != "clock":
                break
        return verdict

    def check_timed(self, worker: Process, draw_of: Callable[[int, int], Draw], few: bool = False) -> Verdict:
        """Look at the outputs of some timed calls, which the worker drew after the call.

        Args:
            worker: with the program that was timed.
            draw_of: number of the round of timing and of the call in it to the inputs that the call had.
            few: whether one is enough.
        """
        leaves = [leaf for leaf in self.references.facts.leaves if leaf.is_tensor]
        nbytes = sum(math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize for leaf in leaves)
        for slot in range(1 if few else slots_of(max(nbytes, self.references.input_bytes))):
            error = self._wrong_when_timed(worker, slot, draw_of)
            if error is not None:
                return Verdict(failure="wrong", error=f"in a call that was timed: {error}")
        return Verdict()

    def _wrong_when_timed(self, worker: Process, slot: int, draw_of: Callable[[int, int], Draw]) -> str | None:
        refs = self.references
        data, files = worker.call("timed", self.limit_s, slot=slot)
        try:
            trial = refs.make(draw_of(int(data["round"]), int(data["call"])))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            _close(files)
            raise WorkerFailed("protocol", f"the answer makes no sense: no such timed call: {error}") from error
        if trial is None:
            _close(files)
            return None
        if slot == 0:
            refs.keep(trial)
        data["facts"] = facts_to_json(refs.facts)
        return self.compare((data, files), refs.facts, trial.outputs, Tally(), partial(refs.look_again, trial)).error

    def compare(
        self,
        answer: tuple[Any, list[int]],
        expected_facts: Facts,
        expected: Sequence[Expected],
        tally: Tally,
        look_again: Callable[[int, torch.Tensor, Error], Expected | None] = lambda number, actual, error: None,
    ) -> Comparison:
        """What is wrong with an answer that hands tensors over.

        Args:
            answer: of the worker; its files are closed.
            expected_facts: structure of the outputs.
            expected: values of the outputs, then of further tensors handed over.
            tally: where errors are noted.
            look_again: what a tensor that is out of bounds may be all the same (`References.look_again`).

        Raises:
            WorkerFailed: the answer is malformed.
        """
        data, files = answer
        try:
            facts = facts_from_json(data["facts"])
            text = difference(facts, expected_facts)
            if text is not None:
                return Comparison(facts, [], text)
            leaves = [leaf for leaf in facts.leaves if leaf.is_tensor]
            count = len(leaves)
            leaves += [_leaf_of(e.value) for e in expected[count:]]
            tensors = take(data["tensors"], files, leaves)
        except (Malformed, KeyError, TypeError) as error:
            raise WorkerFailed("protocol", f"the answer makes no sense: {error}") from error
        finally:
            _close(files)
        for number, (actual, e) in enumerate(zip(tensors, expected, strict=True)):
            found, text = accuracy.check(actual, e)
            if text is not None and (wider := look_again(number, actual, found)) is not None:
                text, e = None, wider
            tally.add(found, e)
            if text is not None:
                name = f"output {number}" if number < count else "a buffer that the call updates"
                return Comparison(facts, tensors, f"{name}: {text}")
        return Comparison(facts, tensors, None)

    # -- parts

    def _wrong(self, trial: Trial, number: int, actual: torch.Tensor) -> str | None:
        """What is wrong with an output, in words; None where it is right."""
        error, text = accuracy.check(actual, trial.expected[number])
        return text if text and self.references.look_again(trial, number, actual, error) is None else None

    def _one(
        self, worker: Process, number: int, trial: Trial, tally: Tally, runs: int
    ) -> tuple[Comparison, str | None]:
        refs = self.references
        answer = worker.call(
            "trial",
            self.limit_s,
            number=number,
            draw=trial.draw,
            mutated=refs.mutated,
            expected_bytes=refs.output_bytes,
            in_place=number % 2 == 1 and not any(leaf.shares for leaf in refs.facts.leaves),
            copies=refs.plan.copies,
        )
        tally.trials += 1
        changed = answer[0].get("changed") if isinstance(answer[0], dict) else None
        if not isinstance(changed, list):
            _close(answer[1])
            raise WorkerFailed("protocol", "the answer makes no sense: no list of what changed")
        found = self.compare(answer, refs.facts, trial.expected, tally, partial(refs.look_again, trial))
        text = found.error
        if text is None and changed:
            text = f"the call changed {', '.join(str(c) for c in changed)[:300]}"
        if trial.eager and found.tensors:
            pairs = zip(found.tensors, trial.eager, strict=False)
            tolerance = refs.spec.tolerances.kernelbench
            tally.kernelbench = all(accuracy.kernelbench_close(a, e, tolerance) for a, e in pairs)
        if text is None:
            return found, None
        where = f"on inputs {trial.draw.distribution!r}"
        if trial.draw.parameter_seed is not None:
            where += " and parameters changed by load_state_dict"
        if 0 < number < runs:
            where += f", run {number + 1} of {runs}"
        return found, f"{where}: {text}"

    def _look_again(self, worker: Process, trial: Trial, facts: Facts) -> str | None:
        data, files = worker.call("again", self.limit_s, number=0)
        if not isinstance(data, dict):
            _close(files)
            raise WorkerFailed("protocol", "the answer makes no sense: nothing was handed over")
        data["facts"] = facts_to_json(facts)
        refs = self.references
        tensors = [leaf for leaf in refs.facts.leaves if leaf.is_tensor]
        follow = {i for i, t in enumerate(tensors) if any(name.startswith("parameter ") for name in t.shares)}

        def look_again(number: int, actual: torch.Tensor, error: Error) -> Expected | None:
            """A parameter that is returned has new values by now, in eager as well."""
            return trial.expected[number] if number in follow else refs.look_again(trial, number, actual, error)

        found = self.compare((data, files), refs.facts, trial.expected, Tally(), look_again)
        return None if found.error is None else f"a later call changed what the first one returned: {found.error}"

    def _check_clock(self, worker: Process, trial: Trial, device_ms: float) -> Verdict:
        """A few calls, inputs made and outputs handed over; what these two take is measured here, and subtracted.

        Nothing that a candidate's process says of its own time counts. Each call has inputs of its own, the trial's at
        a random place among them, which come to be while the clock runs: nothing can be computed for them before. Which
        place that is, the worker hears when all calls were made: none of them can be left out. On a GPU the memory that
        outputs are handed over in is mapped before the clock starts, and zeroed.
        """
        refs = self.references
        copies = [torch.zeros_like(e.value) for e in trial.outputs]
        kind = refs.device.type
        calls = max(1, min(math.ceil(CLOCK_BATCH_MS / device_ms), CLOCK_CALLS[kind], refs.input_sets, refs.output_sets))
        draws = [replace(trial.draw, seed=refs.draw_seed()) for _ in range(calls)]
        keep = refs.draw_seed() % calls
        warm_up, draws[keep] = draws[keep], trial.draw
        around = [self._without_calls(draws, copies)]
        trays = self._taken(worker.call("arm", self.limit_s, warm_up=warm_up, calls=calls))
        for tray in trays:
            tray.zero_()

        def run() -> tuple[Any, list[int]]:
            worker.call("fire", self.limit_s, draws=draws)
            return worker.call("pick", self.limit_s, number=keep)

        whole = self._timed(run, trays, copies)
        wrong = next((t for n, copy in enumerate(copies) if (t := self._wrong(trial, n, copy))), None)
        del trays
        worker.call("release", self.limit_s, tidy=refs.plan.tidy)
        around.append(self._without_calls(draws, copies))
        beside = min(around) / calls
        outer = whole / calls - beside
        slack = CLOCK_SLACK_MS[kind] / (calls if kind == "cuda" else 1) + CLOCK_BESIDE * beside
        if wrong:
            return Verdict(failure="wrong", error=f"the output that the judge copied at once is wrong: {wrong}")
        if device_ms < CLOCK_SHARE[kind] * (outer - slack - LAUNCH_MS[kind]):
            text = f"events say {device_ms:.3f} ms a call, the judge's clock says {outer:.3f} ms"
            return Verdict(failure="clock", error=text)
        return Verdict()

    def _without_calls(self, draws: Sequence[Draw], outputs: Sequence[torch.Tensor]) -> float:
        """Milliseconds that all but the calls takes in this process: inputs of `draws`, and handing `outputs` over.

        A worker may take as long as it likes for that where it is asked; here nobody but the judge is. A kernel that
        does nothing stands for each call: the host's way to the device and back is no time of a candidate's. The worker
        holds no inputs meanwhile: both sets together may be more than the device has.
        """
        tick = torch.zeros(1, device=self.references.device)
        self._synchronize()
        began = time.perf_counter()
        for draw in draws:
            inputs = self.references.inputs(draw)
            torch.manual_seed(draw.seed)
            self._synchronize()
            tick.add_(1)
            self._synchronize()
            del inputs
        if self.references.device.type == "cuda":
            for x in outputs:
                torch.empty_like(x).copy_(x)
        else:
            items, files = hand_over(outputs)
            try:
                take(items, files, [_leaf_of(x) for x in outputs])
            finally:
                _close(files)
        self._synchronize()
        return (time.perf_counter() - began) * 1e3

    def _timed(
        self, call: Callable[[], tuple[Any, list[int]]], trays: list[torch.Tensor], copies: Sequence[torch.Tensor]
    ) -> float:
        """Copy what `call` puts on the trays; milliseconds until the copies were there."""
        self._synchronize()
        began = time.perf_counter()
        answer = call()
        if self.references.device.type != "cuda":
            trays = self._taken(answer)
        for copy, x in zip(copies, trays, strict=True):
            copy.copy_(x)
        self._synchronize()
        return (time.perf_counter() - began) * 1e3

    def _taken(self, answer: tuple[Any, list[int]]) -> list[torch.Tensor]:
        """The tensors that a worker hands over, shaped like eager's outputs."""
        data, files = answer
        leaves = [leaf for leaf in self.references.facts.leaves if leaf.is_tensor]
        try:
            return take(data["tensors"], files, leaves)
        except (Malformed, KeyError, TypeError) as error:
            raise WorkerFailed("protocol", f"the answer makes no sense: {error}") from error
        finally:
            _close(files)

    def _synchronize(self) -> None:
        if self.references.device.type == "cuda":
            torch.cuda.synchronize(self.references.device)


def _leaf_of(tensor: torch.Tensor) -> Leaf:
    return Leaf("Tensor", tuple(tensor.shape), (), str(tensor.dtype).removeprefix("torch."), tensor.device.type)


def _close(files: Iterable[int]) -> None:
    for fd in files:
        os.close(fd)


__all__ = ["Comparison", "Judge", "Tally", "Verdict"]
