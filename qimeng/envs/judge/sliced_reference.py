"""Float64 results made of some rows at a time, where a computation keeps the rows of its inputs apart.

Beside what is expected, only eager's output and the float64 tensors of a few rows are held then. Deals in one draw at a
time. Knows nothing about which draws a candidate gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.cost.memory_plan import free_host_bytes, memory_plan, slice_rows
from qimeng.envs.errors import accuracy
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_in_parts import ErrorInParts
from qimeng.envs.errors.extreme_inputs import overflowing
from qimeng.envs.errors.float64 import NamedAsDouble, Near, aliases, move, tensors_in, to_double
from qimeng.envs.errors.independent_rows import RowsMix, watched
from qimeng.envs.judge.exact_reference import ExactReference
from qimeng.envs.workers.worker_setup import Draw
from qimeng.spec.distributions import WILD


@dataclass
class Runs:
    """Eager's run and that in float64.

    Attributes:
        eager: eager's outputs.
        overflow: 1 if huge inputs overflowed on the way, else 0.
        exact: the float64 outputs, maybe rounded to eager's dtypes.
        moved: what one ulp of the inputs changes, of each output.
        state: parameters and buffers after eager's run.
        buffers: those that a call updates, in float64.
    """

    eager: list[torch.Tensor]
    overflow: float
    exact: list[torch.Tensor]
    moved: list[Error]
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Proof:
    """That rows are kept apart.

    Attributes:
        leaves: which flattened inputs have rows.
        noted: what the run on all rows did (`qimeng.envs.errors.independent_rows`).
    """

    leaves: tuple[int, ...]
    noted: list[Any]


class SlicedReference(ExactReference):
    """Runs of eager and of float64, the latter in slices where the plan says so; arguments as `EagerReference`."""

    _proof: _Proof | None = None

    def runs(self, draw: Draw, near: Near | None = None) -> Runs:
        """Both runs on the inputs and the state of `draw`, or near them."""
        while self.plan.way == "slices" and self.kind == "float64":
            try:
                return self._sliced(draw, near)
            except RowsMix:
                pass
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # no float64, say
                if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
                    raise
                if self._refused(draw, near, error) is not None:
                    raise
            self.leave_slices()
        exact, buffers, moved = self._exact(draw, near)
        self.state(draw, near)
        output, overflow = overflowing(draw.distribution, partial(self._eager, self.inputs(draw, near), draw.seed))
        state = self.parameters.module.state_dict()  # the call may have replaced buffers
        return Runs(tensors_in(output), overflow, exact, moved, state, buffers)

    def leave_slices(self) -> None:
        """Take the next plan that makes float64 results as a whole."""
        self._sizes = replace(self._sizes, rows=1)
        self._take(memory_plan(self._sizes, self._room, free_host_bytes(), after=self.plan))

    # -- parts

    def _sliced(self, draw: Draw, near: Near | None) -> Runs:
        """Eager's run first: its size is what errors beside it are measured by, and it fits as a whole.

        Raises:
            RowsMix: rows are not known to be kept apart.
        """
        inputs = self.inputs(draw, near)
        state = self.state(draw, near)
        eager, overflow = overflowing(draw.distribution, partial(self._proven, inputs, draw.seed))
        values = [torch.empty_like(x) for x in eager]
        known = self._moved.get(draw.distribution)
        errors = [ErrorInParts(x.shape, _least(x)) for x in eager] if known is None else []
        self._exact_module(state)
        rows, step = self._sizes.rows, slice_rows(self._sizes)
        for start in range(0, rows, step):
            part, mine = self._cut(inputs, start, min(step, rows - start))
            first = [x.clone() if aliases(x, part) else x for x in self._run_of(part, mine)]
            for value, x in zip(values, first, strict=True):
                each = value.shape[0] // rows
                value[start * each : start * each + x.shape[0]] = x
            if known is None:
                move(part, torch.finfo(getattr(torch, self.spec.dtype)).eps)
                for error, x, y in zip(errors, self._run_of(part, mine), first, strict=True):
                    error.add(x, y)
            del part, mine, first
        moved = known if known is not None else [error.error() for error in errors]
        if draw.distribution not in WILD:
            self._moved[draw.distribution] = moved
        return Runs(eager, overflow, values, moved)

    def _proven(self, inputs: Sequence[Any], seed: int) -> list[torch.Tensor]:
        """Eager's outputs; at the first time with a proof that rows are kept apart."""
        run = partial(self._eager, inputs, seed)
        if self._proof is not None:
            return tensors_in(run())
        leaves = _pytree.tree_leaves(list(inputs))
        rows = self._sizes.rows
        fitting = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == rows]
        reason = RowsMix("no input has rows")
        for taken in dict.fromkeys((tuple(fitting), tuple(fitting[:1]))):
            held = [x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and i not in taken]
            try:
                made, noted = watched(run, [leaves[i] for i in taken], [*held, *_held(self.parameters.module)], rows)
            except RowsMix as error:
                reason = error
                continue
            self._proof = _Proof(taken, noted)
            return made
        raise reason

    def _cut(self, inputs: Sequence[Any], start: int, count: int) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """Some rows of the inputs in float64, in memory of their own, and the tensors of them that have rows."""
        assert self._proof is not None
        leaves, tree = _pytree.tree_flatten(list(inputs))
        for i in self._proof.leaves:
            leaves[i] = leaves[i][start : start + count]
        made = list(to_double(leaves, self.device))
        made = [x.clone() if isinstance(x, torch.Tensor) and aliases(x, leaves) else x for x in made]
        return tuple(_pytree.tree_unflatten(made, tree)), [made[i] for i in self._proof.leaves]

    def _run_of(self, part: Sequence[Any], mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in float64 of some rows; what runs has to be what ran on all.

        Raises:
            RowsMix: it is not.
            TypeError: an output is not in float64.
        """
        assert self._proof is not None and self.exact is not None
        own = {id(x) for x in mine}
        held = [x for x in tensors_in(part) if id(x) not in own]
        with torch.no_grad(), NamedAsDouble():
            run = partial(self.exact, *part)
            made, noted = watched(run, mine, [*held, *_held(self.exact)], mine[0].shape[0])
        if noted != self._proof.noted:
            raise RowsMix("the module's code depends on the number of rows")
        if any(x.is_floating_point() and x.dtype is not torch.float64 for x in made):
            raise TypeError("the result is not float64")
        return made


def _held(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _least(eager: torch.Tensor) -> float:
    """What errors of float64 results like `eager` are divided by at least."""
    return accuracy.least_of(eager, torch.float64) if accuracy.is_float(eager) else 0.0


__all__ = ["Runs", "SlicedReference"]
