"""The kernel of an attention: a program holds a tile of queries and walks the keys with an online softmax.

After each step the running maximum `m`, sum `l` and product `acc` are as if the keys so far were all (Milakov &
Gimelshein 2018; Dao et al. 2022). Blocks of keys that no query of the tile sees are left out, and masks by position are
only evaluated in blocks that lie across their edge.

Compilers make one multiply-add of a product and a difference. That product is not rounded, while the maximum was taken
of rounded ones: the largest exponent is not 0 but up to half a unit in the last place of the score, which is 2^15 at
scores of 10^12. So exponents are products of differences, or multiply-adds of rounded scores. Where `fast` computes
powers of two in one multiply-add, rows of so large scores take a factor whose products are exact.

PyTorch multiplies the values at masked keys by 0, which makes NaN of an infinity. So blocks are left out only where the
values of that batch element are finite: a small kernel before this one looks (`guard`), and another which blocks a
loaded mask hides.

Deals in kernel text. Knows nothing about launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qimeng.coder.template.families.attention.bounds import choices_of
from qimeng.coder.template.families.attention.guard import flags_of, seen_batch
from qimeng.coder.template.families.attention.split import merge_parts, share, store_part
from qimeng.coder.template.families.attention.tiles import Tiles, zeros
from qimeng.coder.template.families.attention.weights import number
from qimeng.coder.template.nest.contracted import is_product
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.exponentials import one_beside

LOG2E = 1.4426950408889634
"""exp(x) is 2 to the power of this times x."""

CLOSE = 2.0**24
"""Exponents of 2 up to which a multiply-add is off by 1/2 at most. Beyond, the last place of a score changes its weight
by a factor of 2^(1/2) or more."""

LARGEST = 3e38
"""Of the numbers that Triton takes for fp32."""


class Kernel:
    """The kernel, and the one that puts its parts together; which keys are walked is for subclasses to change.

    Attributes:
        given: variables of the entry function with what is prepared once, each read by its pointer.
    """

    given: tuple[str, ...] = ()

    def __init__(self, tiles: Tiles):
        self.t, self.plan, self.weights = tiles, tiles.plan, tiles.plan.weights
        self.base = tiles.emitter(tiles.at_rows, masks=tiles.row_mask, letter="f")
        self.bounds = self.plan.bounds
        self.query_index = Expr("index", (), (), "int32", reduced=self.bounds.query)
        self.seen_index = Expr("index", (), (), "int32", reduced=seen_batch(self.plan))
        self.scaled, self.factor = _scaled(self.weights.scores) if not self.weights.sums else (None, 1.0)
        self.power = tiles.schedule.fast and _is_moderate(self._tile_exprs())

    def lines(self) -> list[str]:
        """The whole kernel."""
        t, splits, blocks = self.t, self.t.schedule.splits, self.t.row_blocks
        number = f"t % {blocks}" if self.bounds.high is None else f"{blocks - 1} - t % {blocks}"  # longest first
        lines = ["t = tl.program_id(0)"]
        if splits > 1:
            lines = [f"part = tl.program_id(0) % {splits}", f"t = tl.program_id(0) // {splits}"]
        lines += self._tile(number)
        lines += [*(t.query() if self.plan.query is not None else []), *self._hoisted(), *self._running()]
        lines += self.keys()
        if self.scaled is not None:
            lines.append(f"m *= {self.factor!r}")
        return [*lines, *(store_part(t) if splits > 1 else self._after())]

    def merge(self) -> list[str]:
        """The kernel after it, where several programs share the keys."""
        lines = ["t = tl.program_id(0)", *self._tile(f"t % {self.t.row_blocks}"), *self._running()]
        return [*lines, *merge_parts(self.t), *self._after()]

    def _tile(self, number: str) -> list[str]:
        """Lines that place the tile of queries with this number."""
        t = self.t
        lines = [f"block = {number}", "row0 = block * BM", f"z = t // {t.row_blocks}"]
        lines += ["rm = row0 + tl.arange(0, BM)[:, None]", "cn = tl.arange(0, BV)[None, :]"]
        lines += [f"m_ok = rm < {t.rows}"] if t.row_mask else []
        lines += [f"c_ok = cn < {t.columns}"] if t.columns != t.block_v else []
        return [*lines, *t.head]

    def _running(self) -> list[str]:
        """Lines that begin the running values."""
        lines = ["acc = tl.zeros([BM, BV], tl.float32)"]
        if self.weights.pair is not None:
            lines += ['m = tl.full([BM, 1], float("-inf"), tl.float32)', "l = tl.zeros([BM, 1], tl.float32)"]
        return lines + [f"sum{i} = tl.zeros([BM, 1], tl.float32)" for i, _ in enumerate(self.weights.sums)]

    # -- what does not change along the keys
    def _tile_exprs(self) -> list[Expr]:
        return reach(self.weights.tile(), lambda e: e is self.plan.scores)

    def _hoisted(self) -> list[str]:
        """Lines for what is computed a query, before the loop."""
        keys = set(self.plan.keys)
        for e in self._tile_exprs():
            if not e.depends & keys and e.op != "const":
                self.base.value(e)
        lines, self.base.lines = self.base.lines, []
        return [*zeros(lines, "BM", "BN"), *lines]

    # -- which keys
    def keys(self) -> list[str]:
        """Lines that walk the keys of the tile: those from the first to the last that any query sees."""
        lines, low, high = [], "0", str(self.t.keys)
        if self.bounds:
            lines += self._range()
            low, high = "low", "high"
        if self.t.schedule.splits > 1:
            lines += share(self.t, bool(self.bounds))
            low, high = "low", "high"
        return [*lines, *self._walk_keys(low, high)]

    def _range(self) -> list[str]:
        """Lines that leave in `low` and `high` which keys any query sees, and in `inside` where all see all."""
        b, n = self.bounds, self.t.keys
        lines = self._positions() if b.query else []
        lines += ["low = 0", f"high = {n}"]
        if b.high is not None:
            lines.append(f"high = tl.minimum(tl.maximum(last + {b.high + 1}, 0), {n})")
        if b.low is not None:
            lines.append(f"low = tl.maximum(first + {b.low}, 0) // BN * BN")
        if self.by_position:
            lines += [
                f"inside = tl.minimum(tl.maximum(first + {b.high + 1 if b.high is not None else 0}, 0), {n}) // BN * BN"
            ]
        lines += self._seen() if b.conditions else []
        return [*lines, *self.wild(), "low = tl.where(wild, 0, low)", f"high = tl.where(wild, {n}, high)"]

    def wild(self) -> list[str]:
        """Lines that leave in `wild` whether a value of the batch element is an infinity or no number."""
        flags = flags_of(self.plan)
        at, chunk = f"flags_ptr + z * {flags.chunks}", f"tl.arange(0, {flags.width})"
        return [f"wild = tl.max(tl.load({at} + {chunk}, mask={chunk} < {flags.chunks}, other=0), axis=0) > 0"]

    def _seen(self) -> list[str]:
        """Lines that leave out the steps before the first and after the last in which a key is seen."""
        steps, place = self.t.steps, self.base.value(self.seen_index)
        lines, self.base.lines = self.base.lines, []
        step = f"tl.arange(0, {power_of_two(steps)})"
        return [
            *lines,
            f"step = {step}",
            f"at = (({place}) * {self.t.row_blocks} + block) * {steps} + step",
            f"seen = tl.load(seen_ptr + at, mask=step < {steps}, other=0) > 0",
            f"low = tl.maximum(low, tl.min(tl.where(seen, step, {steps}), axis=0) * BN)",
            "high = tl.minimum(high, tl.max(tl.where(seen, step + 1, 0), axis=0) * BN)",
        ]

    def _positions(self) -> list[str]:
        """Lines that leave the tile's first and last position of a query in `first` and `last`."""
        if tuple(self.bounds.query) == tuple(self.plan.rows):
            return ["first = row0", f"last = tl.minimum(row0 + BM, {self.t.rows}) - 1"]
        name = self.base.value(self.query_index)
        lines, self.base.lines = self.base.lines, []
        folded = [
            f"{target} = tl.{f}(tl.{f}({name}, axis=1), axis=0)" for target, f in (("first", "min"), ("last", "max"))
        ]
        return [*lines, *folded]

    @property
    def by_position(self) -> bool:
        """Whether blocks up to some key need no mask: the only bound is the upper one, and a mask says no more."""
        return self.bounds.high is not None and self.bounds.low is None and bool(self.bounds.masks)

    # -- the loop
    def _walk_keys(self, low: str, high: str) -> list[str]:
        """The loop over the keys: without masks as far as none is needed, then with them."""
        whole = str(self.t.keys // self.t.schedule.block_n * self.t.schedule.block_n)
        splits = self.t.schedule.splits > 1
        if self.t.specialized:  # the compiler shares one loop among its warps
            steps = f"tl.range({low}, {high}, BN, warp_specialize=True)"
            return self.loop([f"for start in {steps}:"], bool(self.bounds) or self.t.overhangs, "v")
        if self.by_position and not splits:
            return [*self._loop("0", "inside", False, "u"), *self._loop("inside", high, True, "v")]
        if self.by_position or (splits and self.t.overhangs and not self.bounds):
            until = "inside" if self.by_position else whole
            cut = f"until = tl.maximum(low, tl.minimum({until}, high))"
            return [cut, *self._loop(low, "until", False, "u"), *self._loop("until", high, True, "v")]
        if self.bounds or (self.t.overhangs and whole == "0"):
            return self._loop(low, high, True, "v")
        if not self.t.overhangs:
            return self._loop(low, high, False, "u")
        return [*self._loop(low, whole, False, "u"), *self._loop(whole, high, True, "v")]

    def _loop(self, low: str, high: str, masked: bool, letter: str) -> list[str]:
        return self.loop([f"for start in range({low}, {high}, BN):"], masked, letter)

    def loop(self, head: Sequence[str], masked: bool, letter: str) -> list[str]:
        """The loop that `head` begins, which sets in `start` the first key of a step."""
        body = ["rn = start + tl.arange(0, BN)[None, :]", *self._keys_and_scores(masked)]
        body += self._weights(masked, letter)
        return [*head, *(f"    {line}" for line in body)]

    def _keys_and_scores(self, masked: bool) -> list[str]:
        lines = [f"n_ok = rn < {self.t.keys}"] if masked and self.t.overhangs else []
        if self.plan.scores is not None:
            lines += [*self.t.key(masked), f"s = {self.t.dot('q', 'k')}"]
        return [*lines, *self.t.values(masked)]

    def _emitter(self, masked: bool, letter: str) -> tuple[list[str], Emitter]:
        more, walk = self.t.key_walk("rn", "r")
        masks = self.t.row_mask | ({"r": "n_ok"} if masked and self.t.overhangs else {})
        em = self.t.emitter(self.t.at_rows, walk, masks=masks, letter=letter)
        em.names = dict(self.base.names)
        if self.plan.scores is not None:
            em.define(self.plan.scores, "s")
        if self.scaled is not None:  # by the factor of the exponent
            em.define(self.scaled, em.value(self.scaled.args[0]))
        if not masked:
            for choice, inner in reversed(self.bounds.masks):
                em.define(choice, em.value(inner))
        return more if self.plan.key is None else [], em

    def _weights(self, masked: bool, letter: str) -> list[str]:
        """Lines that take one step's weights to the running values."""
        more, em = self._emitter(masked, letter)
        overhang = masked and self.t.overhangs
        lines: list[str] = []
        for i, e in enumerate(self.weights.sums):
            term = self._whole(em, e.args[0])
            term = f"tl.where(n_ok, {term}, 0.0)" if overhang else term
            em.lines.append(f"sum{i} += tl.sum({term}, axis=1, keep_dims=True)")
        if self.weights.scores is None:
            text = self._whole(em, self.weights.numerator)
            em.lines.append(f"p = {f'tl.where(n_ok, {text}, 0.0)' if overhang else text}")
        else:
            text = self._whole(em, self.weights.scores)
            text = f'tl.where(n_ok, {text}, float("-inf"))' if overhang else text
            em.lines += [f"x = {text}", *self._online()]
        lines += [*more, *zeros(em.lines, "BM", "BN"), *em.lines, *self.t.add_product("p")]
        return lines

    def _whole(self, em: Emitter, e: Expr) -> str:
        """The value of `e` as a whole tile."""
        text = em.value(e)
        return text if em.side(e) == "pr" else f"({text} + tl.zeros([BM, BN], tl.float32))"

    def _online(self) -> list[str]:
        """The step of the online softmax for the scores `x`; a row without a finite score so far keeps 0."""
        top = [
            "m_new = tl.maximum(m, tl.max(x, axis=1, keep_dims=True))",
            'top = tl.where(m_new == float("-inf"), 0.0, m_new)',
        ]
        exponentials = ["p = tl.exp(x - top)", "scale = tl.exp(m - top)"]
        if self.power:
            by = LOG2E * self.factor
            exact = 2.0 ** math.floor(math.log2(by))  # its products are
            exponentials = [
                f"by = tl.where(tl.abs(top) < {min(CLOSE / by, LARGEST)}, {by}, {exact})",
                "p = tl.exp2(x * by - top * by)",
                "scale = tl.exp2((m - top) * by)",
            ]
        elif self.scaled is not None:
            exponentials = [f"p = tl.exp((x - top) * {self.factor})", f"scale = tl.exp((m - top) * {self.factor})"]
        elif self.weights.scores is not None and is_product(_unmasked(self.weights.scores)[0]):
            one = f"one = {one_beside('top')}  # the multiply-add is with it, not within x"
            exponentials = [one, "p = tl.exp(x * one - top)", "scale = tl.exp(m - top)"]
        return [
            *top,
            *exponentials,
            "l = l * scale + tl.sum(p, axis=1, keep_dims=True)",
            "acc = acc * scale",
            "m = m_new",
        ]

    # -- after it
    def _after(self) -> list[str]:
        """Lines that finish the rows and store the outputs."""
        t, plan = self.t, self.plan
        masks = t.row_mask | ({"r": "c_ok"} if t.columns != t.block_v else {})
        lost = '(l != l) & (m == float("-inf"))'  # a maximum leaves out NaN: this row has nothing else
        settle = [f"m = tl.where({lost}, l, m)"] if self.weights.pair is not None else []
        em = t.emitter(t.at_rows, t.at_columns, masks=masks, letter="o")
        for e in plan.nest.exprs:
            if e.op == "part" and e.args[0] is self.weights.pair:
                em.define(e, "m" if e.param == "max" else "l")
        for i, e in enumerate(self.weights.sums):
            em.define(e, f"sum{i}")
        if any(op in ("keep", "drop") for op, _ in self.weights.steps):
            em.lines.append("none = acc * 0.0  # weights of 0: NaN where a value is not finite")
        for op, x in self.weights.steps:
            value = em.value(x) if isinstance(x, Expr) else repr(float(x))
            text = {
                "mul": f"acc * {value}",
                "div": f"acc / {value}",
                "keep": f"tl.where({value}, acc, none)",
                "drop": f"tl.where({value}, none, acc)",
            }[op]
            em.lines.append(f"acc = {text}")
        em.define(plan.output, "acc")
        for i in range(len(plan.nest.outputs)):
            em.store(i)
        return [*settle, *zeros(em.lines, "BM", "BV"), *em.lines]


def _scaled(scores: Expr | None) -> tuple[Expr | None, float]:
    """The product by a positive number that the scores of a softmax are, up to what masks hide, and that number.

    The largest score and the exponents can then be taken of what is multiplied: one multiplication less an element.
    """
    if scores is None:
        return None, 1.0
    e, conditions = _unmasked(scores)
    factor = number(e.args[1]) if e.op == "mul" and isinstance(e.args[0], Expr) else None
    if factor is None or not 0 < factor < math.inf or e in reach(conditions):
        return None, 1.0
    return e, factor


def _unmasked(scores: Expr) -> tuple[Expr, list[Expr]]:
    """What `scores` are where no mask hides them, and the conditions of the masks."""
    choices = list(choices_of(scores, softmax=True))
    e = choices[-1][2] if choices else scores
    while e.op == "identity":
        e = e.args[0]
    return e, [condition for _, condition, _, _ in choices]


def _is_moderate(exprs: Sequence[Expr]) -> bool:
    """Whether scores can be scaled by log2(e): no mask adds the lowest number, which that would make an infinity."""

    def is_huge(e: Expr) -> bool:
        return e.op == "const" and 1e37 < abs(float(e.param)) < math.inf

    def is_added(e: Expr) -> bool:
        return e.op == "load" and e.dtype != "bool"

    numbers = [a for e in exprs for a in e.args if isinstance(a, float)]
    return not any(is_huge(e) or is_added(e) for e in exprs) and not any(1e37 < abs(a) < math.inf for a in numbers)


__all__ = ["Kernel"]
