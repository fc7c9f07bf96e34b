"""The kind of action that has a product read only the blocks of its weight that a declaration keeps.

Deals in what is computed once from parameters, and in which of that a region computes again. Knows nothing about
kernels.
"""

from __future__ import annotations

from dataclasses import replace

from qimeng.actions import Context, GraphRewrite, find_region
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import Unsupported
from qimeng.graph.opgraph import itemsize
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.graph.state import settled_nodes
from qimeng.interfaces import Action
from qimeng.library import CHOSEN, NotOffered, written
from qimeng.program.program import Program
from qimeng.vocabulary.sparse.kept import Kept, kept_blocks
from qimeng.vocabulary.sparse.pairs import making
from qimeng.vocabulary.weight_readers import WeightReader

SHARE = 0.75
"""Share of a weight's bytes up to which its blocks with their indices are worth reading."""


STRUCTURED = "structured"
"""The library's product with 2:4 weights."""

L2_SHARE = 1.3
"""Rate at which single elements come from the L2 cache over that of the memory: 4.4 of 3.35 TB/s on an H100."""


class Sparsify(WeightReader):
    """Multiply only by the blocks of a weight that are kept, as ``weights="bsr:32:10"`` or ``"csr:5"`` declares.

    Legal where a spec declares such weights: the product's own values stay the same. Equal regions change together.

    args: the region of the product.
    rewrite: ``linear(x, dense(blocks))`` -> a product that walks the blocks of each row
    """

    name = "sparsify"
    task = "read the blocks of its weight that are kept"

    def concerns(self, region: Region) -> bool:
        """Whether the weight is made of kept blocks."""
        return _kept(region) is not None or bool(_pairs(region))

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal as for every `WeightReader`; of two of each four neighbours, where the library multiplies by them."""
        if not _pairs(find_region(program, action)):
            super().check(program, action, context)
            return
        region = self.target(program, action)
        try:
            CHOSEN[STRUCTURED].check(region, context.device)
        except NotOffered as error:
            raise IllegalAction(f"{region.label()}: {error}") from None

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """As for every `WeightReader`; of two of each four neighbours the library's product."""
        found = super().apply(program, action, context)
        if not _pairs(find_region(program, action)) or found.region is None:
            return found
        return replace(found, implementation=written(found.region, STRUCTURED))

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Where what is left takes less time than the whole product, by the device's peak rates.

        Blocks are multiplied by the tensor cores. Of each single element and row, an element comes from the L2 cache.
        """
        kept = _kept(find_region(program, action))
        if kept is None:
            return True  # by sparse tensor cores, which take half of the time and of the bytes
        high, wide = kept.shape
        weight = program.graph.meta(kept.weight)
        rows = _rows(program, find_region(program, action), kept)
        peak = device.peak_tflops(weight.dtype)
        whole = _seconds(2 * rows * high * wide, weight.bytes, peak, device)
        if kept.block == 1:
            read = rows * kept.count * itemsize(weight.dtype) / (L2_SHARE * device.bandwidth_gbs * 1e9)
            return max(read, kept.bytes / (device.bandwidth_gbs * 1e9)) < whole
        return _seconds(2 * rows * kept.count * kept.block**2, kept.bytes, peak, device) < whole

    def left_out(self, program: Program, action: Action, device: Device) -> str:
        """With the rows and what is kept, where peak rates say that the dense product is faster."""
        kept = _kept(find_region(program, action))
        if kept is None or self.promising(program, action, device):
            return ""
        rows = _rows(program, find_region(program, action), kept)
        return (
            f"by the peak rates of {device.name}, the dense product of {rows} rows is faster than reading {kept.text} "
            "of the weight; another planner may take the action all the same"
        )

    def work(self, program: Program, action: Action) -> float:
        """The share of the weight that is kept; the rest of a fused region's arithmetic counts little beside it."""
        kept = _kept(find_region(program, action))
        if kept is None:
            return 0.5  # two of each four neighbours
        return min(1.0, kept.count * kept.block**2 / (kept.shape[0] * kept.shape[1]))

    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that put its weight together.

        Raises:
            IllegalAction: its weight is not made of kept blocks, they are too many, or it reads them so already.
        """
        kept = _kept(region)
        if kept is None and (pairs := _pairs(region)):
            if pairs <= set(region.nodes):
                raise IllegalAction(f"{region.label()} is the library's product of two of each four already")
            return set(region.nodes) | pairs
        if kept is None:
            raise IllegalAction(f"{region.label()} multiplies by no weight that a declaration makes of kept blocks")
        whole = region.graph.meta(kept.weight).bytes
        if kept.bytes > SHARE * whole:
            most = f"at most {SHARE:.0%} of the weight's {whole} B are worth it"
            raise IllegalAction(f"{region.label()} keeps {kept.text}: {kept.bytes} B with their indices; {most}")
        if kept.widening <= set(region.nodes):
            raise IllegalAction(f"{region.label()} reads the blocks of its weight already")
        return set(region.nodes) | kept.widening


def _seconds(flops: float, bytes_: float, tflops: float, device: Device) -> float:
    return max(flops / (tflops * 1e12), bytes_ / (device.bandwidth_gbs * 1e9))


def _rows(program: Program, region: Region, kept: Kept) -> int:
    return sum(program.graph.meta(v).numel for v in region.outputs[:1]) // kept.shape[0]


def _kept(region: Region) -> Kept | None:
    """The kept blocks that the weight of `region`'s linear layer is made of, once for all calls."""
    graph = region.graph
    settled = settled_nodes(graph)
    for node in region.ops:
        if category(node) == "gemm" and node.packet == "aten.linear" and (weight := node.operands()[1]).node in settled:
            try:
                return kept_blocks(graph, weight)
            except Unsupported:
                continue
    return None


def _pairs(region: Region) -> frozenset[str]:
    """The operators that keep two of each four neighbours of the weight of `region`'s linear layer."""
    graph = region.graph
    settled = settled_nodes(graph)
    weights = [n.operands()[1] for n in region.ops if n.packet == "aten.linear"]
    return next((found for w in weights if w.node in settled and (found := making(graph, w))), frozenset())


__all__ = ["SHARE", "Sparsify"]
