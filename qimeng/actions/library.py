"""The kind that has a region computed by a library.

Deals in options, each a way to call one (`qimeng.library`). Knows nothing about any one library.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from qimeng.actions.base import Context, GraphRewrite, Kind, find_region
from qimeng.actions.large import is_large
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.graph.ops import VIEWS, category
from qimeng.graph.region import Region, merge
from qimeng.interfaces import Action
from qimeng.library import CALLS, NotOffered, largest_group, written
from qimeng.program.program import Program, torch_implementation

HELD = ("gemm", "convolution", "attention", "reduction", "scan")
"""Categories of operators that PyTorch's own calls have a kernel for."""

SHOWN = 120
"""Characters of a region's label that a note shows: a whole network has a thousand operators."""


class Library(Kind):
    """Have a library compute a region: the vendor's kernels through PyTorch, or torch.compile's.

    args: the region; or none, for the largest group of regions on PyTorch that touch, or for all regions where none is
    left there: the group becomes one region. Without an option one operator goes back to PyTorch's own call; in a large
    program (`qimeng.actions.large`) a region of several operators goes back to theirs.
    ``inductor`` and ``inductor-tuned`` are torch.compile's code (default mode, and max-autotune), ``channels-last``
    lays convolutions out so, ``cudnn`` lets cuDNN choose its algorithm by measuring, ``fused`` gives an activation to
    cuBLASLt.
    rewrite: ``kernel[grid](a, b, c)`` -> ``c = torch.ops.aten.mm(a, b)``
    """

    name = "library"
    options = ("", *CALLS)
    measured = frozenset(CALLS)
    local = True
    shared = True

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """Each option on each region, and each that is no single operator's on the largest group."""
        yield from super().proposals(program, context)
        for option in CALLS if not program.fallback else ():
            yield Action(self.name, (), option)

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where the library computes the region; without an option, for one generated operator of a library."""
        if action.param not in self.options:
            raise IllegalAction(f"library has no option {action.param!r}; known: {', '.join(CALLS)}")
        region = self._subject(program, action)[1]
        if action.param:
            self._check_call(program, region, action, context)
            return
        if not program.implementation(region).generated:
            raise IllegalAction(f"{region.id} is not a generated kernel")
        heavy = [n for n in region.ops if n.packet not in VIEWS]
        if not is_large(program) and (len(heavy) != 1 or category(heavy[0]) not in HELD):
            raise IllegalAction(f"{region.label()} is not one library operator ({len(heavy)} operators)")

    def target(self, program: Program, action: Action) -> Region:
        """The region that is computed by the library."""
        return self._subject(program, action)[1]

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The library's call, in the place of what computes the region now."""
        regions, region = self._subject(program, action)
        if not action.param:
            return GraphRewrite(None, region, torch_implementation(region), "back to the library")
        return GraphRewrite(regions, region, written(region, action.param), f"{_named(region)} by {action.param}")

    def _subject(self, program: Program, action: Action) -> tuple[tuple[Region, ...] | None, Region]:
        """The new partition, None where it stays, and the region that is meant."""
        if action.regions:
            return None, find_region(program, action)
        found = _grouped(program) if action.param else 0
        if isinstance(found, int):
            raise IllegalAction(f"the program has {found} region(s) for a library; a group has at least 2")
        return found

    def _check_call(self, program: Program, region: Region, action: Action, context: Context) -> None:
        try:
            CALLS[action.param].check(region, context.device)
        except NotOffered as error:
            raise IllegalAction(f"{region.label()} by {action.param}: {error}") from None
        if action.regions and program.implementation(region) == written(region, action.param):
            raise IllegalAction(f"{region.id} is computed by {action.param} already")


def _named(region: Region) -> str:
    """Its label; of one that is a whole network, the first operators."""
    label = region.label()
    return label if len(label) <= SHOWN else f"{label[:SHOWN]}..."


def subject_group(program: Program) -> tuple[Region, ...]:
    """What an action without a region is about: what is left on PyTorch, else all that every call computes."""
    group = largest_group(program)
    return group if len(group) > 1 else program.called


@lru_cache(16)
def _grouped(program: Program) -> tuple[tuple[Region, ...], Region] | int:
    """The partition with the group as one region, and that region; the number of regions where it is no group."""
    group = subject_group(program)
    if len(group) < 2:
        return len(group)
    regions = merge(program.regions, (r.id for r in group))
    inside = {n for r in group for n in r.nodes}
    return regions, next(r for r in regions if inside.issuperset(r.nodes) and not program.is_settled(r))


register(Library())


__all__ = ["Library", "subject_group"]
