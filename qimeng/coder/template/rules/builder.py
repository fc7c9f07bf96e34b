"""ATen operators as loop nests: one rule an operator.

Deals in `Builder`, which follows shapes and records expressions, and in the table `RULES` from an operator to the
function that writes it with the builder. Composite operators (softmax, the norms) are spelled out here in the
arithmetic of their definitions. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qimeng.coder.template.nest.axes import Axes, Dim
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr, constant
from qimeng.coder.template.nest.ir import Nest, Source
from qimeng.coder.template.nest.scans import Scan
from qimeng.family import Unsupported

Number = int | float | bool
Operand = Expr | Number


class Builder:
    """Records a region's expressions in a `Nest` while following shapes.

    Args:
        one_row: a product of one row is a product as well, where others take it for a sum of each column.
    """

    def __init__(self, one_row: bool = False) -> None:
        self.one_row = one_row
        self.nest = Nest(Axes())
        self.axes = self.nest.axes

    # -- ragged dimensions

    def whole(self, dim: Dim) -> Dim:
        """`dim`, where its axes have as many positions as it has elements.

        Raises:
            Unsupported: some positions of its axes lie beyond its end (`Nest.limits`).
        """
        atoms = set(self.axes.resolve(dim))
        if any(atoms & set(self.axes.resolve(d)) for d, _ in self.nest.limits):
            raise Unsupported("elements by number of a dimension that its axes do not divide")
        return dim

    # -- leaves
    def load(self, source: Source) -> Expr:
        """The whole of an input tensor."""
        dims = tuple(self.axes.new(s) for s in source.shape)
        return self.nest.add(Expr("load", (), dims, source.dtype, source.number))

    def const(self, value: Number, dtype: str) -> Expr:
        """A literal, as a tensor of this dtype would hold it."""
        return self.nest.add(Expr("const", (), (), dtype, converted(value, dtype)))

    def index(self, dim: Dim) -> Expr:
        """The position along a dimension (int32), as a vector over that dimension."""
        return self.nest.add(Expr("index", (), (dim,), "int32", reduced=dim))

    # -- arithmetic
    def pw(self, op: str, *args: Operand, dtype: str | None = None) -> Expr:
        """A pointwise operator with broadcasting; the result has `dtype`, by default that of the operands."""
        exprs = [a for a in args if isinstance(a, Expr)]
        dims = self.broadcast([e.dims for e in exprs])
        if dtype is None:
            floats = [e.dtype for e in exprs if is_float(e.dtype)]
            dtype = floats[0] if floats else exprs[0].dtype
        return self.nest.add(Expr(op, args, dims, dtype))

    def cast(self, x: Expr, dtype: str) -> Expr:
        """`x` in another dtype."""
        if x.dtype == dtype:
            return x
        known = constant(x)
        if known is not None and (math.isfinite(known.param) or is_float(dtype)):
            return self.redim(self.const(known.param, dtype), x.dims)
        return self.nest.add(Expr("cast", (x,), x.dims, dtype))

    def broadcast(self, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
        """The common dimensions of tensors that meet in one operator."""
        rank = max((len(s) for s in shapes), default=0)
        out: list[Dim] = []
        for position in range(-rank, 0):
            here = [s[position] for s in shapes if len(s) >= -position and s[position]]
            for other in here[1:]:
                self.axes.unify(here[0], other)
            out.append(here[0] if here else ())
        return tuple(out)

    # -- reductions
    def reduce(
        self, kind: str, x: Expr, dims: Sequence[int] | None, keepdim: bool = False, dtype: str | None = None
    ) -> Expr:
        """Reduce `x` over dimensions `dims` (all where None or empty)."""
        rank = len(x.dims)
        chosen = sorted({d % rank for d in dims}) if dims and rank else list(range(rank))
        reduced = tuple(a for d in chosen for a in self.whole(x.dims[d]))
        left = tuple(() if i in chosen else d for i, d in enumerate(x.dims) if keepdim or i not in chosen)
        if not reduced:
            return self._reduced_nothing(kind, x, left, dtype)
        if kind == "sum":
            online = self._online_sumexp(x, reduced, left)
            if online is not None:
                return online
        return self.nest.add(Expr("reduce", (x,), left, dtype or x.dtype, kind, reduced))

    def scan(self, scan: Scan, operands: Sequence[Expr], dim: int, dtype: str) -> Expr:
        """Combine `operands`, of the same dimensions, along dimension `dim` in its order (see `nest.scans`)."""
        dims = self.broadcast([e.dims for e in operands])
        return self.nest.add(Expr("scan", tuple(operands), dims, dtype, scan, dims[dim]))

    def part(self, pair: Expr, name: str, dtype: str | None = None) -> Expr:
        """One member of what keeps several values (``welford``: mean, m2; ``sumexp``: max, sum; see `nest.scans`)."""
        return self.nest.add(Expr("part", (pair,), pair.dims, dtype or pair.dtype, name))

    def count(self, x: Expr, dims: Sequence[int] | None) -> int:
        """How many elements `reduce(…, x, dims)` takes together."""
        rank = len(x.dims)
        chosen = {d % rank for d in dims} if dims and rank else set(range(rank))
        return math.prod(self.axes.extent(self.axes.resolve(self.whole(x.dims[d]))) for d in chosen)

    def moments(self, x: Expr, dims: Sequence[int] | None, keepdim: bool) -> tuple[Expr, Expr, int]:
        """Mean, sum of squared deviations, and count."""
        pair = self.reduce("welford", x, dims, keepdim, compute_dtype(x.dtype))
        return self.part(pair, "mean"), self.part(pair, "m2"), self.count(x, dims)

    def _reduced_nothing(self, kind: str, x: Expr, left: tuple[Dim, ...], dtype: str | None) -> Expr:
        """Reducing dimensions of size 1."""
        if kind in ("argmax", "argmin"):
            return self.nest.add(Expr("identity", (self.const(0, "int64"),), left, "int64"))
        if kind in ("welford", "sumexp"):
            raise Unsupported("statistics over a single element")
        same = self.nest.add(Expr("identity", (x,), left, x.dtype))
        return self.cast(same, dtype) if dtype else same

    def _online_sumexp(self, x: Expr, reduced: Dim, left: tuple[Dim, ...]) -> Expr | None:
        """sum(exp(v - m)) where m comes from max(v): both in one pass, as in Milakov & Gimelshein (2018)."""
        if x.op != "exp" or not isinstance(x.args[0], Expr) or x.args[0].op != "sub":
            return None
        v, m = x.args[0].args
        if not isinstance(v, Expr) or not isinstance(m, Expr):
            return None
        top = _find(m, lambda e: e.op == "reduce" and e.param == "max" and e.args[0] is v)
        if top is None or self.axes.resolve(top.reduced) != self.axes.resolve(reduced):
            return None
        d = compute_dtype(v.dtype)
        pair = Expr("reduce", (v,), top.dims, d, "sumexp", top.reduced)
        self.nest.exprs.insert(self.nest.exprs.index(top), pair)
        top.op, top.args, top.param, top.reduced = "part", (pair,), "max", ()
        flat = self.nest.add(Expr("part", (pair,), left, d, "sum"))
        low = self.nest.add(Expr("identity", (m,), left, d))
        high = self.nest.add(Expr("part", (pair,), left, d, "max"))
        return self.pw("mul", flat, self.pw("exp", self.pw("sub", high, low)))

    # -- products
    def dot(self, a: Expr, b: Expr, dtype: str, always: bool = False) -> Expr:
        """[…, M, K] times […, K, N]; by multiply and sum where M or N is 1, unless it is `always` a product.

        Each operand gets axes of its own, so that `x @ x.T` and `x @ w + x` keep rows, columns and depth apart.
        """
        a, b = self.own(a), self.own(b)
        self.axes.unify(a.dims[-1], b.dims[-2])
        rows = bool(a.dims[-2]) or self.one_row
        if not always and not (rows and b.dims[-1] and a.dims[-1]):
            left = self.nest.add(Expr("identity", (a,), (*a.dims, ()), a.dtype))
            right = self.nest.add(Expr("identity", (b,), (*b.dims[:-2], (), *b.dims[-2:]), b.dtype))
            return self.reduce(
                "sum", self.pw("mul", left, right, dtype=compute_dtype(dtype)), [len(left.dims) - 2], dtype=dtype
            )
        batch = self.broadcast([a.dims[:-2], b.dims[:-2]])
        return self.nest.add(Expr("dot", (a, b), (*batch, a.dims[-2], b.dims[-1]), dtype, reduced=a.dims[-1]))

    def own(self, e: Expr) -> Expr:
        """A copy of `e` and of all below it over new axes."""
        return self._own(e, {}, {})

    def _own(self, e: Expr, axes: dict[int, Dim], made: dict[int, Expr]) -> Expr:
        """A copy of `e` and of all below it over new axes."""
        if id(e) in made:
            return made[id(e)]

        def own(dim: Dim) -> Dim:
            atoms = self.axes.resolve(dim)
            for atom in atoms:
                if atom not in axes:
                    axes[atom] = self.axes.new(self.axes.size(atom))
            return tuple(a for atom in atoms for a in axes[atom])

        args = tuple(self._own(a, axes, made) if isinstance(a, Expr) else a for a in e.args)
        copy = Expr(e.op, args, tuple(own(d) for d in e.dims), e.dtype, e.param, own(e.reduced))
        if e.access:
            copy.access = replace(e.access, direct=tuple((own(d), s) for d, s in e.access.direct))
        made[id(e)] = self.nest.add(copy)
        return copy

    # -- views
    def reshape(self, x: Expr, shape: Sequence[int]) -> Expr:
        """A row-major reshape."""
        for d in x.dims:
            self.whole(d)
        return self.nest.add(Expr("identity", (x,), self.axes.regroup(x.dims, shape), x.dtype))

    def redim(self, x: Expr, dims: Sequence[Dim]) -> Expr:
        """The same elements under other dimensions."""
        return self.nest.add(Expr("identity", (x,), tuple(dims), x.dtype))


def converted(value: Number, dtype: str) -> Number:
    """`value` as PyTorch's conversion to `dtype` leaves it: rounded, cut off or wrapped.

    >>> converted(300, "uint8"), converted(-1.5, "uint8"), converted(70000.0, "float16"), converted(1 << 40, "int32")
    (44, 255, inf, 0)
    """
    if not is_float(dtype) and isinstance(value, float) and not math.isfinite(value):
        raise Unsupported(f"{value} as {dtype}")
    origin = torch.float64 if isinstance(value, float) else torch.int64
    with unset_fake_temporarily():
        return torch.tensor(value, dtype=origin).to(getattr(torch, dtype)).item()


def _find(e: Expr, test: Callable[[Expr], bool]) -> Expr | None:
    if test(e):
        return e
    if e.op in ("reduce", "scan", "load", "dot"):
        return None
    for a in e.operands():
        found = _find(a, test)
        if found is not None:
            return found
    return None


def build_nest(
    rule_table: Mapping[str, Callable[..., Any]], region: Any, sources: dict[Any, Source], one_row: bool = False
) -> Nest:
    """The loop nest of `region`, not finished (`Nest.finish`).

    Args:
        rule_table: operator packet to rule (`RULES`).
        region: a `qimeng.graph.region.Region`.
        sources: the values that are loaded (inputs, or views of inputs made beforehand) as `Source`.
        one_row: see `Builder`.

    Raises:
        Unsupported: an operator has no rule, or shapes do not line up.
    """
    from qimeng.graph.deciding import deciding_values
    from qimeng.graph.opgraph import Value
    from qimeng.graph.ops import EXACT
    from qimeng.graph.rounding import shown_halves

    b = Builder(one_row)
    b.nest.sources = sorted(sources.values(), key=lambda s: s.number)
    held: dict[Any, Expr] = {}
    shown = shown_halves(region.graph)

    def value(v: Any) -> Expr:
        if v not in held:
            source = region.graph.nodes[v.node]
            if source.kind == "constant":
                held[v] = b.const(source.literal, source.metas[0].dtype)
            elif v in sources:
                held[v] = b.load(sources[v])
            else:
                raise Unsupported(f"{v.node} is not computed here")
        return held[v]

    def convert(item: Any) -> Any:
        if isinstance(item, Value):
            return value(item)
        return tuple(convert(i) for i in item) if isinstance(item, (tuple, list)) else item

    for node in region.ops:
        if all(Value(node.name, p) in sources for p in range(len(node.metas))):
            continue
        if any(
            v not in held and v not in sources and region.graph.nodes[v.node].kind != "constant"
            for v in node.operands()
        ):
            continue  # a view on the way to one that is loaded
        if node.packet not in rule_table:
            raise Unsupported(f"no template for {node.packet}")
        try:
            result = rule_table[node.packet](b, node, *convert(node.args), **{k: convert(v) for k, v in node.kwargs})
        except TypeError as error:
            raise Unsupported(f"{node.target} with these arguments ({error})") from error
        for port, e in enumerate(result if isinstance(result, tuple) else (result,)):
            if e is not None and port < len(node.metas) and node.metas[port] is not None:
                held[Value(node.name, port)] = e
                e.stored = e.stored or (node.packet not in EXACT and e.dtype == node.metas[port].dtype)
                e.shown = e.shown or Value(node.name, port) in shown
    for v in region.outputs:
        _add_output(b, value(v), region.graph.meta(v))
    deciding = deciding_values(region.graph)
    b.nest.deciding = frozenset(i for i, v in enumerate(region.outputs) if v in deciding)
    return b.nest


def _add_output(b: Builder, e: Expr, meta: Any) -> None:
    """Store `e` as a tensor of `meta`, over axes of its own where the value is broadcast."""
    if len(e.dims) < len(meta.shape) or any(not d and s > 1 for d, s in zip(e.dims, meta.shape, strict=False)):
        lead = [()] * (len(meta.shape) - len(e.dims))
        e = b.redim(e, [d or b.axes.new(s) for d, s in zip([*lead, *e.dims], meta.shape, strict=True)])
    b.nest.outputs.append((e, meta.shape, meta.stride, meta.dtype))


__all__ = ["Builder", "build_nest", "converted"]
