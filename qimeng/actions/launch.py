"""The kind that says how the kernels of a whole program are launched.

Deals in the launch as a whole. Knows nothing about the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions.base import Context, GraphRewrite, Kind
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.graph.ops import category
from qimeng.interfaces import Action
from qimeng.program.lanes import lanes_of
from qimeng.program.launch import CUDA_GRAPH, STREAMS, copied_bytes, obstacle
from qimeng.program.program import Program

LAUNCH_US = 10.0
"""Microseconds that a launch by PyTorch costs at most (5 to 8 on an H200's host for an operator of eager mode)."""


class Launch(Kind):
    """Launch all kernels of a call at once, as a recorded CUDA graph, or one by one.

    args: ``cuda-graph``, ``streams`` (a CUDA graph in which independent branches run at the same time) or
    ``one-by-one``.
    rewrite: ``a(x); b(); c()`` -> ``static_x.copy_(x); graph.replay(); return static_y.clone()``
    """

    name = "launch"
    options = (CUDA_GRAPH, STREAMS, "one-by-one")

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """Those that the program does not have."""
        for option in self.options if not program.fallback else ():
            if option != (program.launch or "one-by-one"):
                yield Action(self.name, (), option)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal on CUDA where nothing waits in the middle of a call, and copies cost less than launches."""
        if action.param not in self.options:
            raise IllegalAction(f"launch has no option {action.param!r}; known: {', '.join(self.options)}")
        if action.param == (program.launch or "one-by-one"):
            raise IllegalAction(f"the kernels are launched {program.launch or 'one by one'} already")
        if action.param == "one-by-one":
            return
        if action.param == STREAMS and lanes_of(program.graph, program.regions).count == 1:
            raise IllegalAction(f"the {len(program.called)} regions have no two branches that could run side by side")
        device, launches = context.device, most_launches(program)
        if device.kind != "cuda":
            raise IllegalAction(f"a CUDA graph needs CUDA, {device.name} is {device.kind}")
        if program.fallback or (reason := obstacle(program.graph)):
            raise IllegalAction(
                f"the program cannot be recorded: {'it was not captured' if program.fallback else reason}"
            )
        copied = copied_bytes(program.graph)
        copies_us = copied / (device.bandwidth_gbs * 1e3)
        if copies_us > launches * LAUNCH_US:
            raise IllegalAction(
                f"copying inputs and results moves {copied} B, {copies_us:.1f} us on {device.name}; "
                f"{launches} launches cost at most {launches * LAUNCH_US:.0f} us"
            )

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The same program, launched otherwise."""
        launch = action.param if action.param != "one-by-one" else ""
        return GraphRewrite(launch=launch, note=f"{len(program.called)} regions launched {launch or 'one by one'}")


def most_launches(program: Program) -> int:
    """Kernels that a call launches, at most: one a generated region, one an operator of PyTorch's elsewhere."""
    computing = (n for r in program.called if not program.implementation(r).generated for n in r.ops)
    generated = sum(program.implementation(r).generated for r in program.called)
    return generated + sum(category(n) != "view" for n in computing)


register(Launch())


__all__ = ["Launch", "most_launches"]
