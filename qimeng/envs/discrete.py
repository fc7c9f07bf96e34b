"""Results that jump: where a number is next to a threshold, which values of an element are as right as expected.

Of `x > x.mean()`, a quantized product or `where(a @ b > 0, ...)`, an element falls on one side or the other by how the
number in between was rounded, and an honest program rounds in another order. Such an element is as right with any value
that the float64 run has on some inputs which are the same up to rounding, or between two of these. A program that
compares inputs as they are rounds nothing: there, equal numbers are equal.

Deals in runs and their outputs. Knows nothing about specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from qimeng.envs import accuracy
from qimeng.envs.accuracy import Error, Expected
from qimeng.graph.opgraph import Meta, Node, OpGraph
from qimeng.graph.ops import EXACT, JUMPS, RANDOM

RUNS, LOOK_EVERY, FEW = 96, 8, 16
"""Runs on moved inputs at most; those between two looks; elements that may take all of them. An element that lies four
deviations of an honest error from its threshold falls on the other side in a quarter of the runs, so that eight of them
explain nine elements in ten: where more than half is left, and more than a few, the rest is refused."""
TF32_UNIT = 2.0**-11
"""Rounding unit of what mode ``"high"`` may round fp32 operands of products to."""


def may_jump(graph: OpGraph, nodes: Iterable[Node]) -> bool:
    """Whether a result of the operators `nodes` may hang on how a number in between was rounded."""
    listed = list(nodes)
    jumps = any(n.packet in JUMPS or _makes_integers(graph, n) for n in listed)
    return jumps and not {n.packet for n in listed} <= EXACT


def _makes_integers(graph: OpGraph, node: Node) -> bool:
    """Whether integers or booleans come of floats there: a comparison, an index, a cast; no mask drawn at random."""
    if node.packet in RANDOM:
        return False
    read = [m for v in node.operands() for m in graph.nodes[v.node].metas[v.port : v.port + 1]]
    return any(_floating(m) is False for m in node.metas) and any(_floating(m) for m in read)


def _floating(meta: Meta | None) -> bool | None:
    """Whether that is a tensor of floats; None where it is no tensor."""
    if meta is None:
        return None
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return dtype.is_floating_point or dtype.is_complex


def error(actual: torch.Tensor, expected: torch.Tensor, jumps: bool, uneven: bool = False) -> Error:
    """The error of eager, or what moving the inputs changed: of results that may jump, without those that did."""
    if not accuracy.is_float(expected):
        return Error()
    if jumps:
        return accuracy.measure_most(actual, expected, uneven)
    return accuracy.measure(actual, expected, actual, uneven)


def amplitude(dtype: torch.dtype, mode: str, longest_reduction: int) -> float:
    """By how much inputs may move, as a share of each: 1.5 of their roundings, and those of a sum of so many terms.

    That is some four deviations of what rounding does to them. Much more would excuse operands of a lower precision
    than the mode allows, whose roundings are four times as large at least.
    """
    unit = TF32_UNIT if mode == "high" and dtype is torch.float32 else torch.finfo(dtype).eps / 2
    return 1.5 * unit + torch.finfo(torch.float32).eps / 2 * accuracy.roundings(longest_reduction)


def rounding_mode(mode: str, eager: Callable[[str], torch.Tensor]) -> str:
    """``"highest"`` where `mode` lets eager round operands and it does not, else `mode`.

    Args:
        mode: precision mode.
        eager: runs eager in a mode, on the same inputs each time.
    """
    return "highest" if mode == "high" and accuracy.same(eager(mode), eager("highest")) else mode


def explained(actual: torch.Tensor, expected: Expected, eager: torch.Tensor, run: Callable[[], torch.Tensor]) -> bool:
    """Whether all that is out of bounds is a matter of rounding, and the rest within the budget as a whole.

    Args:
        actual: what a candidate returned; real.
        expected: what it should be.
        eager: eager's output on the same inputs, whose values are as right as any.
        run: gives that output in float64, or as integers, for inputs moved anew.
    """
    is_float = accuracy.is_float(actual)
    if actual.is_complex() or (is_float and expected.eager is not None):  # the latter: some value is not finite
        return False
    slack = accuracy.allowance(expected) if is_float else torch.zeros((), dtype=torch.uint8, device=actual.device)
    low = high = _ordered(expected.value)
    before = left = actual.numel()
    for number in range(RUNS + 1):
        other = _ordered((run() if number else eager).to(actual.device, expected.value.dtype))
        low, high = torch.minimum(low, other), torch.maximum(high, other)
        y = _ordered(actual)
        left = actual.numel() - int(((y >= low - slack) & (y <= high + slack)).sum())
        if not left or (number and number % LOOK_EVERY == 0 and left > max(FEW, before // 2)):
            break
        before = left if number % LOOK_EVERY == 0 else before
    if left or not is_float:
        return not left
    value = expected.value
    kept = torch.where((actual - value).abs() <= slack, actual, value)
    return accuracy.measure(kept, value, uneven=expected.uneven).within(expected.budget)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int16) if x.dtype in (torch.bool, torch.uint8) else x


__all__ = ["amplitude", "error", "explained", "may_jump", "rounding_mode"]
