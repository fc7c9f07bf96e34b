"""Results that jump at a threshold: where they may, and the runs that show which other values are right too.

In `x > x.mean()`, a quantized product or `where(a @ b > 0, ...)`, the rounding of an intermediate number can decide the
result, and an honest program rounds in another order. Such an element may have any value that the float64 run gives
when the operands of earlier operators are moved by one rounding, or a value between two of these. Comparisons of
unchanged inputs round nothing, so they are exact. A single sum, product, quotient or root has one IEEE result, so its
floor must equal eager's or float64's (`Rounding`).

Deals in runs and their outputs. Knows nothing about specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.float64 import move
from qimeng.envs.workers import tensor_bits
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.ops import CONVOLUTIONS, EXACT, GEMMS, JUMPS, RANDOM, precision_of
from qimeng.spec.dispatch import DispatchMode

TF32_UNIT = 2.0**-11
"""Rounding unit of what PyTorch may round fp32 operands of products to, where it takes TF32 for them."""


def may_jump(graph: OpGraph, nodes: Iterable[Node]) -> bool:
    """Whether the rounding of an intermediate number may decide a result of the operators `nodes`.

    What is computed from constants alone, such as the mask of a window, is the same in every run.
    """
    used, varying = graph.users().keys() | set(graph.results()), _varying(graph)
    listed = [n for n in nodes if n.name in varying]
    jumps = any(n.packet in JUMPS or _makes_integers(graph, n, used) for n in listed)
    return jumps and not {n.packet for n in listed} <= EXACT


def _varying(graph: OpGraph) -> set[str]:
    """The nodes whose values depend on inputs, on the module's state or on random numbers."""
    found = set[str]()
    for node in graph.nodes.values():
        is_operator = node.kind == "op" and node.literal is None and node.packet not in RANDOM
        if not (is_operator or node.kind == "constant") or any(value.node in found for value in node.operands()):
            found.add(node.name)
    return found


def _makes_integers(graph: OpGraph, node: Node, used: Set[Value]) -> bool:
    """Whether integers or booleans come of floats there: a comparison, an index, a cast; no mask drawn at random.

    Only values that are `used` count: a maximum pooling makes indices, which hardly anyone reads.
    """
    if node.packet in RANDOM:
        return False
    read = [m for v in node.operands() for m in graph.nodes[v.node].metas[v.port : v.port + 1]]
    made = [m for port, m in enumerate(node.metas) if Value(node.name, port) in used]
    return any(_floating(m) is False for m in made) and any(_floating(m) for m in read)


def _floating(meta: Meta | None) -> bool | None:
    """Whether that is a tensor of floats, not of codes for them (fp8); None where it is no tensor."""
    if meta is None:
        return None
    if meta.dtype.startswith("float8"):
        return False
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return dtype.is_floating_point or dtype.is_complex


def error(actual: torch.Tensor, expected: torch.Tensor, jumps: bool) -> Error:
    """The error of eager, or what moving the inputs changed: of results that may jump, without those that did."""
    if not accuracy.is_float(expected):
        return Error()
    if jumps:
        return accuracy.measure_most(actual, expected)
    return accuracy.measure(actual, expected, actual)


_PRODUCTS = GEMMS | CONVOLUTIONS
_SUMS = frozenset(("aten.add", "aten.sub", "aten.rsub"))
_TIMES = frozenset(("aten.mul", "aten.square"))
_IEEE = _SUMS | _TIMES | frozenset(("aten.div", "aten.sqrt", "aten.reciprocal"))
"""Operators whose result IEEE arithmetic fixes to the last bit; a product that is added at once may keep its digits."""


class Rounding(DispatchMode):
    """In the block, a float64 run rounds where programs may: each operator's operands and results move by a few units.

    Operators that copy or compare operands do not round. IEEE operators round in one way only, so their operands stay.
    Two exceptions: a fused program need not round to half types at each step, and hardware rounds a multiply-add once
    or twice.

    Args:
        dtype: of the specification.
        mode: precision mode: which products it lets round their operands to TF32 (`qimeng.graph.ops.TF32`).
        longest_reduction: terms of a sum.
    """

    def __init__(self, dtype: torch.dtype, mode: str, longest_reduction: int):
        super().__init__()
        self._fixed = EXACT | JUMPS | (_IEEE if dtype in (torch.float32, torch.float64) else frozenset())
        self._products = {p: amplitude(dtype, precision_of([p], mode), longest_reduction) for p in _PRODUCTS}
        self._other = amplitude(dtype, "highest", longest_reduction)
        self._result = 1.5 * torch.finfo(dtype).eps / 2
        self._multiplied: set[int] = set()

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator (see the class)."""
        name = f"aten.{func.overloadpacket.__name__.removesuffix('_')}"
        kwargs = kwargs or {}
        writes = func._schema.is_mutable
        if name in _SUMS and name in self._fixed and not writes:
            args = _pytree.tree_map_only(torch.Tensor, self._unless_alone, args)
        elif name not in self._fixed and not writes:
            by = self._products.get(name, self._other)
            args = _pytree.tree_map_only(torch.Tensor, lambda x: _moved(x, by), args)
        found = func(*args, **kwargs)
        if name in _TIMES and isinstance(found, torch.Tensor):
            self._multiplied.add(found.untyped_storage().data_ptr())
        elif name not in self._fixed and not writes and not _is_view(func):
            found = _pytree.tree_map_only(torch.Tensor, lambda x: _moved(x, self._other), found)  # terms of one sign
        return found

    def _unless_alone(self, x: torch.Tensor) -> torch.Tensor:
        """A product that something is added to, moved by a rounding."""
        return _moved(x, self._result) if x.untyped_storage().data_ptr() in self._multiplied else x


def moved_by_an_ulp(inputs: Sequence[Any], dtype: torch.dtype, jumps: bool) -> AbstractContextManager[Any]:
    """Moves float64 `inputs` by one ulp of `dtype`, in place; where results jump, gives a `Rounding` by about as much.

    Moved inputs would say that the floor of an exact quotient may be one less.
    """
    if jumps:
        return Rounding(dtype, "highest", 1)
    move(inputs, torch.finfo(dtype).eps)
    return nullcontext()


def _moved(x: torch.Tensor, by: float) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    x = x.clone()
    move([x], by)
    return x


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


class Dividing(DispatchMode):
    """In the block, a tensor divided by a number really is divided; PyTorch on a GPU multiplies by the inverse."""

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator (see the class)."""
        if func is torch.ops.aten.div.Tensor and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            x, y = args
            if not isinstance(y, torch.Tensor) or (y.dim() == 0 and y.device != x.device):
                args = (x, torch.full((1,), float(y), dtype=x.dtype, device=x.device).expand(x.shape))
        return func(*args, **(kwargs or {}))


def amplitude(dtype: torch.dtype, mode: str, longest_reduction: int) -> float:
    """The relative change of operands: 1.5 of their roundings, plus those of a sum with this many terms.

    That is about four standard deviations of their rounding error. Much more would excuse a lower precision than the
    mode allows, whose roundings are at least four times as large. Mode ``"high"`` is that of products in TF32
    (`qimeng.graph.ops.precision_of`).
    """
    unit = TF32_UNIT if mode == "high" and dtype is torch.float32 else torch.finfo(dtype).eps / 2
    return 1.5 * unit + torch.finfo(torch.float32).eps / 2 * error_budget.roundings(longest_reduction)


def rounding_mode(mode: str, eager: Callable[[str], torch.Tensor]) -> str:
    """``"highest"`` where eager has the same bits in it, so that it rounds no operands; else `mode`.

    Args:
        mode: precision mode.
        eager: runs eager in a mode, on the same inputs each time.
    """
    return "highest" if mode == "highest" or tensor_bits.same(eager(mode), eager("highest")) else mode


__all__ = ["Dividing", "Rounding", "amplitude", "error", "may_jump", "moved_by_an_ulp", "rounding_mode"]
