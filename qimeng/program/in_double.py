"""Whether results that differ are both as near to what float64 gives as rounding leaves them.

Deals in one call of a module. Knows nothing about graphs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.graph.rounded_up import RoundedUp, rounded_up

NEAR = 4.0
"""Times the module's own error that the graph's may be, as for any program (`qimeng.spec.Tolerances`)."""

ULPS = 16.0
"""Roundings of one direction in each operator that are allowed in any case, as many as any program is."""

COARSEST = 2.0**-6
"""Largest error of a module as a share of what it adds: some of bfloat16. Beyond it, float64 is another computation,
such as one with other random numbers."""

STEADY = 16.0
"""Times that the module's error is larger than what two of its calls differ by in float64."""

GROWTH = 2.0**-30
"""What results grow by to see what is added: so little that nothing jumps."""


@dataclass(frozen=True)
class _Exact:
    """What float64 gives.

    Attributes:
        value: of an output or buffer.
        drift: how far the result of a further call is from it.
        added: what roundings are a share of: how much the value grows by as a multiple of what all results do.
    """

    value: torch.Tensor
    drift: float
    added: float


class InDouble:
    """One call of a module in float64; made once it is needed, for all outputs and buffers together.

    Args:
        module: after the call.
        inputs: of the call.
        before: what its buffers held before the call.
        run: calls a module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: tuple[Any, ...],
        before: Mapping[str, torch.Tensor],
        run: Callable[[torch.nn.Module, tuple[Any, ...]], Any],
    ):
        self._module, self._inputs, self._before, self._run = module, inputs, before, run

    def is_rounding(self, which: int | str, given: torch.Tensor, found: torch.Tensor) -> bool:
        """Whether `found` is about as near to the float64 result as the module is.

        What cancels to nearly nothing is all rounding in both, so some roundings of what was added are allowed, even
        where the module has fewer. A module that counts its calls answers otherwise each time, and float64 is the
        result of another call: then nothing is known.

        Args:
            which: number of an output, or name of a buffer.
            given: the module's.
            found: the graph's.
        """
        exact = self._results.get(which)
        if exact is None or exact.value.shape != given.shape:
            return False
        own = _distance(given, exact.value)
        if own == math.inf or exact.drift > own / STEADY:
            return False
        rounding = torch.finfo(given.dtype).eps * exact.added
        return _distance(found, exact.value) <= NEAR * min(own, COARSEST * exact.added) + ULPS * rounding

    # -- parts

    @cached_property
    def _results(self) -> dict[int | str, _Exact]:
        """By number or name; empty where the module does not run in float64."""
        try:
            inputs = _pytree.tree_map_only(torch.Tensor, _in_double, self._inputs)
            module = copy.deepcopy(self._module).double()
            exact, later = (self._call(module, inputs) for _ in range(2))
            with RoundedUp(GROWTH):
                grown = self._call(module, rounded_up(inputs, GROWTH))
        except Exception:  # noqa: BLE001  the user's module may raise anything
            return {}
        return {
            key: _Exact(value, _distance(later[key], value), _distance(grown[key], value) / GROWTH)
            for key, value in exact.items()
            if value.dtype is torch.float64 and all(key in x and x[key].shape == value.shape for x in (later, grown))
        }

    def _call(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> dict[int | str, torch.Tensor]:
        """All outputs of the call by their number, and all buffers after it by their name."""
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self._before:
                    buffer.copy_(self._before[name])
        outputs = _pytree.tree_leaves(self._run(module, inputs))
        found: Iterator[tuple[int | str, Any]] = chain(enumerate(outputs), module.named_buffers())
        return {key: x.clone() for key, x in found if isinstance(x, torch.Tensor)}


def _in_double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where a value is not finite, or where there are none."""
    return float((x.double() - exact).abs().nan_to_num(math.inf).amax()) if x.numel() else math.inf


__all__ = ["InDouble"]
