"""Which family covers a region, and its loop nest in numbers.

Deals in the choice of a template. Knows nothing about kernel text or about what is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from qimeng.coder.template.axes import Unsupported
from qimeng.coder.template.gemm_plan import GemmPlan, plan_gemm
from qimeng.coder.template.ir import Nest
from qimeng.coder.template.ops import TRITON_DTYPE
from qimeng.coder.template.sources import Loads, nest_of
from qimeng.coder.template.special import SPECIAL
from qimeng.coder.template.tile_plan import TilePlan, plan_tile
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region
from qimeng.interfaces import Facts


@dataclass(frozen=True)
class Analysis:
    """What the templates know about a region.

    Attributes:
        region: the region.
        nest: its loop nest.
        loads: how its inputs reach the kernels.
        plan: the family's plan.
        facts: the numbers that the rest of the library may see.
    """

    region: Region
    nest: Nest
    loads: Loads
    plan: TilePlan | GemmPlan
    facts: Facts


_CACHE_SIZE = 4096


def analyse(region: Region) -> Analysis:
    """The analysis of `region`; equal regions are analysed once.

    Raises:
        Unsupported: no template covers it; the message says why.
    """
    found = _analyse(_Key(region))
    if isinstance(found, Unsupported):
        raise found
    return found


class _Key:
    """A region that hashes by what it computes."""

    def __init__(self, region: Region):
        self.region = region

    def __hash__(self) -> int:
        return hash(self.region.signature)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.region.signature == self.region.signature


@lru_cache(_CACHE_SIZE)
def _analyse(key: _Key) -> Analysis | Unsupported:
    region = key.region
    try:
        if all(n.packet in VIEWS for n in region.ops):
            raise Unsupported("only views, which are free")
        views = [m for n in region.ops if n.packet in VIEWS for m in n.metas if m is not None]
        if any(m.numel == 0 for m in (*views, *(region.graph.meta(v) for v in (*region.inputs, *region.outputs)))):
            raise Unsupported("an empty tensor")
        for value in (*region.inputs, *region.outputs):
            meta = region.graph.meta(value)
            if meta.dtype.startswith("complex"):
                raise Unsupported("complex numbers")
        made = (meta for n in region.ops for meta in n.metas if meta is not None)
        for meta in (*made, *(region.graph.meta(v) for v in region.inputs)):
            if meta.dtype not in TRITON_DTYPE and not meta.dtype.startswith("complex"):
                raise Unsupported(f"numbers of dtype {meta.dtype}")
        if all(region.graph.nodes[v.node].kind == "scalar" for v in region.inputs):
            raise Unsupported("no tensor goes in, so that nothing says on which device to compute")
        nest, loads = nest_of(region)
        if any(s.scalar for s in nest.sources) and any(e.dtype == "float64" for e in nest.exprs):
            raise Unsupported("a Python number in float64 arithmetic: kernels take numbers as float32")
        if nest.dot is not None:
            gemm = plan_gemm(region, nest, loads)
            return Analysis(region, nest, loads, gemm, _gemm_facts(gemm))
        nest, loads, tile = _tile(region, nest, loads)
        return Analysis(region, nest, loads, tile, _tile_facts(region, nest, tile))
    except Unsupported as error:
        return error


def _tile(region: Region, nest: Nest, loads: Loads) -> tuple[Nest, Loads, TilePlan]:
    """The plan of the tile family, with reductions over different axes made one where that is needed and possible."""
    try:
        return nest, loads, plan_tile(nest)
    except Unsupported as reason:
        try:
            nest, loads = nest_of(region, joined=True)
            return nest, loads, plan_tile(nest)
        except Unsupported:
            raise reason from None


def _tile_facts(region: Region, nest: Nest, plan: TilePlan) -> Facts:
    dtypes = [region.graph.meta(v).dtype for v in region.inputs] or ["float32"]
    return Facts(
        "tile",
        dtypes[0],
        rows=plan.row_count,
        columns=plan.column_count,
        passes=plan.passes,
        full_outputs=plan.full,
        contiguous=plan.contiguous,
        special=_special(nest, plan),
    )


def _special(nest: Nest, plan: TilePlan) -> tuple[str, ...]:
    """Special functions of every element; those of a row's sums take no time."""
    inside = {a for group, _ in plan.columns for a in group}
    found = {e.op for e in nest.exprs if e.op in SPECIAL and e.dtype != "float64" and e.depends & inside}
    return tuple(sorted(found))


def _gemm_facts(plan: GemmPlan) -> Facts:
    batch, m, n, k = plan.shape
    packable = "".join(side.name for side in plan.sides if side.held or not side.aligned)
    return Facts("gemm", plan.dtype, m=m, n=n, k=k, batch=batch, packable=packable)
