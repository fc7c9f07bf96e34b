"""How the recurrent family reads a loop: products of states with weights, and pointwise operators around them.

All values of a step are matrices of sequences (rows) and units (columns), or several such matrices, the groups, each
with weights of its own. Deals in axes and in what each input of the loop is for. Knows nothing about schedules or
kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.coder.template.families.common import special_functions
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import constant
from qimeng.coder.template.nest.ir import Nest, Source
from qimeng.coder.template.nest.loads import Loads, find_loads
from qimeng.coder.template.nest.rows import Group, RowPlan, groups_of
from qimeng.coder.template.rules.builder import build_nest
from qimeng.coder.template.rules.table import RULES
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.loops.loop import At, Line, Loop, Name, is_loop, loop_of, step_graph
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, row_major
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region, call_text


@dataclass(frozen=True, order=True)
class Term:
    """A state that a product reads.

    Attributes:
        state: its number.
        behind: the group whose state it is, counted back from the one that reads it; zeros where there is none.
    """

    state: int
    behind: int = 0


@dataclass(frozen=True)
class Product:
    """``cat(terms) @ weight + bias`` in every step; inputs of the loop by number.

    Attributes:
        source: number of the nest's source that stands for its result.
        terms: states side by side.
        weight: of shape [units, depth], or [groups, depth, units].
        bias: of shape [units]; None where there is none.
    """

    source: int
    terms: tuple[Term, ...]
    weight: int
    bias: int | None = None


@dataclass(frozen=True)
class Part:
    """A source of the nest that an input of the loop holds.

    Attributes:
        source: number of the source.
        input: number of the input.
        stride: elements from step to step.
        place: which part of the input a step reads; None where every step reads all of it.
    """

    source: int
    input: int
    stride: int = 0
    place: At | None = None


@dataclass(frozen=True, eq=False)
class RecurrentPlan(RowPlan):
    """A loop whose steps are products of its states and pointwise operators.

    Attributes:
        node: the loop in the region's graph.
        loop: what it computes.
        metas: of the loop's inputs.
        products: of states and weights.
        parts: what a step reads of the inputs.
        states: for each state the number of the nest's source that stands for it.
        results: for each next state, then for each stacked value, the number of the nest's output.
        groups: the axes and the number of the matrices of a state; None where it is one.
        after: lines that make views of the loop's results, and the text of each output of the region.
    """

    node: Node
    loop: Loop
    metas: tuple[Meta, ...]
    products: tuple[Product, ...]
    parts: tuple[Part, ...]
    states: tuple[int, ...]
    results: tuple[int, ...]
    groups: Group | None
    after: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def exchanged(self) -> tuple[int, ...]:
        """Numbers of the states that products read, whole rows of them."""
        return tuple(sorted({t.state for t in self.terms}))

    @property
    def returned(self) -> dict[int, int]:
        """State that products read to the stacked value that is the same, steps in order."""
        stacked = {name: k for k, (name, back) in enumerate(self.loop.stacked) if not back}
        return {i: stacked[self.loop.following[i]] for i in self.exchanged if self.loop.following[i] in stacked}

    @property
    def terms(self) -> tuple[Term, ...]:
        """What products read, each once."""
        return tuple(dict.fromkeys(t for p in self.products for t in p.terms))

    @property
    def tiles(self) -> int:
        """Number of weights of [units, units] that a group has."""
        return sum(len(p.terms) for p in self.products)

    @property
    def group_count(self) -> int:
        """Number of matrices of a state."""
        return self.groups[1] if self.groups else 1

    @property
    def stored(self) -> str:
        """The dtype of states in memory."""
        return self.metas[int(self.loop.starts[0][1:])].dtype

    @property
    def state_size(self) -> int:
        """Elements of a state."""
        return self.group_count * self.row_count * self.column_count

    @property
    def coupled(self) -> bool:
        """Whether groups read each other's states."""
        return any(t.behind for t in self.terms)

    @property
    def special(self) -> tuple[str, ...]:
        """Special functions that every element takes in fp32."""
        return special_functions(self)


def plan_recurrent(region: Region) -> RecurrentPlan:
    """The plan for `region`.

    Raises:
        Unsupported: it is no single loop, or a step has something else than products of states with weights and
            pointwise operators on matrices of one shape.
    """
    loops = [n for n in region.ops if is_loop(n)]
    if not loops:
        raise NotConcerned("no loop over steps")
    others = [n for n in region.ops if not is_loop(n) and n.packet not in VIEWS]
    if len(loops) > 1 or others:
        raise Unsupported(f"a loop over steps beside {others[0].packet if others else 'another one'}")
    node, graph = loops[0], region.graph
    loop, metas = loop_of(node), tuple(graph.meta(v) for v in node.args)
    loads, after = find_loads(region), _after(region, node)
    if any(v not in loads.values for v in node.args):
        raise Unsupported("an input of the loop that is no view of an input of the region")
    shape = metas[int(loop.starts[0][1:])].shape if loop.starts else ()
    if not shape:
        raise Unsupported("states of no dimension")
    step = step_graph(loop, metas)
    reading = _Reading(loop, metas, step, shape)
    nest = build_nest(RULES, Region(step, reading.pointwise, _outputs(step)), reading.sources)
    groups, rows, columns = _groups(nest, shape, bool(reading.products))
    number = {v.node: i for i, v in enumerate(_outputs(step))}
    kept = [*loop.following, *(name for name, _ in loop.stacked)]
    dtype = metas[int(loop.starts[0][1:])].dtype
    return RecurrentPlan(
        region, nest, loads, rows, columns, 0, len(nest.outputs), len(nest.sources), "r", _size(dtype), node, loop,
        metas, tuple(reading.products), tuple(reading.parts), reading.states, tuple(number[n] for n in kept), groups,
        after,
    )  # fmt: skip


class _Reading:
    """What the lines of a step are: parts of inputs, products, and the pointwise rest."""

    def __init__(self, loop: Loop, metas: tuple[Meta, ...], step: OpGraph, shape: tuple[int, ...]):
        self._metas, self._step, self._shape = metas, step, shape
        self.sources: dict[Value, Source] = {}
        self.products: list[Product] = []
        self.parts: list[Part] = []
        starts = [metas[int(s[1:])] for s in loop.starts]
        if any(m.shape != shape or m.dtype != starts[0].dtype or not is_float(m.dtype) for m in starts):
            raise Unsupported("states of different shapes or dtypes")
        states = [Meta(shape, row_major(shape), m.dtype) for m in starts]
        self.states = tuple(self._source(f"s{i}", m) for i, m in enumerate(states))
        self._terms: dict[str, tuple[Term, ...]] = {f"s{i}": (Term(i),) for i in range(len(states))}
        self._cut: dict[str, int] = {}
        rest = [line for line in loop.body if not self._taken(line)]
        if any(n in self._cut or n in self._terms and n[0] != "s" for line in rest for n in line.names()):
            raise Unsupported("states put together for something else than a product")
        for name in dict.fromkeys(n for line in rest for n in line.names() if n[0] == "x"):
            self.parts.append(Part(self._source(name, metas[int(name[1:])]), int(name[1:])))
        self.pointwise = tuple(line.name for line in rest)

    def _source(self, name: str, meta: Meta) -> int:
        self.sources[Value(name)] = Source(len(self.sources), meta.stride, meta.shape, meta.dtype)
        return len(self.sources) - 1

    def _taken(self, line: Line) -> bool:
        """Whether the line is a part of an input or a product; its result is then a source of the nest."""
        given = line.args[0] if line.args else None
        if line.target == "aten.select.int" and isinstance(given, Name) and isinstance(line.args[2], At):
            if given.text[0] != "x":
                raise Unsupported("a step that reads a part of a state")
            number, dim = int(given.text[1:]), line.args[1]
            source = self._source(line.name, self._step.meta(Value(line.name)))
            self.parts.append(Part(source, number, self._metas[number].stride[dim], line.args[2]))
            return True
        if any(isinstance(a, At) for a in line.args):
            raise Unsupported(f"{line.target} at a place that changes from step to step")
        if line.target == "aten.linear.default":
            names = [a.text for a in line.args if isinstance(a, Name)]
            if len(self._shape) != 2:
                raise Unsupported(f"products of states of shape {self._shape}, not sequences and units")
            return self._product(line, names)
        if line.target == "aten.bmm.default" and len(self._shape) == 3:
            names = [a.text for a in line.args if isinstance(a, Name)]
            return self._product(line, names)
        return self._is_put_together(line)

    def _product(self, line: Line, names: list[str]) -> bool:
        terms = self._terms.get(names[0], ())
        if not terms or any(n[0] != "x" for n in names[1:]):
            raise Unsupported("a product of something else than a state and a weight")
        if self._shape[-1] < 2:
            raise Unsupported(f"products of states of shape {self._shape}, not sequences and units")
        if self._step.meta(Value(line.name)).shape != self._shape:
            raise Unsupported(f"a product of shape {self._step.meta(Value(line.name)).shape}, states of {self._shape}")
        bias = int(names[2][1:]) if len(names) > 2 else None
        source = self._source(line.name, self._step.meta(Value(line.name)))
        self.products.append(Product(source, terms, int(names[1][1:]), bias))
        return True

    def _is_put_together(self, line: Line) -> bool:
        """Whether the line puts states side by side, or moves each to the next group, for products to read."""
        name, rest = next(iter(line.names()), ""), list(line.args[1:])
        last = len(self._shape) - 1
        if line.target == "aten.slice.Tensor" and last == 2 and rest == [0, 0, self._shape[0] - 1]:
            terms = self._terms.get(name, ())
            if len(terms) == 1 and not terms[0].behind:
                self._cut[line.name] = terms[0].state
        elif line.target == "aten.constant_pad_nd.default" and name in self._cut:
            if rest == [(0, 0, 0, 0, 1, 0), 0.0]:
                self._terms[line.name] = (Term(self._cut[name], 1),)
        elif line.target == "aten.cat.default" and rest == [last]:
            parts = [self._terms.get(n, ()) for n in line.names()]
            if all(parts):
                self._terms[line.name] = tuple(t for part in parts for t in part)
        return line.name in self._terms or line.name in self._cut


def _outputs(step: OpGraph) -> tuple[Value, ...]:
    return tuple(v for v in step.outputs if isinstance(v, Value))


def _groups(
    nest: Nest, shape: tuple[int, ...], products: bool
) -> tuple[Group | None, tuple[Group, ...], tuple[Group, ...]]:
    """Groups, rows and columns of every value of a step; the nest is finished with that.

    With products these are sequences and units, each one axis; otherwise all elements are columns but those that a part
    of the input repeats.
    """
    if any(e.op in ("reduce", "scan", "dot") or (e.op == "load" and e.access) for e in nest.exprs):
        raise Unsupported("a step with something else than products of states and pointwise operators")
    if any(s != shape for _, s, *_ in nest.outputs) or any(constant(e) is not None for e, *_ in nest.outputs):
        raise Unsupported(f"values of a step in other shapes than {shape}")
    for e, *_ in nest.outputs[1:]:
        for first, other in zip(nest.outputs[0][0].dims, e.dims, strict=True):
            nest.axes.unify(first, other)
    nest.finish()
    dims = {e.dims for e, *_ in nest.outputs}
    order = tuple(a for d in next(iter(dims)) for a in d)
    if len(dims) > 1 or not order or not nest.kept <= set(order):
        raise Unsupported("values of a step that do not share their axes")
    if not products:
        groups = groups_of(nest, order)
        return None, tuple(groups[:-1]), tuple(groups[-1:])
    *outer, rows, columns = next(iter(dims))
    if len(rows) > 1 or len(columns) != 1 or any(len(axes) != 1 for axes in outer):
        raise Unsupported("groups, sequences or units that are not one axis each")
    group = (outer[0], shape[0]) if outer else None
    return group, tuple([(rows, shape[-2])] if rows else []), ((columns, shape[-1]),)


def _after(region: Region, node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines that make views of the loop's results, and the text of each output of the region."""
    text = {Value(node.name, port): f"found[{port}]" for port in range(len(node.metas))}
    lines: list[str] = []
    for view in region.ops:
        if view is not node and any(v in text for v in view.operands()):
            text[Value(view.name)] = f"u{len(lines)}"
            lines.append(f"u{len(lines)} = {call_text(region.graph, view, text)}")
    if any(v not in text for v in region.outputs):
        raise Unsupported("a result that the loop does not compute")
    return tuple(lines), tuple(text[v] for v in region.outputs)


def _size(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def accumulated(plan: RecurrentPlan) -> str:
    """The dtype in which products are summed."""
    return compute_dtype(plan.stored)


__all__ = ["Loads", "Part", "Product", "RecurrentPlan", "Term", "accumulated", "plan_recurrent"]
