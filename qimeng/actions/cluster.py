"""The kind that makes connected regions one each, many at a time, for programs too large for fusions of two.

Deals in groups of regions on PyTorch. Knows nothing about schedules' numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache

from qimeng.actions.base import Context, GraphRewrite, Kind, find_region
from qimeng.actions.chains import Group, chains_of, joined
from qimeng.actions.large import MANY, is_large
from qimeng.actions.registry import register
from qimeng.errors import IllegalAction
from qimeng.family import Unsupported, covering, families
from qimeng.graph.clusters import Clusters, Pair
from qimeng.graph.ops import VIEWS, category, is_product
from qimeng.graph.region import Region
from qimeng.interfaces import Action
from qimeng.program.program import Program

MOST_OPERATORS = 200
"""Operators of a cluster: the time to read and to compile a kernel grows faster than its text."""


class Cluster(Kind):
    """Fuse connected regions on PyTorch, as many as one kernel can compute, without an evaluation for each pair.

    Pairs are fused one after the other, as long as the coder can implement the result: what follows a product first,
    then where most bytes pass. What comes before a product is left alone, as it would be computed again for each tile.
    Two products become one only where a large value is then spared from memory (attention).

    args: none, for all over the program; or a region, for the cluster that it is in; with ``everywhere`` at all equal
    places.
    rewrite: ``a = conv(x); b = bn(a); c = relu(b); d = pool(c)`` -> ``c = conv_bn_relu(x); d = pool(c)``
    """

    name = "cluster"
    options = ("", "everywhere")

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """For a large program: all over, each cluster by itself, and each kind of cluster that is in several places."""
        found = clusters_of(program, context) if is_large(program) else {}
        if found:
            yield Action(self.name)
        places = Counter(made.signature for made in found.values())
        for group in found:
            yield Action(self.name, (group[0].id,))
        for group, made in found.items():
            if places.pop(made.signature, 1) > 1:  # offered at the first place
                yield Action(self.name, (group[0].id,), "everywhere")

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where a large program has such clusters."""
        self._chosen(program, action, context)

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The partition with each cluster as one region."""
        regions = joined(program, self._chosen(program, action, context))
        return GraphRewrite(regions, note=f"{len(program.regions)} regions become {len(regions)}")

    def _chosen(self, program: Program, action: Action, context: Context) -> tuple[Group, ...]:
        if action.param not in self.options:
            raise IllegalAction(
                f"cluster has no option {action.param!r}; known: {', '.join(filter(None, self.options))}"
            )
        if not is_large(program):
            raise IllegalAction(f"cluster is for programs of {MANY} operators or more; fuse two regions at a time")
        found = clusters_of(program, context)
        if not found:
            raise IllegalAction("no regions on PyTorch that touch can be one region")
        if not action.regions:
            return tuple(found)
        region = find_region(program, action)
        mine = next((group for group in found if region in group), None)
        if mine is None:
            raise IllegalAction(f"{region.id} ({region.label()}) can be in no cluster with its neighbours")
        if not action.param:
            return (mine,)
        return tuple(group for group, made in found.items() if made.signature == found[mine].signature)


def clusters_of(program: Program, context: Context) -> Mapping[Group, Region]:
    """The regions of each cluster of `program`, in topological order, and what they become."""
    return _found(_Partition(program), context)


class _Partition:
    """The regions of a program and their implementations, however it is launched."""

    def __init__(self, program: Program):
        self.program = program

    def __eq__(self, other: object) -> bool:
        mine = self.program
        if not isinstance(other, _Partition):
            return False
        return mine.regions is other.program.regions and mine.implementations is other.program.implementations

    def __hash__(self) -> int:
        return hash((id(self.program.regions), id(self.program.implementations)))


@lru_cache(16)
def _found(partition: _Partition, context: Context) -> Mapping[Group, Region]:
    program = partition.program
    waiting = frozenset(r.id for r in program.called if not program.implementation(r).generated)
    none: dict[object, frozenset[str]] = program.graph.memo.setdefault("no clusters", {})
    asked = (context, *families().values())
    if waiting <= none.get(asked, frozenset()):  # fewer regions have no more clusters
        return {}

    def fits(pair: Pair, both: Region) -> bool:
        first, second = map(has_product, pair)
        if second and not first or sum(n.packet not in VIEWS for n in both.ops) > MOST_OPERATORS:
            return False
        return context.coder.can_implement(both) is None and (not second or _spares(both))

    def rank(first: Region, second: Region, passed: int) -> tuple[float, ...]:
        return not has_product(first), -passed

    chains = chains_of(program, context)  # in halves where they are long, not one operator at a time
    clusters = Clusters(
        joined(program, chains), lambda r: not program.is_settled(r) and not program.implementation(r).generated
    )
    clusters.grow(rank, fits)
    chain_of = {frozenset(n for r in chain for n in r.nodes): chain for chain in chains}
    found: dict[Group, Region] = {}
    for members, made in clusters.groups():
        parts = {r for m in members for r in chain_of.get(frozenset(m.nodes), (m,))}
        if len(parts) > 1:
            found[tuple(r for r in program.regions if r in parts)] = made
    if not found:
        none[asked] = waiting
    return found


def has_product(region: Region) -> bool:
    """Whether it multiplies matrices, so that each value it reads is read by several tiles."""
    return any(is_product(region.graph, n) or category(n) == "attention" for n in region.ops)


def _spares(region: Region) -> bool:
    try:
        return covering(region)[0].spares
    except Unsupported:
        return False


register(Cluster())


__all__ = ["Cluster", "clusters_of", "has_product"]
