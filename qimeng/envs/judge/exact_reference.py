"""Float64 results beside eager's, and the error budget that follows.

Deals in one draw of inputs and parameters at a time. Knows nothing about which draws a candidate gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from qimeng.envs.errors import accuracy, discrete, error_budget
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.errors.explained import as_right, explained
from qimeng.envs.errors.float64 import NamedAsDouble, Near, aliases, tensors_in, to_double
from qimeng.envs.errors.selection import selected_values
from qimeng.envs.errors.small_vectors import errors_together
from qimeng.envs.judge.eager_reference import EagerReference, InputsRefused
from qimeng.envs.judge.random_operators import Draws, draws_of, repeating
from qimeng.envs.judge.trials import Trial
from qimeng.envs.workers.small_tensors import copies, copy_state
from qimeng.envs.workers.worker_setup import Draw
from qimeng.graph.rounded_up import RoundedUp, rounded_up
from qimeng.spec.distributions import WILD

LARGE = 64 << 20
"""Bytes of outputs from which on one draw shows what one ulp of the inputs changes, for all of its distribution."""


class ExactReference(EagerReference):
    """Float64 results for one specification, and the error that is allowed beside them; arguments as `EagerReference`.

    Attributes:
        exact_agrees: whether the float64 result itself passes KernelBench's own rule against eager; None where it was
            not checked.
        exact: the module in float64, once it was needed.
    """

    exact_agrees: bool | None = None
    exact: torch.nn.Module | None = None

    @cached_property
    def _moved(self) -> dict[str, list[Error]]:
        """By distribution, what one ulp of the inputs changes: over so many elements all draws have the same."""
        return {}

    def expect(
        self,
        eager: torch.Tensor,
        exact: torch.Tensor,
        moved: Error,
        distribution: str,
        jumps: bool,
        at: torch.Tensor | None = None,
        own: Error | None = None,
    ) -> tuple[Expected, float]:
        """What an output should be, and the share of its values that are not finite.

        Rounded inputs show errors for equal numbers and zeros. Eager is often exact on them, while another order of the
        same sums is not. So the floor is wide there.

        Args:
            eager: eager's output.
            exact: the float64 result.
            moved: change of that when the inputs move by one ulp.
            distribution: of the inputs.
            jumps: whether an element may jump (`qimeng.envs.errors.discrete`), which is no measure of the others.
            at: what the result is on the inputs that these are near to; eager's error is relative to it. Where
                terms nearly cancel, errors are large beside what is left, and on inputs nearby more is left.
            own: eager's error where it is known, and all is finite.
        """
        value = exact.to(eager.dtype)
        if not accuracy.is_float(eager):
            known = own is not None or torch.equal(value, eager)
            return Expected(value, eager=None if known else eager), 0.0
        tolerances = self.spec.tolerances
        independent = error_budget.roundings(self.longest_reduction)
        roundings = error_budget.roundings(self._terms, independent=False) if distribution == "rounded" else independent
        wider = moved * (roundings / independent)
        floor = error_budget.floor(eager.dtype, roundings, wider, tolerances.floor_ulp)
        if own is not None and not jumps:
            error, finite = own, True
        else:
            error, finite = (Error(), False) if jumps else accuracy.measured(eager, value, eager)
        share = 0.0 if finite else accuracy.not_finite_share(value, eager)
        if share:
            error = accuracy.measure(eager, value, eager) if jumps else error
            return Expected(value, error, floor, eager, tolerances, self._signed), share
        error = discrete.error(eager, value, jumps) if jumps else error
        if at is not None and not eager.is_complex():
            there = discrete.error(at.double() + (eager.double() - value.double()), at.double(), jumps)
            error = there if math.isfinite(there.max) else error
        if self.kind != "float64" and self._sums:
            error = error.worst(floor)  # the value is eager's own, so its error does not show: the usual one is taken
        return Expected(value, error, floor, None, tolerances, self._signed), share

    def accepts_selection(self, trial: Trial, number: int, actual: torch.Tensor) -> bool:
        """Whether differing integers select values within the float budget.

        Args:
            trial: the trial.
            number: which output.
            actual: the candidate's indices.
        """
        state = self.state(trial.draw)
        inputs = self.inputs(trial.draw)
        exact_inputs = to_double(inputs, self._place)
        module = self._exact_module(state)
        with torch.no_grad():
            exact = selected_values(module, exact_inputs, number, actual.to(self._place))
            with self.arithmetic(self.spec.mode):
                eager = selected_values(self.parameters.module, inputs, number, actual)
        if exact is None or eager is None:
            return False
        error = accuracy.measure(eager.best.to(self._place), exact.best)
        floor = error_budget.floor(eager.best.dtype, error_budget.roundings(self.longest_reduction), Error())
        return accuracy.measure(exact.chosen, exact.best).max <= Expected(exact.best, error, floor).budget.max

    # -- parts

    def _exact(self, draw: Draw, near: Near | None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[Error]]:
        """Outputs and changed buffers in float64, and what one ulp of the inputs changes.

        Where memory is tight or outputs are large, the latter is found once for each distribution. That halves the time
        of a trial. A second look finds it anew where there is room.
        """
        if self.kind == "float64":
            try:
                return self._in_double(draw, near)
            except Exception as error:
                refused = self._refused(draw, near, error)
                if refused is not None:
                    raise refused from error
                if not isinstance(error, (RuntimeError, TypeError, ValueError, NotImplementedError)):
                    raise
                if isinstance(error, torch.OutOfMemoryError) and self.plan.way != "none":
                    raise  # another plan may have the room (`economize`)
                self.kind = "eager-highest"  # float64 is refused by the spec or by PyTorch
                self.no_double = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                self.exact = None
                self.tidy()
        self.state(draw, near)
        output = tensors_in(self._eager(self.inputs(draw, near), draw.seed, "highest"))
        state = self.parameters.module.state_dict()
        return output, {k: state[k].clone() for k in self.mutated}, [Error()] * len(output)

    def _refused(self, draw: Draw, near: Near | None, error: Exception) -> InputsRefused | None:
        """Why the module itself takes no such inputs; None where it does, or where the device is what fails."""
        if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            return None
        self.state(draw, near)
        try:
            self._eager(self.inputs(draw, near), draw.seed)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            return None
        except Exception as own:  # noqa: BLE001  the user's module may raise anything
            return InputsRefused(f"{type(own).__name__}: {own}")
        return None

    def _in_double(
        self, draw: Draw, near: Near | None
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[Error]]:
        inputs = to_double(self.inputs(draw, near), self._place)
        draws = self._draws(draw, near)
        module = self._exact_module(self.state(draw, near))
        seldom = self.plan.tidy or (near is None and sum(self.output_bytes) >= LARGE)
        known = self._moved.get(draw.distribution) if seldom else None
        with torch.no_grad():
            exact = [x.clone() if aliases(x, inputs) else x for x in _outputs(module, inputs, draws, self._jumps)]
            if any(x.is_floating_point() and x.dtype is not torch.float64 for x in exact):
                raise TypeError("the result is not float64")
            shapes = [leaf.shape for leaf in self.facts.leaves if leaf.is_tensor]
            if [tuple(x.shape) for x in exact] != shapes:  # bits seen as another dtype
                raise TypeError("the result has another shape in float64")
            if self.plan.way != "device":  # rounded already: half an ulp more in what one ulp changes
                for number, leaf in enumerate(leaf for leaf in self.facts.leaves if leaf.is_tensor):
                    exact[number] = exact[number].to(getattr(torch, leaf.dtype))
            updated = module.state_dict()
            changed = copies([updated[k] for k in self.mutated])
            buffers = dict(zip(self.mutated, (x.to(self.device) for x in changed), strict=True))
            if known is not None:
                return [x.to(self.device) for x in exact], buffers, known
            if self.mutated:  # the first run has changed buffers
                module = self._exact_module(self.state(draw, near))
            with discrete.moved_by_an_ulp(inputs, getattr(torch, self.spec.dtype), bool(self._jumps)):
                other = _outputs(module, inputs, draws, self._jumps)
        moved = [discrete.error(b, a, bool(self._jumps)) for a, b in zip(exact, other, strict=True)]
        if draw.distribution not in WILD:
            self._moved[draw.distribution] = moved
        return [x.to(self.device) for x in exact], buffers, moved

    def _draws(self, draw: Draw, near: Near | None) -> Draws | None:
        """What eager draws at random; None where it draws nothing."""
        if not self.random:
            return None
        self.state(draw, near)
        return draws_of(partial(self._eager, self.inputs(draw, near), draw.seed))

    def _allow_sums(self, trial: Trial) -> None:
        """Let what buffers get be off by roundings of what is added, in each operator (`qimeng.graph.rounded_up`).

        A mean whose terms cancel is all rounding. Eager's own is as large as its way to add makes it, and other ways
        have several times that. Outputs get nothing: beside what long sums add, a lower precision would not show.
        """
        if trial.allowing or self.kind != "float64":
            return
        trial.allowing = True
        share = error_budget.share_of_sums(getattr(torch, self.spec.dtype), self.spec.tolerances.floor_ulp)
        try:
            draws = self._draws(trial.draw, None)
            module = self._exact_module(self.state(trial.draw))
            inputs = rounded_up(to_double(self.inputs(trial.draw), self._place), share)
            with torch.no_grad(), RoundedUp(share):
                outputs = _outputs(module, inputs, draws, self._jumps)
        except torch.OutOfMemoryError:
            return
        finally:
            self.tidy()

        jumps, state = bool(self._jumps), module.state_dict()
        updates = [*(trial.outputs[number] for number in self._updating), *trial.buffers.values()]
        grown = [*(outputs[number] for number in self._updating), *(state[key] for key in trial.buffers)]
        grown = [x.to(self.device) for x in grown]
        known = [None] * len(grown) if jumps else errors_together(grown, [e.value for e in updates])
        allowing = [
            e.allowing(discrete.error(x, e.value, jumps) if error is None else error)
            for e, x, error in zip(updates, grown, known, strict=True)
        ]
        for number, e in zip(self._updating, allowing, strict=False):
            trial.outputs[number] = e
        trial.buffers = dict(zip(trial.buffers, allowing[len(self._updating) :], strict=True))

    def _is_rounding(self, trial: Trial, number: int, actual: torch.Tensor) -> bool:
        """Whether what is out of bounds is a matter of rounding, where results jump or nearly do.

        Where float64 does not run, only eager's own two ways to divide by a number excuse it. On the host it would run
        for minutes where it is not the only way to know.
        """
        jumps, in_double = self._jumps is not False, self.kind == "float64"
        if self.random or not (jumps or (in_double and self.plan.way != "host")):
            return False
        dtype = getattr(torch, self.spec.dtype)

        def inputs() -> Any:
            return pytree.tree_map_only(torch.Tensor, torch.clone, drawn)  # a call may change its own

        def eager(mode: str) -> torch.Tensor:
            self.state(trial.draw)
            return tensors_in(self._eager(inputs(), trial.draw.seed, mode))[number]

        @cache
        def mode() -> str:
            return discrete.rounding_mode(self.spec.mode, eager)

        def run() -> torch.Tensor:
            rounding = discrete.Rounding(dtype, mode(), self.longest_reduction)
            module = self._exact_module(self.state(trial.draw))
            with torch.no_grad(), nullcontext() if jumps else NamedAsDouble(), rounding:
                return tensors_in(module(*to_double(inputs(), self._place)))[number]

        try:
            drawn = self.inputs(trial.draw)
            right = as_right(self.spec.mode, eager)
            return explained(actual, trial.expected[number], right, run if in_double else None, jumps)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError):  # memory that runs out, too
            return False
        finally:
            self.tidy()

    @property
    def _place(self) -> torch.device:
        """Where float64 results are made."""
        return torch.device("cpu") if self.plan.way == "host" else self.device

    def _exact_module(self, state: dict[str, torch.Tensor]) -> torch.nn.Module:
        if self.exact is None:
            self.exact = self.spec.module(str(self._place), torch.float64)
            self.exact.load_state_dict(state)
        else:
            copy_state(state, self.exact.state_dict())
        return self.exact


def _outputs(
    module: torch.nn.Module, inputs: Sequence[Any], draws: Draws | None, jumps: bool | None
) -> list[torch.Tensor]:
    run = partial(module, *inputs)
    with NamedAsDouble() if jumps is False else nullcontext():
        return tensors_in(run() if draws is None else repeating(draws, run))


__all__ = ["ExactReference"]
