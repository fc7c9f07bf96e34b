"""Linear layers with their activation in one call of cuBLASLt (`torch._addmm_activation`).

Deals in the few epilogues that PyTorch passes on to the library. Knows nothing about other fusions.
"""

from __future__ import annotations

from qimeng.device import Device
from qimeng.graph.opgraph import Node, Value
from qimeng.graph.region import Region
from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered, heavy
from qimeng.program.implementation import Implementation


class FusedLinear(LibraryCall):
    """``activation(x @ w.T + b)`` with the epilogue of the library's product."""

    name = "fused"

    def check(self, region: Region, device: Device) -> None:
        """Legal for a linear layer with a bias, and relu or, on CUDA, the tanh form of gelu (elsewhere it is exact)."""
        activation = _parts(region)[1]
        if activation.packet == "aten.gelu" and device.kind != "cuda":
            raise NotOffered(f"the library's gelu is the tanh form on CUDA only, {device.name} is {device.kind}")

    def write(self, region: Region, prefix: str) -> Implementation:
        """One call, on the operand as a matrix."""
        product, activation = _parts(region)
        names = {v: f"x{i}" for i, v in enumerate(region.inputs)}
        if product.packet == "aten.linear":
            x, w, b = (names[v] for v in product.args)
            w = f"{w}.t()"
        else:
            b, x, w = (names[v] for v in product.args[:3])
        shape = region.graph.meta(Value(activation.name)).shape
        flat = x if len(shape) == 2 else f"{x}.reshape(-1, {x}.shape[-1])"
        back = "" if len(shape) == 2 else f".view({tuple(shape)})"
        gelu = activation.packet == "aten.gelu"
        call = f"torch._addmm_activation({b}, {flat}, {w}, use_gelu={gelu}){back}"
        text = f"def {prefix}({', '.join(names.values())}):\n    return ({call},)\n"
        return Implementation(LANGUAGE, text, prefix)


def _parts(region: Region) -> tuple[Node, Node]:
    """The product and its activation.

    Raises:
        NotOffered: the region is something else.
    """
    graph, nodes = region.graph, list(region.ops)
    if len(heavy(region)) != 2 or len(nodes) != 2 or len(region.outputs) != 1:
        raise NotOffered(f"{region.label()} is no product with one activation ({len(heavy(region))} operators)")
    product, activation = nodes
    if product.packet not in ("aten.linear", "aten.addmm") or activation.args[0] != Value(product.name):
        raise NotOffered(f"{region.label()} is no linear layer with its activation")
    if len(product.args) != 3 or None in product.args or product.kwargs:
        raise NotOffered("the library adds a bias without factors, and there is none")
    bias = graph.meta(product.args[2] if product.packet == "aten.linear" else product.args[0])
    if len(bias.shape) != 1:
        raise NotOffered(f"the bias has the shape {bias.shape}")
    exact = dict(activation.kwargs).get("approximate", "none") != "tanh"
    if activation.packet not in ("aten.relu", "aten.gelu") or activation.packet == "aten.gelu" and exact:
        raise NotOffered(f"the library has relu and the tanh form of gelu, not {activation.target}")
    if region.outputs != (Value(activation.name),):
        raise NotOffered("the product is needed itself")
    return product, activation


__all__ = ["FusedLinear"]
