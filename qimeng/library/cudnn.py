"""Convolutions by cuDNN with the algorithm that it measures to be fastest, and with its fused bias and relu.

Deals in ATen's own calls of cuDNN, which take the search for an algorithm as an argument, so that no setting of PyTorch
changes. Knows nothing about layouts.
"""

from __future__ import annotations

from qimeng.device import Device
from qimeng.graph.opgraph import Node, Value
from qimeng.graph.region import Region
from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered
from qimeng.program.implementation import Implementation

TF32 = "torch.backends.cudnn.allow_tf32"


class Cudnn(LibraryCall):
    """One convolution with its bias, and relu where it follows."""

    name = "cudnn"

    def check(self, region: Region, device: Device) -> None:
        """Legal on CUDA, for one convolution of 2 or 3 dimensions, with at most relu behind it."""
        if device.kind != "cuda":
            raise NotOffered(f"cuDNN runs on CUDA, {device.name} is {device.kind}")
        _parts(region)

    def write(self, region: Region, prefix: str) -> Implementation:
        """The call, and the bias added in place where cuDNN does not add it."""
        node, relu = _parts(region)
        names = {v: f"x{i}" for i, v in enumerate(region.inputs)}
        x, w = names[node.args[0]], names[node.args[1]]
        bias = names[node.args[2]] if node.args[2] is not None else "None"
        stride, padding, dilation, transposed, extra, groups = node.args[3:]
        last = f"{groups}, True, False, {TF32}"
        if relu and not transposed:
            call = f"torch.ops.aten.cudnn_convolution_relu({x}, {w}, {bias}, {stride}, {padding}, {dilation}, {groups})"
        elif transposed:
            op = "torch.ops.aten.cudnn_convolution_transpose"
            call = f"{op}({x}, {w}, {padding}, {extra}, {stride}, {dilation}, {last})"
        else:
            call = f"torch.ops.aten.cudnn_convolution({x}, {w}, {padding}, {stride}, {dilation}, {last})"
        lines = [f"def {prefix}({', '.join(names.values())}):", f"    y = {call}"]
        if bias != "None" and (transposed or not relu):
            rank = len(region.graph.meta(Value(node.name)).shape)
            lines.append(f"    y.add_({bias}.view(1, -1{', 1' * (rank - 2)}))")
        if relu and transposed:
            lines.append("    y.relu_()")
        return Implementation(LANGUAGE, "\n".join([*lines, "    return (y,)"]) + "\n", prefix)


def _parts(region: Region) -> tuple[Node, bool]:
    """The convolution, and whether relu follows.

    Raises:
        NotOffered: the region is something else.
    """
    first, *rest = region.ops
    if first.packet != "aten.convolution" or len(rest) > 1 or len(region.outputs) != 1:
        raise NotOffered(f"{region.label()} is no convolution with at most relu behind it")
    rank = len(region.graph.meta(Value(first.name)).shape)
    if rank not in (4, 5):
        raise NotOffered(f"cuDNN convolves 2 or 3 dimensions here, not {rank - 2}")
    follows = not rest or rest[0].packet == "aten.relu" and rest[0].args == (Value(first.name),)
    if not follows or region.outputs != (Value(region.nodes[-1]),):
        raise NotOffered(f"cuDNN has relu behind a convolution, not {region.label()}")
    return first, bool(rest)


__all__ = ["Cudnn"]
