"""A region as rows that are computed where they are reduced: the loop nest of a row, and how its inputs reach it.

Deals in regions and nests. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.nest.axes import Dim, strides_of
from qimeng.coder.template.nest.dtypes import DTYPES
from qimeng.coder.template.nest.ir import Nest, Source, is_wide
from qimeng.coder.template.nest.loads import Loads
from qimeng.coder.template.rules.builder import build_nest
from qimeng.coder.template.rules.regions import nest_of
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, row_major
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region, call_text, make_region, region_of
from qimeng.graph.state import is_state
from qimeng.vocabulary.irregular.segments import READERS, Segments, segments_of

BESIDE = VIEWS | {"aten.arange", "aten._to_copy"}
"""Operators that PyTorch computes before the kernels, where they make an index or what results begin with."""


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """A reduction by segment, and the loop nest of what is reduced.

    Attributes:
        region: the whole region.
        segments: the reduction.
        nest: of the rows; its one output is [E, …].
        names: the variable of each of the nest's sources in the entry function.
        parameters: the entry function's parameters, in the order of the region's inputs.
        before: lines of the entry function before its kernels.
        base: variable of what results begin with; empty for a number.
        place: variable of the tensor that says where rows belong; empty where numbers do.
        order: lines that compute it from `order_inputs` alone.
        order_inputs: positions of the region's inputs that it is made of.
        settled: whether those are parameters and buffers alone, so that an order is found once.
        out: shape, strides and dtype of the result.
    """

    region: Region
    segments: Segments
    nest: Nest
    names: dict[int, str]
    parameters: tuple[str, ...]
    before: tuple[str, ...]
    base: str
    place: str
    order: tuple[str, ...]
    order_inputs: tuple[int, ...]
    settled: bool
    out: Meta

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.segments.size

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return math.prod(self.out.shape[1:])

    @property
    def row_axes(self) -> Dim:
        """The axes of the rows."""
        dims: tuple[Dim, ...] = self.nest.outputs[0][0].dims
        return dims[0]

    @property
    def column_axes(self) -> Dim:
        """The axes of a row's elements, outermost first."""
        return tuple(a for d in self.nest.outputs[0][0].dims[1:] for a in d)

    def column_strides(self, meta: Meta) -> dict[int, int]:
        """Axis to stride of a tensor [segments, …] within a segment."""
        return strides_of(self.nest.axes, self.nest.outputs[0][0].dims[1:], meta.stride[1:])

    @property
    def wide(self) -> bool:
        """Whether offsets pass 31 bits."""
        return is_wide(self.nest, [s for s, _ in self.nest.accesses()]) or self.out.numel >= 1 << 31


def plan_segments(region: Region) -> SegmentPlan:
    """The plan of `region`.

    Raises:
        NotConcerned: it reduces nothing by segment.
        Unsupported: it reduces twice, does more than that, or what it reduces has no loop nest.
    """
    graph = region.graph
    found = [n for n in region.ops if n.packet in READERS]
    if not found:
        raise NotConcerned("no reduction by segment")
    if len(found) > 1:
        raise Unsupported(f"{len(found)} reductions in one region; one each is covered")
    segments = segments_of(graph, found[0])
    if region.outputs != (Value(found[0].name),):
        raise Unsupported(f"besides the result of {found[0].packet}, the region returns other values")
    part, given = _rows(region, segments)
    if part is not None:
        _refuse(part)
        nest, loads = nest_of(part)
    else:
        source = Source(0, *_layout(graph.meta(given[0])))
        loads = Loads({given[0]: source}, {0: "x0"}, ())
        nest = build_nest({}, region_of(graph, (), given), loads.values)
        nest.finish()
    if nest.reduced or nest.dots or nest.ordered:
        raise Unsupported("a sum or a product inside of what is reduced")
    if any(s.scalar for s in nest.sources):
        raise Unsupported("a Python number that differs from call to call")
    return _assembled(region, segments, nest, loads, given)


def _rows(region: Region, segments: Segments) -> tuple[Region | None, tuple[Value, ...]]:
    """What computes the rows, and the values of `region` that are its inputs; no region where rows are read."""
    graph = region.graph
    if segments.gathers:
        made = gathered([graph.meta(v) for v in segments.made])
        return make_region(made, (n.name for n in made.ops())), segments.made
    nodes = before(region, segments.made[0])
    if not nodes:
        return None, segments.made
    part = region_of(graph, nodes, segments.made)
    return part, part.inputs


def gathered(metas: Sequence[Meta]) -> OpGraph:
    """The graph of rows of a table by their numbers, times their weights if there are any: inputs x0, x1 and x2."""
    nodes = [Node(f"x{i}", "input", str(i), metas=(meta,)) for i, meta in enumerate(metas)]
    table, numbers, *weights = metas
    shape = (*numbers.shape, *table.shape[1:])
    meta = Meta(shape, row_major(shape), table.dtype)
    nodes.append(Node("rows", "op", "aten.index_select.default", (Value("x0"), 0, Value("x1")), metas=(meta,)))
    for one in weights:
        column = Meta((*one.shape, 1), (*one.stride, 1), one.dtype)
        nodes.append(Node("column", "op", "aten.unsqueeze.default", (Value("x2"), -1), metas=(column,)))
        nodes.append(Node("times", "op", "aten.mul.Tensor", (Value("rows"), Value("column")), metas=(meta,)))
    return OpGraph({n.name: n for n in nodes}, (Value(nodes[-1].name),), n_inputs=len(metas))


def _assembled(region: Region, segments: Segments, nest: Nest, loads: Loads, given: tuple[Value, ...]) -> SegmentPlan:
    graph = region.graph
    texts = {v: f"x{i}" for i, v in enumerate(given) if v in region.inputs}
    texts |= {v: f"i{i}" for i, v in enumerate(region.inputs) if v not in texts}
    order: list[str] = []
    place = "" if segments.place is None else beside(region, segments.place, texts, order)
    lines = [*order]
    for i, v in enumerate(given):
        if (text := beside(region, v, texts, lines)) != f"x{i}":
            lines.append(f"x{i} = {text}")
    base = "" if segments.base is None else beside(region, segments.base, texts, lines)
    needed = {n for v in segments.node.operands() for n in before(region, v)} | {segments.node.name}
    if other := set(region.nodes) - needed:
        raise Unsupported(f"{', '.join(sorted(other))}: the region does more than reduce by segment")
    used = set() if segments.place is None else _inputs_below(region, segments.place)
    return SegmentPlan(
        region,
        segments,
        nest,
        loads.names,
        tuple(texts[v] for v in region.inputs),
        tuple(dict.fromkeys([*lines, *loads.prelude])),
        base,
        place,
        tuple(order),
        tuple(i for i, v in enumerate(region.inputs) if v in used),
        bool(used) and all(graph.nodes[v.node].kind in ("parameter", "buffer") and is_state(graph, v) for v in used),
        graph.meta(Value(segments.node.name)),
    )


def beside(region: Region, value: Value, texts: dict[Value, str], lines: list[str]) -> str:
    """The variable that holds `value`, computed by PyTorch from the region's inputs; adds to `lines` and `texts`.

    Raises:
        Unsupported: it takes more than views and casts.
    """
    for name in before(region, value):
        node = region.graph.nodes[name]
        if node.packet not in BESIDE:
            raise Unsupported(
                f"{node.packet} before the index of a reduction by segment, or before what it begins with"
            )
        known = {v: t for v, t in texts.items() if v in node.operands()} or texts
        texts[Value(name)] = f"b{len(texts)}"
        lines.append(f"{texts[Value(name)]} = {call_text(region.graph, node, known)}")
    return texts[value]


def before(region: Region, value: Value) -> tuple[str, ...]:
    """The nodes of `region` that `value` is computed by, in order."""
    inside, waiting, found = set(region.nodes), [value.node], set[str]()
    while waiting:
        name = waiting.pop()
        if name in inside and name not in found:
            found.add(name)
            waiting += [v.node for v in region.graph.nodes[name].operands()]
    return tuple(n for n in region.nodes if n in found)


def _inputs_below(region: Region, value: Value) -> set[Value]:
    """The region's inputs that `value` is computed from."""
    if value in region.inputs:
        return {value}
    names = before(region, value)
    return {v for n in names for v in region.graph.nodes[n].operands() if v in region.inputs}


def _layout(meta: Meta) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return meta.stride, meta.shape, meta.dtype


def _refuse(part: Region) -> None:
    values = [*part.inputs, *(Value(n.name, p) for n in part.ops for p, m in enumerate(n.metas) if m is not None)]
    for meta in (part.graph.meta(v) for v in values):
        if meta.dtype not in DTYPES or meta.dtype == "float64":
            raise Unsupported(f"numbers of dtype {meta.dtype}")
        if not meta.numel:
            raise Unsupported("an empty tensor")


__all__ = ["BESIDE", "SegmentPlan", "before", "beside", "gathered", "plan_segments"]
