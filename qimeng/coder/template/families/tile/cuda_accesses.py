"""How many elements of a row a thread reads and writes in one access.

Deals in strides and extents. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.graph.opgraph import itemsize

ACCESS_BYTES = 16
"""Bytes of the widest access of a thread, which `cuda_aligned` asks for."""


def widest(plan: TilePlan) -> int:
    """Elements of the widest access, a power of two; 1 where memory forbids more."""
    if not plan.columns or plan.contiguous != "r":
        return 1
    tables = [(s, d) for s, d in _accesses(plan) if _runs_along(plan, s)]
    if not tables:
        return 1
    vector = ACCESS_BYTES // max(itemsize(d) for _, d in tables)
    inner, extent = plan.columns[-1][0][-1], plan.columns[-1][1]
    while vector > 1 and (
        extent % vector or any(step % vector for s, _ in tables for a, step in _group_steps(plan, s) if a != inner)
    ):
        vector //= 2
    return vector


def _runs_along(plan: TilePlan, strides: dict[int, int]) -> bool:
    """Whether neighbouring elements of a row are neighbours in memory."""
    return bool(plan.columns) and strides.get(plan.columns[-1][0][-1], 0) == 1


def packed_sources(plan: TilePlan) -> set[int]:
    """Numbers of the sources of which a row's elements are neighbours in memory."""
    nest = plan.nest
    return {
        nest.sources[e.param].number
        for e in nest.exprs
        if e.op == "load" and not nest.sources[e.param].scalar and _runs_along(plan, nest.load_strides(e))
    }


def _group_steps(plan: TilePlan, strides: dict[int, int]) -> list[tuple[int, int]]:
    """Innermost axis of each group to its stride."""
    return [(g[-1], strides.get(g[-1], 0)) for g, _ in (*plan.rows, *plan.columns) if g]


def _accesses(plan: TilePlan) -> list[tuple[dict[int, int], str]]:
    """Strides and dtype of each tensor that is read or written."""
    nest = plan.nest
    loads = [e for e in nest.exprs if e.op == "load" and not nest.sources[e.param].scalar]
    outputs = [(nest.output_strides(i), o[3]) for i, o in enumerate(nest.outputs)]
    return [(nest.load_strides(e), e.dtype) for e in loads] + outputs


__all__ = ["ACCESS_BYTES", "packed_sources", "widest"]
