"""Linear layers on weights with at most two numbers in each four neighbours (2:4), by sparse tensor cores.

The weight is computed and compressed once, by `torch.sparse.to_sparse_semi_structured` (cuSPARSELt, or CUTLASS where
that is missing). One that has more numbers, and any on a CPU, stays dense, so that results are right in any case. Not
an option of the action `library`: kinds of action that know such weights choose it. Source: Mishra et al. 2021,
"Accelerating Sparse Deep Neural Networks". Deals in the text. Knows nothing about where such weights come from.
"""

from __future__ import annotations

from qimeng.device import Device
from qimeng.graph.opgraph import Node, Value
from qimeng.graph.region import Region, region_of
from qimeng.graph.state import is_state
from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered, inputs_of
from qimeng.program.implementation import Implementation

SIDE = 64
"""Of which rows and columns of a weight must be multiples: CUTLASS takes no less, cuSPARSELt less."""


class Structured(LibraryCall):
    """``linear(x, w)`` on a weight that the region computes from parameters."""

    name = "structured"

    def check(self, region: Region, device: Device) -> None:
        """Legal for one linear layer in half precision, on a GPU of NVIDIA's with sparse tensor cores."""
        product, _ = _parts(region)
        meta = region.graph.meta(product.operands()[1])
        if device.kind != "cuda" or not device.has("bf16"):
            raise NotOffered(f"2:4 weights need a GPU of NVIDIA's from sm_80 on, {device.name} is {device.target}")
        if meta.dtype not in ("float16", "bfloat16"):
            raise NotOffered(f"2:4 weights are fp16 or bf16 here, not {meta.dtype}")
        if any(size % SIDE for size in meta.shape):
            raise NotOffered(f"2:4 weights need multiples of {SIDE} outputs and inputs, this one is {meta.shape}")

    def write(self, region: Region, prefix: str) -> Implementation:
        """One call on the compressed weight, which is prepared."""
        product, making = _parts(region)
        names = dict(zip(region.inputs, inputs_of(region), strict=True))
        weight, (x, _, *bias) = f"{prefix}_weight", product.args
        added = f", {names[bias[0]]}" if bias and bias[0] is not None else ""
        taken = tuple(i for i, v in enumerate(region.inputs) if v in making.inputs)
        given = ", ".join(f"x{i}" for i in taken)
        lines = [
            making.function(weight),
            "",
            f"def {prefix}_prepare({given}):",
            f"    w = {weight}({', '.join(names[v] for v in making.inputs)})[0].contiguous()",
            "    fits = bool(((w.view(-1, 4) != 0).sum(1) <= 2).all())",
            "    return (torch.sparse.to_sparse_semi_structured(w) if fits and w.is_cuda else w,)",
            "",
            "",
            f"def {prefix}({', '.join(names.values())}, w0):",
            f"    return (torch.nn.functional.linear({names[x]}, w0{added}),)",
        ]
        return Implementation(LANGUAGE, "\n".join(lines) + "\n", prefix, f"{prefix}_prepare", taken)


def _parts(region: Region) -> tuple[Node, Region]:
    """The linear layer, and the region that computes its weight.

    Raises:
        NotOffered: the region is something else.
    """
    products = [n for n in region.ops if n.packet == "aten.linear"]
    if len(products) != 1 or region.outputs != (Value(products[0].name),):
        raise NotOffered(f"{region.label()} is no linear layer alone")
    product, weight = products[0], products[0].operands()[1]
    before = tuple(n for n in region.nodes if n != product.name)
    if weight.node not in before:
        raise NotOffered(f"{region.label()} does not compute its weight")
    making = region_of(region.graph, before, (weight,))
    reads = {v.node for v in product.operands() if v != weight}
    if reads & set(before) or not all(is_state(region.graph, v) for v in making.inputs):
        raise NotOffered(f"{region.label()} computes more than its weight, or not from parameters alone")
    return product, making


__all__ = ["SIDE", "Structured"]
