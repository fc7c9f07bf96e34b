"""Programs: an immutable choice of regions and of an implementation for each.

Deals in text (each implementation is source code) and in which code computes which region. Knows nothing about
checking, timing or choosing. `program.source` is the standalone file that a user takes away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType

from qimeng.errors import IllegalAction
from qimeng.graph.fusion import Fusions
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Cycle, Region, partition, repartition
from qimeng.graph.rewrites import Rewrite, rewritten_graph
from qimeng.graph.state import settled_nodes
from qimeng.program.emit import emit_program
from qimeng.program.identity import fallback_digest, program_digest
from qimeng.program.implementation import Implementation, torch_implementation
from qimeng.program.launch import CUDA_GRAPH, STREAMS, obstacle
from qimeng.program.load import load_source
from qimeng.program.schedule import Schedule
from qimeng.program.settled import is_settled

SHOWN = 8
"""Regions that a program's `repr` names."""


@dataclass(frozen=True, eq=False)
class Program:
    """Regions in topological order and the implementation of each.

    Attributes:
        graph: what is computed.
        regions: the partition.
        implementations: region signature to implementation; a region without one runs on PyTorch.
        fallback: source text of the whole computation where it could not be captured (one opaque region).
        captured: the graph before any rewrite; None where there was none.
        rewrites: what led from there to `graph`.
        launch: ``"cuda-graph"`` or ``"streams"`` where the kernels are recorded and replayed (`qimeng.program.launch`);
            empty where they are launched one by one.
    """

    graph: OpGraph
    regions: tuple[Region, ...]
    implementations: Mapping[str, Implementation] = field(default_factory=dict)
    fallback: str = ""
    captured: OpGraph | None = None
    rewrites: tuple[Rewrite, ...] = ()
    launch: str = ""

    def __repr__(self) -> str:
        if self.fallback:
            return f"<Program {self.digest}: left as it was written>"
        parts = [f"{r.label()} [{self.implementation(r).language}]" for r in self.regions[:SHOWN]]
        more = f", and {len(self.regions) - SHOWN} more" if len(self.regions) > SHOWN else ""
        return f"<Program {self.digest}: {', '.join(parts)}{more}>"

    @classmethod
    def start(cls, graph: OpGraph) -> Program:
        """Every operator a region of its own, all on PyTorch; what is computed once is one region."""
        return cls(graph, _kept((), graph) if settled_nodes(graph) else partition(graph))

    def region(self, region_id: str) -> Region:
        """The region called `region_id`.

        Raises:
            KeyError: no such region in this program.
        """
        try:
            return self._by_id[region_id]
        except KeyError:
            raise KeyError(f"no region {region_id}; this program has {list(self._by_id)}") from None

    @cached_property
    def _by_id(self) -> dict[str, Region]:
        return {r.id: r for r in self.regions}

    @cached_property
    def fusions(self) -> Fusions:
        """Which regions may become one."""
        return Fusions(self.regions)

    @property
    def start_graph(self) -> OpGraph:
        """The graph as it was captured."""
        return self.captured or self.graph

    def is_settled(self, region: Region) -> bool:
        """Whether `region` is computed once, and again only when a parameter or buffer changes."""
        return is_settled(self.graph, region)

    @cached_property
    def called(self) -> tuple[Region, ...]:
        """The regions that every call computes."""
        return tuple(r for r in self.regions if not self.is_settled(r))

    def implementation(self, region: Region) -> Implementation:
        """What computes `region`; PyTorch where it is computed once."""
        if self.is_settled(region):
            return torch_implementation(region)
        return self.implementations.get(region.signature) or torch_implementation(region)

    def schedule(self, region: Region) -> Schedule | None:
        """The template's schedule of `region`; None on PyTorch or where another coder wrote it."""
        implementation = self.implementations.get(region.signature)
        return implementation.schedule if implementation is not None else None

    @cached_property
    def on_pytorch(self) -> bool:
        """True where PyTorch computes all of it, as it was written and kernel by kernel."""
        return (
            not self.rewrites
            and not self.launch
            and all(self.implementation(region) == torch_implementation(region) for region in self.regions)
        )

    def with_regions(self, regions: tuple[Region, ...]) -> Program:
        """The same computation, partitioned otherwise; implementations stay where the region is still there."""
        keep = {r.signature for r in regions}
        return replace(
            self, regions=regions, implementations={s: i for s, i in self.implementations.items() if s in keep}
        )

    def with_rewrites(self, rewrites: tuple[Rewrite, ...]) -> Program:
        """The same computation on a rewritten graph; regions whose operators are still there stay.

        Raises:
            IllegalAction: a rewrite does not apply.
        """
        if not rewrites:
            return self
        graph = rewritten_graph(self.graph, rewrites)
        regions = _kept(self.regions, graph)
        keep = {r.signature for r in regions}
        return replace(
            self,
            graph=graph,
            regions=regions,
            implementations={s: i for s, i in self.implementations.items() if s in keep},
            captured=self.start_graph,
            rewrites=(*self.rewrites, *rewrites),
        )

    def with_launch(self, launch: str) -> Program:
        """The same program, launched otherwise.

        Raises:
            IllegalAction: there is no such launch, or the program cannot be recorded; the message says why.
        """
        if launch not in ("", CUDA_GRAPH, STREAMS):
            known = f"{CUDA_GRAPH!r}, {STREAMS!r} and '' for one by one"
            raise IllegalAction(f"no launch is called {launch!r}; known: {known}")
        if launch and (reason := obstacle(self.graph)):
            raise IllegalAction(f"the program cannot be recorded: {reason}")
        return replace(self, launch=launch)

    def with_implementation(self, region_id: str, implementation: Implementation) -> Program:
        """The program with `implementation` for the region called `region_id` and all equal ones."""
        signature = self.region(region_id).signature
        return replace(self, implementations={**self.implementations, signature: implementation})

    @cached_property
    def source(self) -> str:
        """A standalone file (torch and triton only) whose class `Model` takes the reference's `state_dict`."""
        if self.fallback:
            return self.fallback
        return emit_program(self.graph, [(r, self.implementation(r)) for r in self.regions], self.launch)

    @cached_property
    def digest(self) -> str:
        """Content hash of graph, partition and implementations, not of the text (`qimeng.program.identity`)."""
        if self.fallback:
            return fallback_digest(self.fallback)
        return program_digest(self.graph, [(r, self.implementation(r)) for r in self.regions], self.launch)

    def load(self, name: str = "qimeng_program") -> ModuleType:
        """The source as a Python module of its own (see `load_source`)."""
        return load_source(self.source, name)


def _kept(regions: tuple[Region, ...], graph: OpGraph) -> tuple[Region, ...]:
    """The partition of a rewritten graph: regions that lost no operator, and each other operator by itself.

    What is computed once is one region. A region that would now need its own result is taken apart.
    """
    settled = settled_nodes(graph)
    sets = [set(r.nodes) for r in regions if all(n in graph.nodes for n in r.nodes)]
    held = set[str]().union(*sets)
    singles = [set(r.nodes) for r in partition(graph)]
    for single in singles:  # a kept region computes the views that it now reads, as every region does
        views = {n for n in single if n not in held}
        for inside in sets:
            if inside & single:
                inside |= {n for n in views if graph.nodes[n].packet in VIEWS}
    sets += [s for s in singles if not any(s <= inside for inside in sets)]
    while True:
        once = [s for s in sets if s <= settled]
        together = [set[str]().union(*once)] if once else []
        try:
            return repartition(graph, [*(s for s in sets if not s <= settled), *together])
        except Cycle as found:  # a rewrite made operators of one region need each other by way of another region
            sets = _apart(sets, found.regions, singles)


def _apart(sets: list[set[str]], regions: Sequence[Region], singles: list[set[str]]) -> list[set[str]]:
    """`sets` with those of more than one operator that `regions` are made of taken apart."""
    large = [s for s in sets if s not in singles and any(s == set(r.nodes) for r in regions)]
    if not large:
        raise IllegalAction("the rewritten computation would have a cycle")
    kept = [s for s in sets if s not in large]
    return kept + [s for s in singles if not any(s <= inside for inside in kept)]


__all__ = ["Implementation", "Program", "load_source", "torch_implementation"]
