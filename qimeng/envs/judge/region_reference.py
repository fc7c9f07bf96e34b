"""What one region of a program should return on the inputs it gets in a run on PyTorch.

Deals in a partition, one of its regions and one secret draw of the program's inputs. Knows nothing about
implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from typing import Any

import torch

from qimeng.envs.errors import accuracy, discrete, error_budget
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.errors.explained import as_right, explained
from qimeng.envs.errors.float64 import NamedAsDouble, Near, tensors_in
from qimeng.envs.errors.nearby_inputs import second_look
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.verdicts import Tally
from qimeng.envs.workers.forkserver import Process
from qimeng.envs.workers.outputs import Facts, describe
from qimeng.envs.workers.regions import inputs_of_region
from qimeng.envs.workers.worker_setup import Draw
from qimeng.graph.opgraph import places_of
from qimeng.graph.ops import RANDOM, mode_alone
from qimeng.graph.region import Region
from qimeng.graph.rounded_up import RoundedUp, rounded_up
from qimeng.program.program import Program, load_source, torch_implementation
from qimeng.spec import EXAMPLES
from qimeng.spec.kept import take_state
from qimeng.spec.modes import precision
from qimeng.spec.seeding import seed_generators


class RegionReference:
    """Expected outputs of `region` for one draw; the inputs are not kept.

    Args:
        references: the specification's references, for parameters and inputs.
        program: with the partition that the region is in.
        region: the region.
        folder: where source text is written.

    Attributes:
        source: the program with every region on PyTorch.
        entries: name of the function of each region, in order.
        number: of the region among them.
        draw: the program's inputs and parameters: the user's own inputs.
        facts: structure of the region's outputs.
        expected: the outputs.
        tally: where errors are noted.
        held_by: the worker that has the region's inputs at hand.
    """

    def __init__(self, references: References, program: Program, region: Region, folder: str):
        self.region = region
        plain = Program(program.graph, program.regions)
        self.source = plain.source
        self.entries = [plain.implementation(r).entry for r in plain.called]
        self.number = [r.id for r in program.called].index(region.id)
        self.draw = Draw(references.draw_seed(), EXAMPLES, references.timed_parameter_seed())
        self.tally = Tally()
        self.held_by: Process | None = None
        self._references, self._module = references, load_source(self.source, folder=folder)
        self._nearby, self._mode = 0, mode_alone((n.packet for n in region.ops), references.spec.mode)
        self._updating = places_of(region.outputs, region.graph.updates)
        self.facts, self.expected = self._evaluate()

    @property
    def output_bytes(self) -> list[int]:
        """Bytes of each output."""
        return [leaf.bytes for leaf in self.facts.leaves if leaf.is_tensor]

    def look_again(self, number: int, actual: torch.Tensor, error: Error) -> Expected | None:
        """What a tensor that is out of bounds may be all the same; None where it is wrong.

        Args:
            number: which of `expected`.
            actual: what the candidate handed over.
            error: its error.
        """
        if accuracy.is_float(actual):
            if number in self._updating:
                self._allow_sums()
            wider = second_look(error, lambda: self.expected[number], self._look_nearby)
            if wider is not None:
                return wider
        return self.expected[number].excused(error) if self._is_rounding(number, actual) else None

    # -- parts

    def _is_rounding(self, number: int, actual: torch.Tensor) -> bool:
        """Whether what is out of bounds is a matter of rounding, where results jump or nearly do."""
        if any(n.packet in RANDOM for n in self.region.ops):
            return False  # each run draws other numbers
        references = self._references
        jumps = discrete.may_jump(self.region.graph, self.region.ops)
        dtype = getattr(torch, references.spec.dtype)

        @cache
        def call() -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return self._call()

        def eager(mode: str) -> torch.Tensor:
            function, arguments = call()
            with torch.no_grad(), precision(mode):
                return tensors_in(function(*arguments))[number]

        @cache
        def mode() -> str:
            return discrete.rounding_mode(self._mode, eager)

        def run() -> torch.Tensor:
            function, arguments = call()
            rounding = discrete.Rounding(dtype, mode(), references.longest_reduction)
            with torch.no_grad(), nullcontext() if jumps else NamedAsDouble(), rounding:
                return tensors_in(function(*_in_float64(arguments)))[number]

        try:
            return explained(actual, self.expected[number], as_right(self._mode, eager), run, jumps)
        except _NOT_IN_DOUBLE:  # memory that runs out is a RuntimeError too
            return False
        finally:
            references.tidy()

    def _allow_sums(self) -> None:
        """Let what buffers get be off by roundings of what is added, once (`References`)."""
        updating, self._updating = self._updating, frozenset()
        jumps = discrete.may_jump(self.region.graph, self.region.ops)
        spec = self._references.spec
        share = error_budget.share_of_sums(getattr(torch, spec.dtype), spec.tolerances.floor_ulp)
        try:
            function, arguments = self._call()
            raised = rounded_up(_in_float64(arguments), share)
            with torch.no_grad(), RoundedUp(share), nullcontext() if jumps else NamedAsDouble():
                grown = tensors_in(function(*raised))
        except _NOT_IN_DOUBLE:  # memory that runs out is a RuntimeError too
            return
        finally:
            self._references.tidy()
        for number in updating:
            expected = self.expected[number]
            self.expected[number] = expected.allowing(discrete.error(grown[number], expected.value, jumps))

    def _look_nearby(self) -> bool:
        """Widen what is expected by a run on inputs of the program nearby; False where no more are to be made."""
        if not self._references.may_look_nearby(self._nearby, self._elements):
            return False
        _, other = self._evaluate(self._references.near(self._nearby))
        self._nearby += 1
        self.expected = [a.widened(b) for a, b in zip(self.expected, other, strict=True)]
        return True

    def _call(self, near: Near | None = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The region's function and its inputs on PyTorch, on what the program has in the draw, or near it."""
        references, module = self._references, self._module
        state = references.state(self.draw, near)
        with torch.no_grad(), precision(references.spec.mode):
            with torch.device(references.device):
                model = module.Model()
            model.to(references.device)
            take_state(model, state)
            seed_generators(self.draw.seed)
            inputs = references.inputs(self.draw, near)
            arguments = inputs_of_region(module, model, inputs, self.entries, self.number)
        return getattr(module, torch_implementation(self.region).entry), arguments

    def _evaluate(self, near: Near | None = None) -> tuple[Facts, list[Expected]]:
        """Structure and values of the outputs, on the inputs of the draw or on others nearby."""
        references = self._references
        function, arguments = self._call(near)
        with torch.no_grad(), precision(self._mode):
            output = function(*arguments)
        held = {f"input {i}": x for i, x in enumerate(tensors_in(arguments))}
        facts, eager = describe(output, held)
        self._elements = sum(x.numel() for x in (*tensors_in(arguments), *eager))
        jumps = discrete.may_jump(self.region.graph, self.region.ops)
        values, moved = _in_double(function, arguments, jumps)
        if values is None:
            with torch.no_grad(), precision("highest"):
                values, moved = tensors_in(function(*arguments)), [Error()] * len(eager)
        eager, values = (list(map(accuracy.comparable, found)) for found in (eager, values))
        at = [None] * len(eager) if near is None else [e.value for e in self.expected]
        expected = [
            references.expect(e, v, m, self.draw.distribution, jumps, there)[0]
            for e, v, m, there in zip(eager, values, moved, at, strict=True)
        ]
        references.tidy()
        return facts, expected


_NOT_IN_DOUBLE = (RuntimeError, TypeError, ValueError, NotImplementedError)
"""Raised where an operator has no float64 form, or names another dtype."""


def _is_short(x: Any) -> bool:
    """Whether `x` is a tensor of floats with fewer digits than float64; fp8 is a code, which nothing rounds anew."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and 1 < x.dtype.itemsize < 8


def _in_float64(arguments: Sequence[Any]) -> list[Any]:
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]


def _in_double(function: Any, arguments: tuple[Any, ...], jumps: bool) -> tuple[list[torch.Tensor] | None, list[Error]]:
    """The outputs in float64 and what one ulp of the inputs changes; None where float64 does not run."""
    raised = _in_float64(arguments)
    try:
        with torch.no_grad(), nullcontext() if jumps else NamedAsDouble(), ExitStack() as modes:
            exact = [x.clone() for x in tensors_in(function(*raised))]
            if any(x.is_floating_point() and x.dtype is not torch.float64 for x in exact):
                return None, []
            for dtype in {x.dtype for x in arguments if _is_short(x)}:
                mine = [
                    x for x, given in zip(raised, arguments, strict=True) if _is_short(given) and given.dtype is dtype
                ]
                modes.enter_context(discrete.moved_by_an_ulp(mine, dtype, jumps))
            other = tensors_in(function(*raised))
    except _NOT_IN_DOUBLE:
        return None, []
    return exact, [discrete.error(b, a, jumps) for a, b in zip(exact, other, strict=True)]


__all__ = ["RegionReference"]
