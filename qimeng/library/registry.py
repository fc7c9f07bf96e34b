"""Which ways to call a library there are, and which texts they print.

Deals in names of options and in regions. Knows nothing about any one library.
"""

from __future__ import annotations

from qimeng.graph.groups import groups_of
from qimeng.graph.region import Region
from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered
from qimeng.library.channels_last import ChannelsLast
from qimeng.library.cudnn import Cudnn
from qimeng.library.fused import FusedLinear
from qimeng.library.inductor import Inductor
from qimeng.library.structured import Structured
from qimeng.program.implementation import Implementation
from qimeng.program.program import Program

CALLS: dict[str, LibraryCall] = {
    call.name: call
    for call in (
        Inductor("inductor"),
        Inductor("inductor-tuned", "max-autotune-no-cudagraphs"),
        ChannelsLast(),
        Cudnn(),
        FusedLinear(),
    )
}
"""Every way by name, in the order in which the action `library` offers them."""

CHOSEN: dict[str, LibraryCall] = {call.name: call for call in (Structured(),)}
"""Ways that other kinds of action choose."""


def written(region: Region, name: str) -> Implementation:
    """The implementation of `region` that the way called `name` prints; always the same.

    Raises:
        NotOffered: it computes no such region.
    """
    return (CALLS | CHOSEN)[name].write(region, f"{name.replace('-', '_')}_{region.signature}")


def call_of(region: Region, implementation: Implementation) -> LibraryCall | None:
    """The way that prints exactly this implementation for `region`, or None; the claim may be anybody's."""
    if implementation.language != LANGUAGE:
        return None
    name = implementation.entry.removesuffix(f"_{region.signature}").replace("_", "-")
    try:
        is_written = name in CALLS | CHOSEN and implementation == written(region, name)
    except NotOffered:
        return None
    return (CALLS | CHOSEN)[name] if is_written else None


def is_library(region: Region, implementation: Implementation) -> bool:
    """Whether one of these ways prints exactly this implementation for `region`."""
    return call_of(region, implementation) is not None


def largest_group(program: Program) -> tuple[Region, ...]:
    """The largest group of regions on PyTorch that touch each other and can be one region; in topological order."""

    def on_pytorch(region: Region) -> bool:
        return program.implementation(region).language == "torch"

    groups = list(groups_of(program.called, on_pytorch, most=1 << 30))
    return max(groups, key=lambda g: sum(len(r.nodes) for r in g), default=())


__all__ = ["CALLS", "CHOSEN", "call_of", "is_library", "largest_group", "written"]
