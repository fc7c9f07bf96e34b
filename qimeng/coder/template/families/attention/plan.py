"""How a nest with two matrix products is an attention: which axes are queries, keys, depth and columns.

Product 1 gives a score for each query and key; weights are made of the scores (`weights`); product 2 sums the values
over the keys by these weights. Without a product 1 the scores are what is loaded. Nothing here depends on which
operators the nest was written with. Deals in axes and expressions. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qimeng.coder.template.families.attention.bounds import Bounds, bounds_of
from qimeng.coder.template.families.attention.weights import Weights, weights_of
from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.nest.loads import Loads
from qimeng.coder.template.rules.regions import region_nest
from qimeng.coder.template.triton.special import SPECIAL
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.region import Region
from qimeng.graph.state import is_state

HALVES = ("float16", "bfloat16")

FEW_QUERIES = 64
"""Below so many queries a head, those of the heads that share keys are taken together."""

TALL, MOST_REPEATS = 128, 4
"""Queries of a tall tile, and how often an operand that is computed on the way may be computed again, once for each
tile of queries: every time it passes through registers instead of being copied to where tensor cores read it."""

MOST_DEPTH = 256
"""The largest depth of product 1 and the most columns of product 2: a program holds both whole."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A region as two products with weights between them.

    Attributes:
        region: the region.
        nest: its loop nest.
        loads: how its inputs reach the kernels.
        scores: product 1; None where the scores are loaded.
        query: its operand that changes along the queries.
        key: its operand that changes along the keys.
        output: product 2.
        values: its operand beside the weights.
        weights: the other one.
        bounds: which keys a query can see by its position.
        batch: axes that a program stays at, outermost first.
        rows: axes of the queries.
        keys: axes of the keys.
        depth: axes that product 1 sums over; empty without one.
        columns: axes of the values' elements.
    """

    region: Region
    nest: Nest
    loads: Loads
    scores: Expr | None
    query: Expr | None
    key: Expr | None
    output: Expr
    values: Expr
    weights: Weights
    bounds: Bounds
    batch: Dim
    rows: Dim
    keys: Dim
    depth: Dim
    columns: Dim

    def extent(self, atoms: Dim) -> int:
        """Number of positions along `atoms`."""
        return prod(self.nest.axes.sizes(atoms))

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Batch, queries, keys, depth, columns."""
        batch, rows, keys, depth, columns = (
            self.extent(a) for a in (self.batch, self.rows, self.keys, self.depth, self.columns)
        )
        return batch, rows, keys, depth, columns

    @property
    def dtype(self) -> str:
        """The dtype of the operands."""
        return self.values.dtype

    @property
    def half(self) -> bool:
        """True where the operands are fp16 or bf16, which tensor cores take as they are."""
        return self.dtype in HALVES

    @property
    def seen(self) -> float:
        """Share of the keys that a query sees by its position, on average; what a loaded mask hides is not known."""
        if not self.bounds.query:
            return 1.0
        queries, keys = self.extent(self.bounds.query), self.extent(self.keys)
        high = keys - 1 if self.bounds.high is None else self.bounds.high
        low = -queries if self.bounds.low is None else self.bounds.low
        total = sum(max(0, min(keys - 1, q + high) - max(0, q + low) + 1) for q in range(queries))
        return total / (queries * keys)


def plan_attention(region: Region) -> AttentionPlan:
    """The plan for `region`.

    Raises:
        Unsupported: no template covers it, or it is no product of weights that a walk over the keys can make.
    """
    region, nest, loads = region_nest(region)
    if not nest.dots or len(nest.dots) > 2:
        raise NotConcerned(f"{len(nest.dots)} matrix products")
    if len(nest.dots) == 1 and not nest.reductions():
        raise NotConcerned("a matrix product without a softmax")
    if nest.ordered:
        raise Unsupported("a scan beside matrix products")
    output = nest.dots[-1]
    heavy = [_has_scores(nest, a, output) for a in output.args]
    if heavy.count(True) != 1:
        error = Unsupported if len(nest.dots) == 2 else NotConcerned
        raise error("matrix products of which none takes weights made from the other")
    weights_side, values = output.args if heavy[0] else output.args[::-1]
    if len(nest.dots) == 1 and _is_state(region, loads, values):
        raise NotConcerned("a linear map of normalized values")
    keys = tuple(output.reduced)
    weights = weights_of(nest, weights_side, frozenset(keys))
    scores = next((e for e in nest.dots if e is not output), None)
    _check_values(values)
    columns = tuple(a for a in _order(output) if a in values.depends and a not in weights_side.depends)
    batch, rows = _programs(nest, output, weights_side, values, keys)
    query, key, depth = _operands(scores, frozenset(keys))
    _check_products(nest, output, scores, values, query, key, (batch, rows, keys, depth, columns))
    every = frozenset((*batch, *rows, *keys))
    bounds = bounds_of(nest, weights.tile()[0], keys, rows, every, weights.scores is not None)
    if weights.sums:
        bounds = Bounds()
    plan = AttentionPlan(
        region, nest, loads, scores, query, key, output, values, weights, bounds, batch, rows, keys, depth, columns
    )
    _check_reads(plan)
    _check_repeats(plan)
    return plan


def _has_scores(nest: Nest, operand: Expr, output: Expr) -> bool:
    """Whether the other product, or a reduction over the keys, is below `operand`."""
    over = set(output.reduced)
    below = reach([operand], lambda e: False)
    return any(e.op == "dot" or (e.op == "reduce" and set(e.reduced) == over) for e in below)


def _is_state(region: Region, loads: Loads, values: Expr) -> bool:
    """Whether they are made of parameters and buffers alone: weights of a linear map, and no values of an attention."""
    numbers = {e.param for e in reach([values], lambda e: False) if e.op == "load"}
    return all(is_state(region.graph, v) for v, s in loads.values.items() if s.number in numbers)


def _order(output: Expr) -> list[int]:
    return [a for d in output.dims for a in d]


def _programs(nest: Nest, output: Expr, weights: Expr, values: Expr, keys: Dim) -> tuple[Dim, Dim]:
    """The axes that a program stays at, and those of the queries in its tile.

    Queries of several heads that share their keys are one tile where each head has few.
    """
    order = _order(output)
    lost = [a for a in order if a not in weights.depends and a not in values.depends]
    if lost or not set(keys) <= weights.depends & values.depends:
        raise Unsupported("a matrix product of a broadcast")
    free = [a for a in order if a in weights.depends and a not in values.depends]
    inner = [a for a in free if any(a in d for d in output.dims[-2:])]
    if prod(nest.axes.sizes(inner)) < FEW_QUERIES:
        inner = free
    rows = tuple(a for a in free if a in inner)
    batch = tuple(a for a in order if a in weights.depends and a not in rows)
    return batch, rows


def _operands(scores: Expr | None, keys: frozenset[int]) -> tuple[Expr | None, Expr | None, Dim]:
    """The queries, the keys, and the depth of product 1."""
    if scores is None:
        return None, None, ()
    first, second = scores.args
    if bool(first.depends & keys) == bool(second.depends & keys):
        raise Unsupported("a product of scores of which not just one operand changes along the keys")
    query, key = (second, first) if first.depends & keys else (first, second)
    return query, key, tuple(scores.reduced)


def _check_values(values: Expr) -> None:
    if values.level or any(e.op in ("reduce", "part") for e in reach([values], lambda e: False)):
        raise Unsupported("values made by a reduction")


def _check_products(
    nest: Nest,
    output: Expr,
    scores: Expr | None,
    values: Expr,
    query: Expr | None,
    key: Expr | None,
    roles: tuple[Dim, ...],
) -> None:
    batch, rows, keys, depth, columns = (set(r) for r in roles)
    if not columns or not keys:
        raise Unsupported("an attention with one key or one column")
    allowed = [(values, batch | keys | columns), (query, batch | rows | depth), (key, batch | keys | depth)]
    for operand, axes in allowed:
        if operand is None:
            continue
        if operand.level or not operand.depends <= axes:
            raise Unsupported("an operand of an attention changes along other axes")
        if operand.dtype != values.dtype or operand.dtype not in ("float32", *HALVES):
            raise Unsupported(f"an attention of {operand.dtype} and {values.dtype}")
        if operand is not values and not depth <= operand.depends:
            raise Unsupported("a matrix product of a broadcast")
    sizes = [prod(nest.axes.sizes(tuple(r))) for r in (depth, columns)]
    if max(sizes) > MOST_DEPTH:
        raise Unsupported(f"an attention of depth {sizes[0]} and {sizes[1]} columns; at most {MOST_DEPTH} are held")


def _check_repeats(plan: AttentionPlan) -> None:
    """Keys and values are read by every tile of queries; what is computed of them before is computed as often."""
    for name, operand in (("keys", plan.key), ("values", plan.values)):
        if operand is None:
            continue
        made = [e for e in reach([operand], lambda e: False) if e.op not in ("identity", "load", "const")]
        tiles = -(-plan.extent(plan.rows) // TALL)
        repeats = tiles * plan.extent(tuple(a for a in plan.batch if a not in operand.depends))
        most = 1 if any(e.op in SPECIAL for e in made) else MOST_REPEATS
        if made and repeats > most:
            raise Unsupported(f"{name} that would be computed {repeats} times over, once for each tile of queries")
    scored = {id(plan.scores)}
    for e in reach(plan.weights.tile(), lambda e: e is plan.scores):
        if any(id(a) in scored for a in e.operands()):
            scored.add(id(e))
        elif e.op in SPECIAL and id(e) not in scored:
            repeats = plan.extent(tuple({*plan.batch, *plan.rows, *plan.keys} - e.depends))
            if repeats > MOST_REPEATS:
                raise Unsupported(f"{e.op} in a mask that would be computed {repeats} times over, once for each head")


def _check_reads(plan: AttentionPlan) -> None:
    """What is computed a query and key, and after the products, has no other axes, and no reduction is left out."""
    nest, held = plan.nest, {id(e) for e in (plan.output, plan.scores, plan.weights.pair, *plan.weights.sums) if e}
    tile, after = (
        set(plan.batch) | set(plan.rows) | set(plan.keys),
        set(plan.batch) | set(plan.rows) | set(plan.columns),
    )
    for e in reach(plan.weights.tile(), lambda e: e is plan.scores):
        if not e.depends <= tile or e.op in ("reduce", "part"):
            raise Unsupported("weights that change along other axes than queries and keys")
    roots = [o[0] for o in nest.outputs] + [x for _, x in plan.weights.steps if isinstance(x, Expr)]
    for e in reach(roots, lambda e: id(e) in held):
        if id(e) not in held and (not e.depends <= after or e.op in ("reduce", "dot")):
            raise Unsupported("what is made of the attention needs its weights again")
    for e, *_ in nest.outputs:
        if not {a for d in e.dims for a in d} <= after:
            raise Unsupported("an output has axes that the attention does not have")


__all__ = ["FEW_QUERIES", "HALVES", "MOST_DEPTH", "TALL", "AttentionPlan", "plan_attention"]
