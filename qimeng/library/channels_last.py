"""Regions of convolutions in channels-last memory, the layout of cuDNN's tensor-core kernels.

Deals in the layout of operands and results. The weights are laid out once. Source: NVIDIA, Convolutional Layers User's
Guide, section Tensor Layouts. Knows nothing about which kernel the library then takes.
"""

from __future__ import annotations

from qimeng.device import Device
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.graph.state import is_state
from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered, inputs_of
from qimeng.program.implementation import Implementation

KEEPS = frozenset(
    f"aten.{name}"
    for name in "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d mean "
    "_native_batch_norm_legit_no_training upsample_nearest2d upsample_bilinear2d constant_pad_nd cat".split()
)
"""Operators beside pointwise ones that compute in the layout that they are given."""

FORMATS = {4: "torch.channels_last", 5: "torch.channels_last_3d"}


class ChannelsLast(LibraryCall):
    """The region's PyTorch calls on operands in channels-last memory; results as PyTorch's."""

    name = "channels-last"

    def check(self, region: Region, device: Device) -> None:
        """Legal for convolutions of two or three dimensions among operators that keep the layout."""
        graph = region.graph
        _rank(region)
        odd = [n for n in region.ops if category(n) not in ("convolution", "pointwise") and n.packet not in KEEPS]
        if odd:
            raise NotOffered(f"{odd[0].packet.removeprefix('aten.')} may not keep the layout")
        bad = [v for v in region.outputs if not graph.meta(v).is_contiguous]
        if bad:
            raise NotOffered(f"the result {bad[0].node} has strides {graph.meta(bad[0]).stride}")

    def write(self, region: Region, prefix: str) -> Implementation:
        """The PyTorch function between changes of layout; that of weights is prepared."""
        graph, rank = region.graph, _rank(region)
        layout, names = FORMATS[rank], inputs_of(region)
        weights = _weights(region)
        numbers = [i for i, v in enumerate(region.inputs) if v in weights and is_state(graph, v)]
        given = list(names)
        for k, i in enumerate(numbers):
            given[i] = f"w{k}"
        for i, v in enumerate(region.inputs):
            if i not in numbers and len(graph.meta(v).shape) == rank:
                given[i] = f"{names[i]}.contiguous(memory_format={layout})"
        packed = [f"w{k}" for k in range(len(numbers))]
        taken = ", ".join(names[i] for i in numbers)
        lines = [
            region.function(f"{prefix}_region"),
            "",
            f"def {prefix}({', '.join([*names, *packed])}):",
            f"    found = {prefix}_region({', '.join(given)})",
            "    return tuple([y.contiguous() for y in found])",
        ]
        if not numbers:
            return Implementation(LANGUAGE, "\n".join(lines) + "\n", prefix)
        made = "".join(f"{names[i]}.contiguous(memory_format={layout}), " for i in numbers)
        lines += ["", "", f"def {prefix}_prepare({taken}):", f"    return ({made})"]
        return Implementation(LANGUAGE, "\n".join(lines) + "\n", prefix, f"{prefix}_prepare", tuple(numbers))


def _rank(region: Region) -> int:
    """Dimensions of what the region convolves, batch and channels among them: 4 or 5.

    Raises:
        NotOffered: it convolves nothing of these, or both.
    """
    ranks = {len(region.graph.meta(Value(n.name)).shape) for n in region.ops if category(n) == "convolution"}
    if len(ranks) != 1 or not ranks <= set(FORMATS):
        raise NotOffered(f"{region.label()} has no convolution of 2 or 3 dimensions")
    return ranks.pop()


def _weights(region: Region) -> set[Value]:
    return {n.args[1] for n in region.ops if category(n) == "convolution"}


__all__ = ["ChannelsLast"]
