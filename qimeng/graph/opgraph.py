"""The computation as a networkx graph of ATen operators.

Deals in operators, their values (shape, dtype, stride) and the users of these. Knows nothing about how it was captured,
how it is partitioned or how any of it is implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import networkx as nx

from qimeng.graph.structure import Structure
from qimeng.spec.call import Call


@dataclass(frozen=True, order=True)
class Value:
    """Output number `port` of the node called `node`."""

    node: str
    port: int = 0


@dataclass(frozen=True)
class Meta:
    """Shape, strides (in elements) and dtype name (``"float32"``) of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def bytes(self) -> int:
        """Bytes of the elements (a broadcast view counts its elements once each)."""
        return self.numel * itemsize(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """True where the strides are those of a row-major tensor of this shape."""
        return self.stride == row_major(self.shape)


REINTERPRETS = "aten.view.dtype"
"""Takes the bits of a tensor for numbers of another dtype, which no other overload of ``view`` does."""


@dataclass(frozen=True)
class Node:
    """One vertex: an operator, or a source of values (input, parameter, buffer, constant).

    Attributes:
        name: unique in its graph.
        kind: ``"op"``, ``"input"``, ``"scalar"`` (a Python number among the inputs), ``"parameter"``, ``"buffer"``
            or ``"constant"``.
        target: the ATen overload (``"aten.add.Tensor"``) of an op, or ``"torch."``, a label and a hash where it is a
            piece of PyTorch code (`qimeng.graph.parts`); the state-dict key of a parameter or buffer; the position
            among the flattened inputs, as text, of an input.
        args: positional arguments, with `Value` where a tensor comes in.
        kwargs: keyword arguments, likewise.
        metas: one `Meta` per port; None for a port that nothing reads.
        literal: the number a constant holds; the contents of a buffer that is not in the state_dict (zlib, base64);
            the text of an op that is a piece of PyTorch code.
    """

    name: str
    kind: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    metas: tuple[Meta | None, ...] = ()
    literal: Any = None

    @cached_property
    def packet(self) -> str:
        """The operator without its overload (``"aten.add"``), but where that is another operator of the same name."""
        if self.target == REINTERPRETS:
            return REINTERPRETS
        return self.target.rsplit(".", 1)[0] if self.kind == "op" else ""

    def operands(self) -> tuple[Value, ...]:
        """Every `Value` among the arguments, in order, repeated where it is used twice."""
        return self._operands

    @cached_property
    def _operands(self) -> tuple[Value, ...]:
        return tuple(values_in((self.args, tuple(v for _, v in self.kwargs))))


@dataclass(frozen=True)
class Surroundings:
    """What a graph that a region was cut from says of the region's values: what comes after may depend on an ulp.

    Attributes:
        decides: values that a later operator decides on (`qimeng.graph.deciding`).
        shows: values of half types whose rounding shows in a result (`qimeng.graph.rounding`).
        updates: values that buffers get: part of how they are judged, and of no program's identity.
    """

    decides: frozenset[Value] = frozenset()
    shows: frozenset[Value] = frozenset()
    updates: frozenset[Value] = frozenset()


@dataclass(frozen=True)
class BlockShares:
    """Shares of a mask's blocks that hold anything (`qimeng.graph.block_shares`).

    Attributes:
        sides: of the blocks, in elements, the least first.
        some: for each, the share of the blocks in which any element is not zero.
        none: the share of those in which any is zero.
    """

    sides: tuple[int, ...]
    some: tuple[float, ...]
    none: tuple[float, ...]

    def of(self, block: tuple[int, int], seen: bool = True) -> float:
        """The share for blocks of about so many rows and columns; of `none` where `seen` is False."""
        size = (block[0] * block[1]) ** 0.5
        nearest = min(range(len(self.sides)), key=lambda i: abs(self.sides[i] - size))
        return (self.some if seen else self.none)[nearest]


@dataclass(frozen=True, eq=False)
class OpGraph:
    """Operators in topological order with what goes in and out.

    Attributes:
        nodes: name to `Node`, in topological order.
        outputs: what the computation returns, flattened: `Value`, or a plain Python object.
        mutations: (buffer key, new value) for each buffer that a call updates.
        in_spec: how the inputs are put together, ``(args, kwargs)``.
        out_spec: how the flattened outputs are put together again.
        scalars: position among the flattened inputs to the number captured, for Python numbers that were
            specialised (a call with another number is refused).
        n_inputs: number of flattened inputs.
        training: the mode that the module was in, where it computes something else in the other; None where not.
        call: names and defaults of the arguments, for calls that use them.
        settles: whether operators that depend on parameters and buffers alone are computed once, and again only when
            one of these changes (`qimeng.graph.state`); True for graphs that a rewrite made.
        deterministic: whether results must have the same bits in every call.
        around: what is known of the graph that this one was cut from (`qimeng.graph.cut`); None for a whole one.
        shares: name of the node of a mask to the shares of its blocks that hold anything, as far as they are known.
            They belong to estimates of time alone, not to a program's identity.
    """

    nodes: dict[str, Node]
    outputs: tuple[Any, ...]
    mutations: tuple[tuple[str, Value], ...] = ()
    in_spec: Structure = Structure()
    out_spec: Structure = Structure()
    scalars: dict[int, Any] = field(default_factory=dict)
    n_inputs: int = 0
    training: bool | None = None
    call: Call = field(default_factory=Call)
    settles: bool = False
    deterministic: bool = False
    around: Surroundings | None = None
    shares: Mapping[str, BlockShares] = field(default_factory=dict)

    @property
    def updates(self) -> frozenset[Value]:
        """The values that buffers get, of this graph or of the one that it was cut from."""
        return frozenset(v for _, v in self.mutations) | (self.around.updates if self.around else frozenset())

    def __repr__(self) -> str:
        count = sum(1 for _ in self.ops())
        return f"<OpGraph: inputs {self.n_inputs}, operators {count}, outputs {len(self.outputs)}>"

    @cached_property
    def position(self) -> dict[str, int]:
        """Name of each node to its number in topological order."""
        return {name: number for number, name in enumerate(self.nodes)}

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What others worked out about this graph and want to find again; kept as long as the graph is."""
        return {}

    def meta(self, value: Value) -> Meta:
        """Shape, stride and dtype of `value`."""
        meta = self.nodes[value.node].metas[value.port]
        if meta is None:
            raise KeyError(f"{value} has no tensor")
        return meta

    def __getstate__(self) -> dict[str, Any]:
        """Without what others have worked out of it: another process does so itself."""
        return {**self.__dict__, "memo": {}}

    def ops(self) -> Iterator[Node]:
        """The operator nodes, in topological order."""
        return (n for n in self.nodes.values() if n.kind == "op")

    def results(self) -> tuple[Value, ...]:
        """Every value that leaves the graph: outputs and buffer updates."""
        return self._results

    @cached_property
    def _results(self) -> tuple[Value, ...]:
        out = [o for o in self.outputs if isinstance(o, Value)]
        return tuple(dict.fromkeys(out + [v for _, v in self.mutations]))

    @property
    def digraph(self) -> nx.MultiDiGraph:
        """The graph as networkx: an edge for each argument slot, with `slot` and `port`."""
        g = nx.MultiDiGraph()
        for node in self.nodes.values():
            g.add_node(node.name, node=node)
            for slot, value in enumerate(node.operands()):
                g.add_edge(value.node, node.name, slot=slot, port=value.port)
        return g

    def users(self) -> Mapping[Value, list[str]]:
        """Value to the names of the operators that read it (once each), in topological order."""
        if "users" not in self.memo:
            table = self.memo["users"] = dict[Value, list[str]]()
            for node in self.ops():
                for value in dict.fromkeys(node.operands()):
                    table.setdefault(value, []).append(node.name)
        found: Mapping[Value, list[str]] = self.memo["users"]
        return found


def places_of(outputs: Iterable[Any], values: Set[Value]) -> frozenset[int]:
    """Which of the tensors among `outputs` are `values`."""
    tensors = [x for x in outputs if isinstance(x, Value)]
    return frozenset(i for i, x in enumerate(tensors) if x in values)


def same_operators(one: OpGraph, other: OpGraph) -> bool:
    """Whether two graphs, of sizes that may differ, have the same operators in the same order.

    The text of a piece of PyTorch code holds sizes, such as the number of a loop's steps; it counts by its label.
    """

    def kinds(graph: OpGraph) -> list[str]:
        return [n.target if n.literal is None else n.packet for n in graph.ops()]

    return kinds(one) == kinds(other)


def values_in(tree: Any) -> Iterator[Value]:
    """Every `Value` in nested tuples and lists."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from values_in(item)


def map_values(tree: Any, function: Callable[[Value], Any]) -> Any:
    """`tree` with `function` applied to every `Value` in it."""
    if isinstance(tree, Value):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_values(item, function) for item in tree)
    return tree


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`, as PyTorch gives them.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


_ITEMSIZE = {"64": 8, "32": 4, "16": 2, "8": 1, "128": 16}


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of the dtype called `dtype`."""
    if dtype == "bool":
        return 1
    digits = "".join(c for c in dtype.split("_")[0].split("e")[0] if c.isdigit())
    return _ITEMSIZE.get(digits, 1)


__all__ = [
    "REINTERPRETS",
    "BlockShares",
    "Meta",
    "Node",
    "OpGraph",
    "Surroundings",
    "Value",
    "itemsize",
    "map_values",
    "places_of",
    "row_major",
    "same_operators",
    "values_in",
]
