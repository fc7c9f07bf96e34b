"""The kinds of action on experts: matrices are read where they lie, and only experts that count are computed.

Deals in regions. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from qimeng.actions import find_region
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import Unsupported
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.vocabulary.irregular.dense_experts import Layer
from qimeng.vocabulary.irregular.experts import experts_layer
from qimeng.vocabulary.irregular.grouped import PRODUCT, Grouped, grouped_product
from qimeng.vocabulary.taking_over import TakingOver


class Route(TakingOver):
    """Multiply the rows of each expert together, and read every chosen matrix where it lies rather than a copy a row.

    args: the region of the product.
    rewrite: ``bmm(x[:, None], w[index])`` -> a product that walks the rows of each matrix
    """

    name = "route"
    task = "read the matrices that its index chooses"

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Always: a copy of a matrix for each row is written and read again."""
        return True

    def concerns(self, region: Region) -> bool:
        """Whether it multiplies by matrices that an index chooses."""
        return _grouped(region) is not None

    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that copy the matrices.

        Raises:
            IllegalAction: no index chooses its matrices, or it reads them so already.
        """
        found = _grouped(region)
        if found is None:
            raise IllegalAction(f"{region.label()} multiplies by no matrices that an index chooses, as in bmm(x, w[i])")
        if set(found.copies) <= set(region.nodes):
            raise IllegalAction(f"{region.label()} reads the matrices that its index chooses already")
        return set(region.nodes) | set(found.copies) | views_before(region.graph, found.copies)


def views_before(graph: OpGraph, names: Iterable[str]) -> set[str]:
    """The views that the operators `names` read; a region that only provides one would compute all of itself for it."""
    waiting, found = list(names), set[str]()
    while waiting:
        for value in graph.nodes[waiting.pop()].operands():
            if graph.nodes[value.node].packet in VIEWS and value.node not in found:
                found.add(value.node)
                waiting.append(value.node)
    return found


class Dispatch(TakingOver):
    """Compute each row with its own experts alone, where a layer computes all and weighs most results by zero.

    A layer that sorts rows by expert (``grouped_mm``) is computed in the same way, without the copies.

    The results of the others are dropped: where one is infinite or NaN, PyTorch's product with zero is NaN.

    args: the region of the sum over experts.
    rewrite: ``(all_experts(x) * weights).sum(0)`` -> products with the rows that chose each expert, and their sum
    """

    name = "dispatch"
    task = "compute only the experts that count"

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Where at most half of the work is left, or rows are sorted and put back through memory."""
        layer = _layer(find_region(program, action))
        return layer is not None and (not layer.whole or 2 * self.work(program, action) <= 1)

    def work(self, program: Program, action: Action) -> float:
        """Of all experts, the share that each row chooses; all of it where only those are computed already."""
        layer = _layer(find_region(program, action))
        assert layer is not None, "a legal action"
        if not layer.whole:
            return 1.0
        return program.graph.meta(layer.chosen).shape[1] / program.graph.meta(layer.second).shape[0]

    def concerns(self, region: Region) -> bool:
        """Whether it adds up weighted results of experts."""
        return _layer(region) is not None

    def reading(self, region: Region) -> set[str]:
        """The nodes of the whole layer.

        Raises:
            IllegalAction: it is no sum over experts, or does so already.
        """
        layer = _layer(region)
        if layer is None:
            raise IllegalAction(
                f"{region.label()} adds up no results of experts that a topk chose and a scatter weighs, or a sort"
            )
        nodes = set(region.nodes) | layer.taken
        nodes |= views_before(region.graph, nodes)
        if nodes == set(region.nodes):
            raise IllegalAction(f"{region.label()} computes only the experts that count already")
        return nodes


def _layer(region: Region) -> Layer | None:
    for node in region.ops:
        try:
            return experts_layer(region.graph, node)
        except Unsupported:
            continue
    return None


def _grouped(region: Region) -> Grouped | None:
    products = [n for n in region.ops if n.packet == PRODUCT]
    try:
        return grouped_product(region.graph, products[0]) if len(products) == 1 else None
    except Unsupported:
        return None


__all__ = ["Dispatch", "Route", "views_before"]
