"""The verdict on a candidate's outputs.

Deals in trials, a worker's answers and budgets: structure, values, changed inputs, buffers, memory shared by two calls.
The judge's own clock is in `qimeng.envs.judge.judge_clock`. `docs/judging.md` lists all checks. Knows nothing about
gates, patches or compilers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.errors.small_vectors import errors_of_right
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.trials import Trial
from qimeng.envs.workers.channel import Malformed
from qimeng.envs.workers.forkserver import Process, WorkerFailed
from qimeng.envs.workers.kernel_launches import Launch
from qimeng.envs.workers.outputs import Facts, Leaf, difference, facts_from_json, facts_to_json, without_shares
from qimeng.envs.workers.small_tensors import checksums, weighted_sums
from qimeng.envs.workers.tensor_transfer import take
from qimeng.envs.workers.worker_reports import entry_of, launches_from
from qimeng.envs.workers.worker_setup import Draw
from qimeng.interfaces import Accuracy

RUNS = 3
"""Times that the first trial is run."""
RUNS_OVERLAPPING = 16
"""The same where a kernel may be wrong now and then (`qimeng.backend.facts.overlapping_reads`)."""
REPEATS, REPEATS_S = 100, 1.0
"""Calls of a final verification on the same inputs again and again, at most, and seconds that they may take."""
MUST_REPEAT = "the spec asks for the same bits in every call, and {} runs on the same inputs differ"
NOT_REPEATABLE = "not repeatable bit for bit: {} runs on the same inputs differ, each within its error budget"


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        accuracy: errors beside their budgets, of the output nearest to (or farthest above) its budget.
        failure: class of the failure; None where everything is right.
        error: why, in words.
        notes: remarks on a program that is right.
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
        share = error.share_of(budget)
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
        live: whether the tensors are the worker's memory itself, so that what is written there later shows.
    """

    facts: Facts
    tensors: list[torch.Tensor]
    error: str | None
    live: bool = False


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

        The first trial runs a few times. Every run must be right, and differing runs are noted. The outputs of the
        first call are checked again after the last call, since no call may change them.

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
        first: _First | None = None
        sums: set[tuple[int, ...]] = set()
        error: str | None = None
        number = 0
        while trial is not None and error is None:
            if number:
                between()
            found, error = self._one(worker, number, trial, tally, runs)
            first = first or self._kept(trial, found)
            if refs.plan.tidy:
                trial.eager.clear()
            if number < runs:
                sums.add(checksums(found.tensors))
                tally.trials = 1
            del found
            number += 1
            if error is None and number > 1:
                worker.call("release", self.limit_s, keep=[0], tidy=refs.plan.tidy)
            if number >= runs:
                trial = None  # its memory may be what the next one needs
                trial = next(source, None) if error is None else None
        if error is None and first is not None:
            error = self._look_again(worker, first)
        worker.call("release", self.limit_s, tidy=refs.plan.tidy)
        notes = (NOT_REPEATABLE.format(runs),) if len(sums) > 1 else ()
        return Verdict(tally.accuracy(refs.kind, refs.dropped), None if error is None else "wrong", error, notes)

    def check_guards(self, worker: Process) -> Verdict:
        """Whether the program refuses inputs of another shape, stride, dtype, device or number than it was made for.

        A specification fixes these. For anything else a program must raise ValueError.
        """
        accepted, _ = worker.call("foreign", self.limit_s, seed=self.references.draw_seed())
        if not isinstance(accepted, list):
            raise WorkerFailed("protocol", "the answer makes no sense: no list of what was accepted")
        if not accepted:
            return Verdict()
        what = ", ".join(str(a) for a in accepted)[:300]
        return Verdict(failure="wrong", error=f"inputs that it was not made for raise no ValueError: {what}")

    def check_timed(self, worker: Process, draw_of: Callable[[int, int], Draw]) -> Verdict:
        """Look at the output of a timed call, which the worker drew after the call.

        Args:
            worker: with the program that was timed, one that templates printed.
            draw_of: number of the round of timing and of the call in it to the inputs that the call had.
        """
        error = self._wrong_when_timed(worker, draw_of)
        return Verdict() if error is None else Verdict(failure="wrong", error=f"in a call that was timed: {error}")

    def _wrong_when_timed(self, worker: Process, draw_of: Callable[[int, int], Draw]) -> str | None:
        refs = self.references
        data, files = worker.call("timed", self.limit_s)
        try:
            trial = refs.make(draw_of(int(data["round"]), int(data["call"])))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            _close(files)
            raise WorkerFailed("protocol", f"the answer makes no sense: no such timed call: {error}") from error
        if trial is None:
            _close(files)
            return None
        refs.keep(trial)
        data["facts"] = facts_to_json(refs.facts)
        return self.compare((data, files), refs.facts, trial.outputs, Tally(), partial(refs.look_again, trial)).error

    def launches(self, worker: Process, draw: Draw, timeout_s: float) -> list[Launch]:
        """The kernels of a call as the profiler sees them; nobody looks at what the call returned.

        Args:
            worker: with the program loaded.
            draw: inputs and parameters of the call.
            timeout_s: seconds that it may take.
        """
        data, files = worker.call("launches", timeout_s, draw=draw)
        _close(files)
        worker.call("release", self.limit_s)
        return launches_from(entry_of(data, "kernels"))

    def profiled(self, worker: Process, draw: Draw, timeout_s: float) -> tuple[list[Launch], Verdict]:
        """The same, and whether what the call returned is right.

        Where the module refuses such parameters, the call has its own, and nobody looks at what it returned.
        """
        refs = self.references
        trial = refs.make(draw)
        draw = Draw(refs.draw_seed()) if trial is None else draw
        data, files = worker.call("launches", timeout_s, draw=draw)
        try:
            launches = launches_from(entry_of(data, "kernels"))
        except WorkerFailed:
            _close(files)
            raise
        if trial is None:
            _close(files)
            return launches, Verdict()
        found = self.compare(
            (data, files), without_shares(refs.facts), trial.outputs, Tally(), partial(refs.look_again, trial)
        )
        worker.call("release", self.limit_s)
        error = None if found.error is None else f"in a call that was profiled: {found.error}"
        return launches, Verdict(failure=None if error is None else "wrong", error=error)

    def check_repeats(self, worker: Process) -> Verdict:
        """Call the program again and again on a few inputs, in any order: each time it has to be right.

        That shows a race, or a wrong call among many, where a call takes little: as many calls as fit in `REPEATS_S`.
        Where the spec asks for it, each time with the same bits: of slow programs more calls are compared then.
        """
        refs, sums = self.references, dict[int, set[tuple[int, ...]]]()
        trials = list(refs.fresh(1 if refs.plan.tidy else 2))
        least = len(trials) * (4 if refs.spec.deterministic else 2)
        end, number = time.monotonic() + REPEATS_S, 0
        while trials and number < REPEATS and (number < least or time.monotonic() < end):
            which = refs.draw_seed() % len(trials)
            found, error = self._one(worker, number, trials[which], Tally(), 0)
            if error is not None:
                return Verdict(failure="wrong", error=f"call {number + 1} of the same program, {error}")
            sums.setdefault(which, set()).add(checksums(found.tensors))
            worker.call("release", self.limit_s, tidy=refs.plan.tidy)
            number += 1
        differ = any(len(s) > 1 for s in sums.values())
        if differ and refs.spec.deterministic:
            return Verdict(failure="wrong", error=MUST_REPEAT.format(number))
        return Verdict(notes=(NOT_REPEATABLE.format(number),) if differ else ())

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
            look_again: decides whether a tensor out of bounds is still acceptable (`References.look_again`).

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
        live = all(not x.numel() or "files" in item for x, item in zip(tensors, data["tensors"], strict=True))
        return Comparison(facts, tensors, self._wrong(tensors, count, expected, tally, look_again), live)

    # -- parts

    @staticmethod
    def _wrong(
        tensors: Sequence[torch.Tensor],
        count: int,
        expected: Sequence[Expected],
        tally: Tally,
        look_again: Callable[[int, torch.Tensor, Error], Expected | None],
    ) -> str | None:
        """What is wrong with tensors, the first `count` of which are outputs; None where nothing is."""
        right = errors_of_right(tensors, expected)
        for number, (actual, e) in enumerate(zip(map(accuracy.comparable, tensors), expected, strict=True)):
            found, text = error_budget.check(actual, e) if (known := right[number]) is None else (known, None)
            only_signs = e.signed and found.within(e.budget)  # of zeros, which no rounding changes
            if text is not None and not only_signs and (wider := look_again(number, actual, found)) is not None:
                text, e = None, wider
            tally.add(found, e)
            if text is not None:
                name = f"output {number}" if number < count else "a buffer that the call updates"
                return f"{name}: {text}"
        return None

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

    def _kept(self, trial: Trial, found: Comparison) -> _First:
        """What is kept of the first call. Where memory is tight, sums take the place of what its outputs should be."""
        seed = self.references.draw_seed()
        if not found.live:
            return _First(trial.draw, replace(found, tensors=[]), trial, seed)
        sums = weighted_sums(found.tensors, seed)
        return _First(trial.draw, found, None if self.references.plan.tidy else trial, seed, sums)

    def _look_again(self, worker: Process, first: _First) -> str | None:
        """Whether what the first call returned is still as it was.

        On a GPU the judge looks at the worker's memory itself, which it has held since; copies have to be asked for.
        """
        found = first.found
        if found.live and first.sums == weighted_sums(found.tensors, first.seed):
            return None
        refs = self.references
        trial = first.trial or refs.make(first.draw)
        if trial is None:
            return "a later call changed what the first one returned"
        tensors = [leaf for leaf in refs.facts.leaves if leaf.is_tensor]
        follow = {i for i, t in enumerate(tensors) if any(name.startswith("parameter ") for name in t.shares)}

        def look_again(number: int, actual: torch.Tensor, error: Error) -> Expected | None:
            """A returned parameter has new values by now, in eager as well."""
            return trial.expected[number] if number in follow else refs.look_again(trial, number, actual, error)

        if found.live:
            error = self._wrong(found.tensors, len(tensors), trial.expected, Tally(), look_again)
        else:
            data, files = worker.call("again", self.limit_s, number=0)
            if not isinstance(data, dict):
                _close(files)
                raise WorkerFailed("protocol", "the answer makes no sense: nothing was handed over")
            data["facts"] = facts_to_json(found.facts)
            error = self.compare((data, files), refs.facts, trial.expected, Tally(), look_again).error
        return None if error is None else f"a later call changed what the first one returned: {error}"


@dataclass(frozen=True)
class _First:
    """The first call of a program.

    Attributes:
        draw: its inputs and parameters.
        found: what was handed over.
        trial: what it should be; None where that is made again when it is needed.
        seed: of the sums, which no candidate knows.
        sums: over the bits of what was handed over, where that is still at hand.
    """

    draw: Draw
    found: Comparison
    trial: Trial | None
    seed: int
    sums: list[int] = field(default_factory=list)


def _leaf_of(tensor: torch.Tensor) -> Leaf:
    return Leaf("Tensor", tuple(tensor.shape), (), str(tensor.dtype).removeprefix("torch."), tensor.device.type)


def _close(files: Iterable[int]) -> None:
    for fd in files:
        os.close(fd)


__all__ = ["RUNS", "RUNS_OVERLAPPING", "Comparison", "Judge", "Tally", "Verdict"]
