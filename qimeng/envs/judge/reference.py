"""The reference: trials, each with what a candidate should return.

Deals in one specification: makes trials (inputs and parameters from secret seeds, with float64 results, eager's own
error, and the budget that follows). It stays in the judge's process. A worker gets only the seeds of the current trial.
Knows nothing about candidates.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from qimeng.envs.cost.memory_plan import Plan
from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.errors.extreme_inputs import ATTEMPTS, says_nothing
from qimeng.envs.errors.float64 import NEARBY, Near, tensors_in, to_double
from qimeng.envs.errors.nearby_inputs import most_nearby, second_look
from qimeng.envs.errors.small_vectors import errors_together
from qimeng.envs.judge.eager_reference import InputsRefused
from qimeng.envs.judge.sliced_reference import SlicedReference
from qimeng.envs.judge.trials import Trial, TrialPool
from qimeng.envs.workers.small_tensors import copies
from qimeng.envs.workers.worker_setup import Draw
from qimeng.spec.distributions import EXAMPLES, SECRET_SIZE, WILD
from qimeng.spec.perturb import SHARES

NOT_FINITE_LIMIT = 0.01
"""Largest share of values that are not finite. A distribution above it is dropped; extreme ones have their own rule
(`qimeng.envs.errors.extreme_inputs`)."""

SMALL = ("x0.01", "units")
"""A search tries one of these. Beside inputs of usual size, the error of a missing epsilon or of a padded lane that is
not zero stays within the budget."""


class References(SlicedReference):
    """Trials of one specification; arguments as `EagerReference`."""

    @cached_property
    def _pool(self) -> TrialPool:
        return TrialPool(self.plan.pool_bytes)

    def trials(self, count: int) -> Iterable[Trial]:
        """Trials one after the other: the user's own values, as given with other parameters, then other inputs.

        The first change is of a single row of each parameter, the shares of the later ones take turns. Of the other
        inputs, small ones (`SMALL`) come first.
        """
        others = [1 + number % (len(SHARES) - 1) for number in range(max(count, len(self.distributions)))]
        kinds = [k for k in zip(self.distributions[1:], others, strict=False) if k[0] not in self.dropped]
        draw = random.SystemRandom()
        draw.shuffle(kinds)
        revealing = draw.choice(SMALL)
        kinds.sort(key=lambda kind: kind[0] != revealing)
        given: list[Draw] = []
        first: list[tuple[str, int | None]] = [(EXAMPLES, None), ("given", 0)]
        for distribution, share in [*first, *kinds, *(("given", other) for other in others)]:
            if len(given) == count:
                return
            trial = self._draw(distribution, share if self.has_state else None, given)
            if trial is not None:
                given.append(trial.draw)
                yield trial
            del trial  # its memory may be what the next one needs

    def fresh(self, count: int) -> Iterable[Trial]:
        """New trials on inputs as given, which no process has seen."""
        for _ in range(count):
            trial = self.make(self._new_draw("given", self.parameter_seed()))
            if trial is not None:
                yield trial
            del trial

    def every_distribution(self) -> Iterable[Trial]:
        """New trials: the user's own values; with other parameters each distribution, those of secret size twice.

        Extreme inputs come first: they refuse most of what a search has accepted.
        """
        again, tried = [d for d in self.distributions if d in SECRET_SIZE], set()
        first = sorted(self.distributions, key=lambda d: d not in WILD)
        for distribution, perturbed in [(EXAMPLES, False), *((d, True) for d in (*first, *again))]:
            if distribution in self.dropped:
                continue
            trial = self._made(distribution, perturbed)
            if trial is not None:
                tried.add(distribution)
                yield trial
            elif distribution not in tried:
                self.dropped.add(distribution)
            del trial

    def make(self, draw: Draw) -> Trial | None:
        """The trial for `draw`; None where its distribution has to be dropped, or the module refuses such inputs."""
        try:
            return self._make(draw)
        except Exception as error:
            refused = isinstance(error, InputsRefused) or self._refused(draw, None, error) is not None
            if not refused or (draw.distribution == EXAMPLES and draw.parameter_seed is None):
                raise
            if draw.distribution not in (EXAMPLES, "given"):
                self.dropped.add(draw.distribution)
            return None
        finally:
            self.tidy()

    def keep(self, trial: Trial) -> None:
        """Let a trial that was made for one candidate serve later ones."""
        self._pool.keep(trial)

    def look_again(self, trial: Trial, number: int, actual: torch.Tensor, error: Error) -> Expected | None:
        """The accepted value of a tensor that is out of bounds; None if it is wrong.

        Args:
            trial: the trial.
            number: which of `trial.expected`.
            actual: what the candidate handed over.
            error: its error.
        """
        if number >= len(trial.outputs) or number in self._updating:
            self._allow_sums(trial)
        expected = trial.expected[number]
        if accuracy.is_float(expected.value):
            wider = second_look(error, lambda: trial.expected[number], lambda: self._look_nearby(trial))
            if wider is not None:
                return wider
            if trial.draw.distribution == "infinite":
                any_kind = number >= len(trial.outputs)
                if error_budget.same_but_for_few(actual, expected, any_kind):
                    return expected.excused(Error())
                hidden = None if any_kind else self._without_hidden(trial, number, actual)
                if hidden is not None and error_budget.same_but_for_few(actual, hidden, any_kind=True):
                    return hidden.excused(Error())
        elif number < len(trial.outputs) and self.accepts_selection(trial, number, actual):
            return expected
        if number < len(trial.outputs) and self._is_rounding(trial, number, actual):
            return expected.excused(error)
        return None

    def _without_hidden(self, trial: Trial, number: int, actual: torch.Tensor) -> Expected | None:
        """What is expected where the weights of infinite inputs are exact zeros; None where nothing has such weights.

        A mask gives a weight of exactly zero, and so does a declared form that prunes weights. Zero times infinity
        is no number. Kernels differ in which zeros they skip, eager's for attention among them, so that both values
        are right there, each where `actual` has its kind. What is infinite by one element and no number by another,
        hidden one may be either.
        """
        if not self.weighs or self.kind != "float64":
            return None
        expected = trial.expected[number]
        module = self._exact_module(self.state(trial.draw))
        with torch.no_grad():
            first, second = (tensors_in(module(*to_double(x, self._place)))[number] for x in self._finite(trial.draw))
        hidden = (first == second).to(self.device) & actual.isfinite()
        value, eager = torch.where(hidden, first.to(expected.value), expected.value), expected.eager
        if eager is None:
            return replace(expected, value=value)
        near = accuracy.measure(torch.where(hidden & eager.isfinite(), eager, value), value, eager)
        return replace(expected, value=value, error=expected.error.worst(near))  # eager's error had no number there

    def _finite(self, draw: Draw) -> Iterator[tuple[Any, ...]]:
        """Twice the inputs of an infinite `draw`, with other finite numbers in place of what is not finite there."""
        for number in (1.0, -2.0):

            def without(x: Any, given: Any, number: float = number) -> Any:
                if not isinstance(x, torch.Tensor) or not accuracy.is_float(x):
                    return x
                return torch.where(x.isfinite() | ~given.isfinite(), x, number)

            yield pytree.tree_map(without, self.inputs(draw), self.inputs(replace(draw, distribution="given")))

    def may_look_nearby(self, done: int, elements: int) -> bool:
        """Whether one more trial nearby is to be made, after `done` with so many elements of inputs and outputs."""
        return self.kind == "float64" and self.plan.way == "device" and done < most_nearby(elements)

    def near(self, done: int) -> Near:
        """Where to look next, after `done` trials nearby."""
        return Near(self.draw_seed(), NEARBY[done % len(NEARBY)])

    def release(self) -> None:
        """Give the memory of the pool and of the float64 module back."""
        self._pool.clear()
        self.exact = None
        self.tidy()

    # -- parts

    def _take(self, plan: Plan) -> None:
        """Go on with another plan, and give back what is kept."""
        super()._take(plan)
        self.release()
        self._pool = TrialPool(self.plan.pool_bytes)

    def _made(self, distribution: str, perturbed: bool) -> Trial | None:
        """A new trial. For extreme inputs, the first one on which eager's result is meaningful."""
        trial = None
        for _ in range(ATTEMPTS if distribution in WILD else 1):
            trial = trial or self.make(self._new_draw(distribution, self.parameter_seed() if perturbed else None))
        return trial

    def _draw(self, distribution: str, share: int | None, given: Sequence[Draw]) -> Trial | None:
        """A trial of this kind from the pool, or a new one; none of `given`, which this candidate gets already."""
        trial = self._pool.take((distribution, share), given)
        if trial is None:
            seed = None if share is None else self._parameter_seed(share)
            trial = self.make(self._new_draw(distribution, seed))
            if trial is not None:
                self.keep(trial)
        return trial

    def _look_nearby(self, trial: Trial) -> bool:
        """Widen `trial` by one more on inputs nearby; False where no more are to be made."""
        elements = sum(e.value.numel() for e in trial.expected) + self._input_elements
        if not self.may_look_nearby(trial.nearby, elements):
            return False
        try:
            other = self._make(trial.draw, self.near(trial.nearby), trial)
        except (torch.OutOfMemoryError, InputsRefused):
            return False
        finally:
            self.tidy()
        trial.nearby += 1
        if other is not None:
            trial.widen(other)
        return True

    def _make(self, draw: Draw, near: Near | None = None, to: Trial | None = None) -> Trial | None:
        """The trial of `draw`, or of inputs near its own, held against the values of `to`."""
        runs = self.runs(draw, near)
        tensors, exact = runs.eager, runs.exact
        outputs, buffers, shares = [], {}, [runs.overflow]
        jumps = bool(self._jumps)
        for number, tensor in enumerate(tensors):
            at = to.outputs[number].value if to else None
            expected, share = self.expect(tensor, exact[number], runs.moved[number], draw.distribution, jumps, at)
            exact[number] = torch.empty(0)  # as large as eager's output or twice that: gone as soon as it can be
            outputs.append(expected)
            shares.append(share)
        updated = copies([runs.state[key] for key in self.mutated])
        values = copies([runs.buffers[key] for key in self.mutated], [x.dtype for x in updated])
        errors = errors_together(updated, values)
        for key, tensor, value, error in zip(self.mutated, updated, values, errors, strict=True):
            at = to.buffers[key].value if to else None
            buffers[key], share = self.expect(tensor, value, Error(), draw.distribution, jumps, at, error)
            shares.append(share)
        if draw.distribution in WILD:
            if says_nothing(draw.distribution, outputs, max(shares)):
                return None
        elif max(shares) > NOT_FINITE_LIMIT:
            self.dropped.add(draw.distribution)
            if draw.distribution not in (EXAMPLES, "given"):
                return None
        plain = draw.distribution == EXAMPLES and draw.parameter_seed is None and near is None
        if plain and self.kind == "float64":
            tolerance = self.spec.tolerances.kernelbench
            pairs = zip(outputs, tensors, strict=True)
            agree = all(accuracy.kernelbench_close(o.value, t, tolerance) for o, t in pairs)
            self.exact_agrees = agree and self.exact_agrees is not False
        return Trial(draw, outputs, buffers, tensors if plain else [])


__all__ = ["NOT_FINITE_LIMIT", "SMALL", "References"]
