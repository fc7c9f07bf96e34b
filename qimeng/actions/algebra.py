"""The kind that rewrites the graph by algebra.

Deals in options, each a group of rules (`qimeng.graph.rewrites`). Knows nothing about any one rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions.base import Context, GraphRewrite, Kind
from qimeng.actions.large import unlike
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.family import is_covered
from qimeng.graph.loops.loop import is_loop
from qimeng.graph.region import Region
from qimeng.graph.rewrites import find_rewrites, options
from qimeng.interfaces import Action
from qimeng.program.program import Program

SHOWN = 3
"""Reasons that a refusal tells."""


class Algebra(Kind):
    """Compute the same with less work; what then depends on parameters alone is computed once, until one changes.

    args: ``fold`` (scales and batch norms of evaluation mode into the weights before them), ``early`` (sums and means
    moved before linear maps), ``structure`` (diagonal matrices, reductions of one element, repeats), ``together``
    (linear layers on the same values as one), ``experts`` (weighted sums of layers that all read the same rows, as a
    batch), ``apart`` (an attention of heads too deep for one kernel as its parts), ``layers`` (recurrent layers as
    products over all steps and loops), ``channels-last`` (networks of convolutions in channels-last memory). Each is
    applied wherever it applies. New loops over steps become kernels in the same step, where a family covers them.
    rewrite: ``v = conv(x, w); y = batch_norm(v)`` -> ``y = conv(x, w * s)``
    """

    name = "algebra"
    options = options()

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """One for each option."""
        for option in self.options if not program.fallback else ():
            yield Action(self.name, (), option)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where a rule of the option applies somewhere."""
        if action.param not in self.options:
            raise IllegalAction(f"algebra has no option {action.param!r}; known: {', '.join(self.options)}")
        found, reasons = find_rewrites(program.graph, action.param)
        if not found:
            more = "; ".join(reasons[:SHOWN]) or "no operator of the kind"
            raise IllegalAction(
                f"algebra {action.param}: no rule applies to the {len(program.regions)} regions: {more}"
            )

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The rewrites of the option, all over the graph."""
        found, _ = find_rewrites(program.graph, action.param)
        after = program.with_rewrites(found)
        note = f"{len(found)} rewrites: {len(program.called)} regions become {len(after.called)} a call"
        return GraphRewrite(rewrites=found, note=note, each=_new_loops(program, after, context))


def _new_loops(before: Program, after: Program, context: Context) -> tuple[Region, ...]:
    """One of each unlike loop over steps that only `after` has, where the coder prints a kernel for it.

    On PyTorch such a loop launches each operator of each step, and takes a hundred times as long as its kernel.
    """
    if not context.coder.schedules:
        return ()
    known = {r.signature for r in before.regions}
    loops = (r for r in unlike(after) if r.signature not in known and any(is_loop(n) for n in r.ops))
    return tuple(r for r in loops if is_covered(r) and context.coder.can_implement(r) is None)


register(Algebra())


__all__ = ["Algebra"]
