"""The loop nest of a region, for any family: what no template covers is refused here, equal regions are read once.

Deals in which regions have a nest. Knows nothing about families, kernel text or about what is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from qimeng.coder.template.nest.dtypes import CONVERTED, DTYPES
from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.nest.loads import Loads, find_loads
from qimeng.coder.template.nest.quotients import settle_quotients
from qimeng.coder.template.rules.base import Rule
from qimeng.coder.template.rules.builder import build_nest
from qimeng.coder.template.rules.table import RULES
from qimeng.family import Unsupported
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region, RegionKey

Found = tuple[Region, Nest, Loads]
"""A region, its loop nest, and how its inputs reach the kernels."""


def region_nest(region: Region, one_row: bool = False) -> Found:
    """The loop nest of `region`, or of an equal region that was read before, with that region: its names count.

    Args:
        region: the region.
        one_row: a product of one row is a product as well, not a sum of each column.

    Raises:
        Unsupported: no template covers it; the message says why.
    """
    found = _region_nest(RegionKey(region), one_row)
    if isinstance(found, Unsupported):
        raise found.with_traceback(None)
    return found


def nest_of(
    region: Region,
    joined: bool = False,
    one_row: bool = False,
    rules: Mapping[str, Rule] = RULES,
    loads: Loads | None = None,
) -> tuple[Nest, Loads]:
    """The region's loop nest with its loads.

    Args:
        region: the region.
        joined: let reductions over different axes walk the same ones.
        one_row: a product of one row is a product as well, not a sum of each column.
        rules: operator packet to rule.
        loads: what is loaded; by default what `find_loads` finds.

    Raises:
        Unsupported: no template covers it; the message says why.
    """
    for node in region.ops:
        if node.packet in VIEWS and node.packet not in RULES and Value(node.name) not in _reachable(region):
            raise Unsupported(f"{node.packet} in the middle of a region")
    loads = loads or find_loads(region)
    nest = build_nest(rules, region, loads.values, one_row)
    if joined:
        nest.join_reductions()
    nest.finish()
    settle_quotients(nest)
    return nest, loads


def _reachable(region: Region) -> set[Value]:
    """Views at the edge of the region, loaded or leading to one that is."""
    at_edge = set(region.inputs)
    for node in region.ops:
        if node.packet in VIEWS and node.operands() and node.operands()[0] in at_edge:
            at_edge.add(Value(node.name))
    return at_edge


@lru_cache(1024)
def _region_nest(key: RegionKey, one_row: bool) -> Found | Unsupported:
    region = key.region
    try:
        check_region(region)
        nest, loads = nest_of(region, one_row=one_row)
        if any(s.scalar for s in nest.sources) and any(e.dtype == "float64" for e in nest.exprs):
            raise Unsupported("a Python number in float64 arithmetic: kernels take numbers as float32")
        return region, nest, loads
    except Unsupported as error:
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)


def check_region(region: Region) -> None:
    """Raise `Unsupported` where a look at the tensors says that there is nothing to compute, or nothing to do it on."""
    if all(n.packet in VIEWS for n in region.ops):
        raise Unsupported("only views, which are free")
    views = [m for n in region.ops if n.packet in VIEWS for m in n.metas if m is not None]
    if any(m.numel == 0 for m in (*views, *(region.graph.meta(v) for v in (*region.inputs, *region.outputs)))):
        raise Unsupported("an empty tensor")
    for value in (*region.inputs, *region.outputs):
        meta = region.graph.meta(value)
        if meta.dtype.startswith("complex"):
            raise Unsupported("complex numbers")
    inside = {v for n in region.ops for v in n.operands()}
    written = {n.name for n in region.ops if n.packet == "aten._to_copy" and Value(n.name) not in inside}
    made = (m for n in region.ops for m in n.metas if m and not (n.name in written and m.dtype in CONVERTED))
    converted = {v for n in region.ops if n.packet == "aten._to_copy" for v in n.operands()}
    converted -= {v for n in region.ops if n.packet != "aten._to_copy" for v in n.operands()}
    read = (region.graph.meta(v) for v in region.inputs if v not in converted or _dtype(region, v) not in CONVERTED)
    for meta in (*made, *read):
        if meta.dtype not in DTYPES and not meta.dtype.startswith("complex"):
            raise Unsupported(f"numbers of dtype {meta.dtype}")
    if all(region.graph.nodes[v.node].kind == "scalar" for v in region.inputs):
        raise Unsupported("no tensor goes in, so that nothing says on which device to compute")


def _dtype(region: Region, value: Value) -> str:
    return region.graph.meta(value).dtype


__all__ = ["check_region", "nest_of", "region_nest"]
