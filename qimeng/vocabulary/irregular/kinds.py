"""The kinds of action on reductions by segment: computing rows where they are reduced, and the form of the reduction.

Deals in regions and in names of forms. Knows nothing about kernels.
"""

from __future__ import annotations

from qimeng.actions import ScheduleKind
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import Unsupported
from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.vocabulary.irregular.plan import BESIDE
from qimeng.vocabulary.irregular.schedules import FORMS
from qimeng.vocabulary.irregular.segments import FILLS, READERS, Segments, segments_of
from qimeng.vocabulary.taking_over import TakingOver

OF_A_ROW = ("pointwise", "view", "indexing")
"""Categories of operators that are computed again for each row that is reduced."""


class Aggregate(TakingOver):
    """Compute rows where they are reduced by segment, so that messages between nodes never go to memory.

    What makes the rows, gathers and pointwise operators, is taken over from the regions before. Equal regions change
    together.

    args: the region of the reduction.
    rewrite: ``m = x[src] * w; y.index_add_(0, dst, m)`` -> a kernel that gathers, multiplies and sums by segment
    """

    name = "aggregate"
    task = "compute its rows itself"

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Always: every operator before a reduction writes all rows, and the next one reads them."""
        return True

    def concerns(self, region: Region) -> bool:
        """Whether rows are reduced by segment."""
        return reduction_of(region) is not None

    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that make its rows.

        Raises:
            IllegalAction: it reduces nothing by segment, or computes its rows already.
        """
        segments = reduction_of(region)
        if segments is None:
            raise IllegalAction(
                f"{region.label()} reduces no rows by segment (index_add, scatter_reduce, embedding_bag …)"
            )
        taken = set(region.nodes) | made_of_rows(region.graph, segments)
        if taken == set(region.nodes):
            raise IllegalAction(f"{region.label()} computes its rows itself, or only reads them; lower it")
        return taken


def reduction_of(region: Region) -> Segments | None:
    """What `region` reduces by segment; None where that is nothing, or not covered."""
    found = [n for n in region.ops if n.packet in READERS]
    try:
        return segments_of(region.graph, found[0]) if len(found) == 1 else None
    except Unsupported:
        return None


def made_of_rows(graph: OpGraph, segments: Segments) -> set[str]:
    """Operators that make the rows, one row after the other, and those that make the index and the first values."""
    count, found = segments.size, set[str]()

    def walk(value: Value, wanted: bool) -> None:
        node = graph.nodes[value.node]
        if node.kind != "op" or node.name in found or not (_is_row(graph, node, count) if wanted else _is_beside(node)):
            return
        found.add(node.name)
        for operand in node.operands():
            walk(operand, wanted)

    for value in segments.node.operands():
        walk(value, value in segments.made and not segments.gathers)
    if segments.base is None and graph.nodes[segments.node.operands()[0].node].packet in FILLS:
        found.add(segments.node.operands()[0].node)
    return found


def _is_row(graph: OpGraph, node: Node, count: int) -> bool:
    """Whether `node` makes a value for each of `count` rows, or only looks at one in another way."""
    kind = "indexing" if node.packet == "aten.index" else category(node)
    meta = node.metas[0]
    if len(node.metas) != 1 or meta is None or kind not in OF_A_ROW:
        return False
    return kind == "view" or (bool(meta.shape) and meta.shape[0] == count)


def _is_beside(node: Node) -> bool:
    return node.packet in BESIDE


class IrregularForm(ScheduleKind):
    """Reduce rows by segment in another form.

    args: ``sorted`` (rows in the order of their segments; the same sums in every call), ``bucket`` (rows counted into
    segments by atomics, then summed), ``atomic`` (rows added to sums in memory as they come). The last two give sums
    that differ in the last bits from call to call. A spec with ``deterministic=True`` refuses them, and so does
    `torch.use_deterministic_algorithms`.
    rewrite: ``for segment: for row in order[segment]: sum += row`` -> ``for row: atomic_add(sum[segment[row]], row)``
    """

    name = "irregular"
    options = FORMS


__all__ = ["Aggregate", "IrregularForm", "made_of_rows", "reduction_of"]
