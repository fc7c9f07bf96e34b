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
from qimeng.program.launch import CUDA_GRAPH, copied_bytes, obstacle
from qimeng.program.program import Program

LAUNCH_US = 10.0
"""Microseconds that a launch by PyTorch costs at most (5 to 8 on an H200's host for an operator of eager mode)."""


class Launch(Kind):
    """Launch all kernels of a call at once, as a recorded CUDA graph, or one by one.

    args: ``cuda-graph`` or ``one-by-one``.
    rewrite: ``a(x); b(); c()`` -> ``static_x.copy_(x); graph.replay(); return static_y.clone()``
    """

    name = "launch"
    options = (CUDA_GRAPH, "one-by-one")

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """The one that the program does not have."""
        if not program.fallback:
            yield Action(self.name, (), "one-by-one" if program.launch else CUDA_GRAPH)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal on CUDA where nothing waits in the middle of a call, and copies cost less than launches."""
        if action.param not in self.options:
            raise IllegalAction(f"launch has no option {action.param!r}; known: {', '.join(self.options)}")
        if (action.param == CUDA_GRAPH) == bool(program.launch):
            raise IllegalAction(f"the kernels are launched {program.launch or 'one by one'} already")
        if action.param == "one-by-one":
            return
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
        launch = CUDA_GRAPH if action.param == CUDA_GRAPH else ""
        return GraphRewrite(launch=launch, note=f"{len(program.called)} regions launched {launch or 'one by one'}")


def most_launches(program: Program) -> int:
    """Kernels that a call launches, at most: one a generated region, one an operator of PyTorch's elsewhere."""
    computing = (n for r in program.called if not program.implementation(r).generated for n in r.ops)
    generated = sum(program.implementation(r).generated for r in program.called)
    return generated + sum(category(n) != "view" for n in computing)


register(Launch())


__all__ = ["Launch", "most_launches"]
