"""A layer of experts that computes only those that count: its plan, its schedules and its text.

Slots, a row for each of its experts, are counted into the experts. A first kernel multiplies them and computes what is
between the products; a second one multiplies again and weighs; a last one adds up the slots of each row. Deals in what
`experts_layer` found and in kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.rules.regions import nest_of
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.family import NotConcerned, Unsupported, family_field
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, itemsize, map_values, row_major
from qimeng.graph.region import Region, make_region
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.dense_experts import Layer, Leaf, base_of, plain
from qimeng.vocabulary.irregular.experts import experts_layer
from qimeng.vocabulary.irregular.grouped_plan import LEAST
from qimeng.vocabulary.irregular.grouped_printing import Product, launch
from qimeng.vocabulary.irregular.order import Order, Places
from qimeng.vocabulary.irregular.plan import before, beside

BLOCK = 1024
"""Results that a program adds up."""


@dataclass(frozen=True)
class RoutedSchedule(GemmSchedule):
    """How both products of a layer of experts are cut into tiles; see `GemmSchedule` for the fields."""

    family: str = family_field("routed")


@dataclass(frozen=True, eq=False)
class RoutedPlan:
    """A layer of experts and how its operands reach it.

    Attributes:
        layer: the layer.
        middle: the nest of what is between the products; its sources are the first products.
        leaf_of: number of a source to that of its leaf.
        sizes: rows, experts, experts of a row, depth of the first products, their columns, columns of the second.
        metas: layout of the rows, of the first products' matrices, and of the second's.
        biases: layout of the biases of the first products, and of the second's; None without.
        out: of the result.
        shape: that the region returns it in.
        parameters: the entry function's parameters, in the order of the region's inputs.
        before: lines of the entry function before its kernels.
        names: variables of rows, experts, weights, second matrices and first ones, then of the biases that there are,
            those of the first products before.
    """

    layer: Layer
    middle: Nest
    leaf_of: dict[int, int]
    sizes: tuple[int, int, int, int, int, int]
    metas: tuple[Meta, tuple[Meta, ...], Meta]
    biases: tuple[tuple[Meta | None, ...], Meta | None]
    out: Meta
    shape: tuple[int, ...]
    parameters: tuple[str, ...]
    before: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def half(self) -> bool:
        """Whether operands are of a half type."""
        return itemsize(self.dtype) == 2

    @property
    def dtype(self) -> str:
        """Of what is multiplied."""
        return self.metas[0].dtype

    @property
    def slots(self) -> int:
        """A row for each of its experts."""
        return self.sizes[0] * self.sizes[2]


def plan_routed(region: Region) -> RoutedPlan:
    """The plan of `region`.

    Raises:
        NotConcerned: it is no whole layer of experts.
        Unsupported: it does more than that, or what is between the products has no loop nest.
    """
    graph = region.graph
    sums = [n for n in region.ops if n.packet == "aten.sum"]
    if len(sums) != 1:
        raise NotConcerned(f"{len(sums)} sums over experts")
    layer = experts_layer(graph, sums[0])
    if not layer.taken <= set(region.nodes):
        raise NotConcerned("experts are computed elsewhere")
    result, views = base_of(graph, region.outputs[0])
    if len(region.outputs) != 1 or result != Value(sums[0].name) or not graph.meta(region.outputs[0]).is_contiguous:
        raise Unsupported("besides the layer's result, the region returns other values")
    texts = {v: f"x{i}" for i, v in enumerate(region.inputs)}
    lines: list[str] = []
    leaves = layer.leaves
    added = [b for b in (*(leaf.bias for leaf in leaves), layer.bias) if b is not None]
    operands = [layer.rows, layer.chosen, layer.weights, layer.second, *(leaf.weight for leaf in leaves), *added]
    named = {v: beside(region, v, texts, lines) for v in dict.fromkeys(operands)}
    names = tuple(named[v] for v in operands)
    needed = {n for v in operands for n in before(region, v)} | layer.taken | views
    if other := set(region.nodes) - needed:
        raise Unsupported(f"{', '.join(sorted(other))}: the region does more than compute experts")
    rows, depth = graph.meta(layer.rows).shape
    experts, inner, columns = graph.meta(layer.second).shape
    best = graph.meta(layer.chosen).shape[1]
    firsts = tuple(graph.meta(leaf.weight) for leaf in leaves)
    biases = tuple(None if leaf.bias is None else graph.meta(leaf.bias) for leaf in leaves)
    nest, leaf_of = _middle(graph, layer, (rows * best, inner))
    return RoutedPlan(
        layer,
        nest,
        leaf_of,
        (rows, experts, best, depth, inner, columns),
        (graph.meta(layer.rows), firsts, graph.meta(layer.second)),
        (biases, None if layer.bias is None else graph.meta(layer.bias)),
        graph.meta(result),
        graph.meta(region.outputs[0]).shape,
        tuple(texts[v] for v in region.inputs),
        tuple(dict.fromkeys(lines)),
        names,
    )


def _middle(graph: OpGraph, layer: Layer, shape: tuple[int, int]) -> tuple[Nest, dict[int, int]]:
    """The nest of what is between the products, over slots and columns, and the leaf of each of its sources."""
    nodes: dict[str, Node] = {}

    def meta(value: Value) -> Meta:
        return Meta(shape, row_major(shape), graph.meta(value).dtype)

    def moved(value: Value) -> Value:
        if graph.nodes[value.node].kind == "constant":
            nodes[value.node] = graph.nodes[value.node]
            return value
        found = plain(graph, value)
        return Value(f"h{layer.ends[found]}") if found in layer.ends else found

    for value, number in layer.ends.items():
        nodes[f"h{number}"] = Node(f"h{number}", "input", str(number), metas=(meta(value),))
    goal = moved(layer.inner)
    if not layer.middle:  # results of the product itself
        same = Node("same", "op", "aten.clone.default", (goal,), metas=(meta(layer.inner),))
        nodes["same"], goal = same, Value("same")
    for name in layer.middle:
        node = graph.nodes[name]
        args, options = map_values(node.args, moved), tuple((k, map_values(v, moved)) for k, v in node.kwargs)
        nodes[name] = Node(name, "op", node.target, args, options, (meta(Value(name)),))
    made = OpGraph(nodes, (goal,), n_inputs=len(layer.leaves))
    nest, loads = nest_of(make_region(made, (n.name for n in made.ops())))
    if any(s.scalar for s in nest.sources) or nest.reduced or any(e.op == "index" for e in nest.exprs):
        raise Unsupported("other than plain pointwise operators between the products of experts")
    return nest, {source.number: int(value.node[1:]) for value, source in loads.values.items()}


def schedules(plan: RoutedPlan) -> tuple[RoutedSchedule, ...]:
    """At most six schedules, the best guess first, each once."""
    each = -(-plan.slots // plan.sizes[1])
    high = min(max(power_of_two(each), LEAST), 128)
    wide = max(64 // len(plan.layer.leaves), 32)
    deep = 64 if plan.half else 32
    shapes = [
        (high, wide, deep, 4, 3),
        (high, wide * 2, deep, 4, 3),
        (max(LEAST, high // 2), wide, deep, 4, 4),
        (high, wide, deep * 2, 4, 3),
        (min(128, high * 2), wide * 2, deep, 8, 3),
    ]
    precisions = ("ieee",) if plan.half else ("ieee", "tf32x3")
    made = [
        RoutedSchedule(block_m=m, block_n=n, block_k=k, warps=w, stages=s, precision=p)
        for m, n, k, w, s in shapes
        for p in precisions
    ]
    return tuple(dict.fromkeys(made))[:6]


def shared_bytes(plan: RoutedPlan, schedule: RoutedSchedule) -> int:
    """Bytes of shared memory of a block, at most: every stage holds a tile of all operands."""
    s = schedule
    return (s.block_m + len(plan.layer.leaves) * s.block_n) * s.block_k * itemsize(plan.dtype) * max(s.stages, 1)


def tiles(plan: RoutedPlan, schedule: RoutedSchedule) -> int:
    """Tiles of slots, at most."""
    return plan.slots // schedule.block_m + min(plan.slots, plan.sizes[1])


# -- the text

COMBINE = """@triton.jit
def {prefix}_combine(part_ptr, y_ptr, B: tl.constexpr):
    at = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = at < {count}
    row = at // {columns}
    n = at % {columns}
    total = tl.zeros([B], tl.float32)
    for j in range(0, {best}):
        total += tl.load(part_ptr + (row * {best} + j) * {columns} + n, mask=inside, other=0.0)
    tl.store(y_ptr + row * {row} + n * {column}, total.to(tl.{dtype}), mask=inside)
"""


def print_routed(plan: RoutedPlan, schedule: RoutedSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`."""
    rows, experts, best, _, inner, columns = plan.sizes
    s, out, slots = schedule, plan.out, plan.slots
    x, chosen, weights, second, *rest = plan.names
    count = len(plan.layer.leaves)
    firsts, added = rest[:count], rest[count:]
    own = len(added) - (plan.layer.bias is not None)
    order = Order(Places("by", slots, experts, clamps=True), "bucket", prefix)
    combine = COMBINE.format(
        prefix=prefix, count=rows * columns, columns=columns, best=best, row=out.stride[0], column=out.stride[1],
        dtype=out.dtype,
    )  # fmt: skip
    high = tiles(plan, s)
    first, last = _products(plan, prefix)
    up = launch(
        f"{prefix}_up",
        [x, *firsts[: len(first.leaves)], "order", "first", *added[:own], "h"],
        (high, -(-inner // s.block_n)),
        s,
    )
    down = ["h", second, "order", "first", "scale", *added[own:], "part"]
    lines = [
        *plan.before,
        f"by = {chosen}.reshape(-1)",
        f"scale = {weights}.reshape(-1)",
        *order.lines(),
        f"h = torch.empty({slots}, {inner}, dtype=torch.{plan.dtype}, device={x}.device)",
        f"part = torch.empty({slots}, {columns}, dtype=torch.float32, device={x}.device)",
        f"y = torch.empty_strided({out.shape}, {out.stride}, dtype=torch.{out.dtype}, device={x}.device)",
        up,
        launch(f"{prefix}_down", down, (high, -(-columns // s.block_n)), s),
        f"{prefix}_combine[({-(-rows * columns // BLOCK)},)](part, y, B={BLOCK})",
        "return (y,)" if plan.shape == out.shape else f"return (y.view({plan.shape}),)",
    ]
    entry = [f"def {prefix}_run({', '.join(plan.parameters)}):", *(f"    {line}" for line in lines)]
    parts = [*order.kernels(), first.text(s), last.text(s), combine, "\n".join(entry) + "\n"]
    return Implementation("triton", "\n\n".join(parts), f"{prefix}_run", schedule=schedule)


def _products(plan: RoutedPlan, prefix: str) -> tuple[Product, Product]:
    """The first product with what follows it, and the second with the weights."""
    rows, experts, best, depth, inner, columns = plan.sizes
    source, firsts, second = plan.metas
    em = Emitter(plan.middle, [])
    for e in plan.middle.exprs:
        if e.op == "load":
            em.define(e, f"acc{plan.leaf_of[e.param]}")
    value = em.value(plan.middle.outputs[0][0])
    paired = _is_paired(plan.layer.leaves)
    leaves = tuple(_strides(m, x.start, x.step) for m, x in zip(firsts, plan.layer.leaves, strict=True))
    if paired:
        leaves = (_strides(firsts[0], 0, 1),)
    biases, last = plan.biases
    sums = [
        _bias(f"acc{j}", f"c{j}_ptr", meta, leaf.start, leaf.step, inner)
        for j, (meta, leaf) in enumerate(zip(biases, plan.layer.leaves, strict=True))
        if meta is not None
    ]
    given = tuple(f"c{j}_ptr" for j, meta in enumerate(biases) if meta is not None)
    wide = max(plan.slots * max(inner, columns), math.prod(source.shape)) >= 1 << 31
    up = Product(
        f"{prefix}_up", experts, plan.slots, best, depth, inner, (source.stride[0], source.stride[1]), leaves,
        f"s * {inner} + n", plan.dtype, plan.half, value, (*sums, *em.lines), given, wide, paired,
    )  # fmt: skip
    more = [_bias("acc0", "c0_ptr", last, 0, 1, columns)] if last else []
    down = Product(
        f"{prefix}_down", experts, plan.slots, 1, inner, columns, (inner, 1), (_strides(second, 0, 1),),
        f"s * {columns} + n", "float32", plan.half, "acc0 * scale",
        ("scale = tl.load(scale_ptr + s, mask=inside, other=0.0).to(tl.float32)", *more),
        ("scale_ptr", *(["c0_ptr"] if last else [])), wide,
    )  # fmt: skip
    return up, down


def _is_paired(leaves: Sequence[Leaf]) -> bool:
    """Whether two products read the even and the odd columns of the same matrices, in this order."""
    return len({leaf.weight for leaf in leaves}) == 1 and [(x.start, x.step) for x in leaves] == [(0, 2), (1, 2)]


def _strides(meta: Meta, start: int, step: int) -> tuple[int, int, int, int]:
    """Strides of matrices along experts, depth and the columns that are read, and the first element of these."""
    group, deep, across = meta.stride
    return group, deep, across * step, across * start


def _bias(target: str, pointer: str, meta: Meta, start: int, step: int, columns: int) -> str:
    """The line that adds an expert's bias to the sums `target`."""
    group, across = meta.stride
    at = f"{pointer} + group.to(tl.int64) * {group} + n * {across * step} + {across * start}"
    return f"{target} += tl.load({at}, mask=n < {columns}, other=0.0).to(tl.float32)"


__all__ = [
    "RoutedPlan", "RoutedSchedule", "plan_routed", "print_routed", "schedules", "shared_bytes",
    "tiles",
]  # fmt: skip
