"""What happens to a tile of the product: pointwise epilogue, stores, and reductions of the result.

A reduction is done in two steps: each tile leaves its partial result in a workspace [part, position], and a small
second kernel merges the parts and finishes the outputs that need them. Deals in kernel text. Knows nothing about the
main loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.nest.contracted import is_product
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.accumulate import Accumulator, corrected
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.exponentials import one_beside
from qimeng.coder.template.triton.walks import spread
from qimeng.family import Unsupported

MOST_PARTS = 65536
"""Partial results that one program merges."""


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a plan for tiles of `bm` by `bn`.

    Attributes:
        plan: the plan.
        bm: rows of a tile.
        bn: columns of a tile.
        pieces: tiles of this width, side by side, that a kernel hands over together; all but the first may lie beyond
            the last column, however well their width divides the columns.
        fast: special functions in few instructions.
        tiled: numbers of the outputs that leave through tensor descriptors.
    """

    plan: GemmPlan
    bm: int
    bn: int
    pieces: int = 1
    fast: bool = False
    tiled: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along the rows and along the columns."""
        _, m, n, _ = self.plan.shape
        return -(-m // self.bm), -(-n // self.bn)

    @property
    def parts(self) -> int:
        """Partial results of one reduction for each position that is kept."""
        gm, gn = self.grid
        return {"n": gn, "m": gm, "mn": gm * gn, "": 0}[self.plan.over]

    @property
    def kept(self) -> int:
        """Positions of a reduction's result."""
        return self.plan.extent(self.plan.kept)

    @property
    def workspace(self) -> int:
        """Elements of the workspace."""
        return self.parts * self.kept * sum(len(_accumulator(e, "q").parts) for e in self.plan.reductions)

    @property
    def held(self) -> str:
        """Dtype of the workspace: fp64 where integers are reduced, which fp32 would round."""
        return "float32" if all(is_float(e.dtype) for e in self.plan.reductions) else "float64"

    def sources(self) -> list[int]:
        """Numbers of the sources that the tiles read."""
        roots = [self.plan.nest.outputs[i][0] for i in self.plan.tiles] + list(self.plan.reductions)
        return sorted({e.param for e in reach(roots, lambda e: e is self.plan.dot) if e.op == "load"})

    def final_sources(self) -> list[int]:
        """Numbers of the sources that the second kernel reads."""
        roots = [self.plan.nest.outputs[i][0] for i in self.plan.finals]
        return sorted({e.param for e in reach(roots, lambda e: e.op == "reduce") if e.op == "load"})

    def results(self) -> list[str]:
        """Kernel parameters for the outputs that tiles go to."""
        return [f"y{i}_tiles" if i in self.tiled else f"y{i}_ptr" for i in self.plan.tiles]

    # -- the tile
    def positions(self) -> list[str]:
        """Lines that define a tile's rows, columns and masks from `row0` and `col0`."""
        _, m, n, _ = self.plan.shape
        lines = ["rm = row0 + tl.arange(0, BM)[:, None]", "rn = col0 + tl.arange(0, BN)[None, :]"]
        bounds = {"p": f"m_ok = rm < {m}", "r": f"n_ok = rn < {n}"}
        return lines + [bounds[side] for side in self.masks()]

    def masks(self) -> dict[str, str]:
        """Side to the name of its mask, where tiles overhang."""
        _, m, n, _ = self.plan.shape
        over = {"p": m % self.bm, "r": n % (self.bn * self.pieces)}
        return {side: name for side, name in (("p", "m_ok"), ("r", "n_ok")) if over[side]}

    def tile(self) -> list[str]:
        """Lines that take the tile `acc` to memory."""
        plan, nest = self.plan, self.plan.nest
        lines = self.positions()
        tables = plan.epilogue_tables()
        walks = []
        for atoms, index, side, stem in (
            (plan.batch, "z", "", "batch"),
            (plan.m, "rm", "p", "row"),
            (plan.n, "rn", "r", "col"),
        ):
            more, found = spread(nest, atoms, tables, index, side, stem, plan.epilogue_used())
            lines += more
            walks += found
        em = Emitter(nest, walks, masks=self.masks(), fast=nest.finest if self.fast else "", limited=True)
        em.define(plan.dot, "acc")
        for i in plan.tiles:
            if i in self.tiled:
                self._hand_over(em, i)
            else:
                em.store(i)
        self._partials(em)
        text = "\n".join(em.lines)
        lines += [
            f"{s}_zero = tl.zeros({shape}, tl.int32)"
            for s, shape in (("p", "[BM, 1]"), ("r", "[1, BN]"))
            if f"{s}_zero" in text
        ]
        return lines + em.lines

    def _hand_over(self, em: Emitter, number: int) -> None:
        """Print the store of an output through its descriptor, which leaves out what overhangs."""
        expr, _, _, dtype = self.plan.nest.outputs[number]
        value = em.value(expr)
        value = value if em.side(expr) == "pr" else f"tl.broadcast_to({value}, [BM, BN])"
        text, at = f"({value}).to({ops.TRITON_DTYPE[dtype]})", "row0, col0"
        if self.plan.batch:
            text, at = f"{text}.reshape(1, BM, BN)", f"z, {at}"
        em.lines.append(f"y{number}_tiles.store([{at}], {text})")

    def _partials(self, em: Emitter) -> None:
        """Print the tile's share of every reduction and its stores into the workspace.

        A tile that goes through the epilogue in two pieces may have one that lies beyond the last column.
        """
        plan, (_, gn) = self.plan, self.grid
        batch, m, n, _ = plan.shape
        part = {"n": "col0 // BN", "m": "row0 // BM", "mn": f"row0 // BM * {gn} + col0 // BN"}.get(plan.over, "")
        position, kept_mask = {
            "n": (f"z * {m} + rm" if plan.batch else "rm", "p"),
            "m": (f"z * {n} + rn" if plan.batch else "rn", "r"),
            "mn": ("z + tl.zeros([1, 1], tl.int32)" if plan.batch else "tl.zeros([1, 1], tl.int32)", ""),
        }.get(plan.over, ("", ""))
        slot = 0
        for number, e in enumerate(plan.reductions):
            name = f"q{number}"
            value = em.value(e.args[0])
            em.lines.append(
                f"{name}_x = {value}"
                if em.side(e.args[0]) == "pr"
                else f"{name}_x = tl.broadcast_to({value}, [BM, BN])"
            )
            reduced = ("p" if "m" in plan.over else "") + ("r" if "n" in plan.over else "")
            em.lines += _partial(e, name, reduced, em.mask(reduced), (m, n), (self.bm, self.bn))
            for text in _accumulator(e, name).parts:
                at = f"work_ptr + ({slot * self.parts} + {part}) * {self.kept} + {position}"
                beyond = [f"(col0 < {n})"] if "n" in plan.over and n % (2 * self.bn) else []
                mask = em.mask(kept_mask, beyond)
                held = ops.TRITON_DTYPE[self.held]
                em.lines.append(f"tl.store({at}, {text}.to({held}){f', mask={mask}' if mask else ''})")
                slot += 1

    # -- the second kernel
    def finish(self) -> tuple[list[str], int, int]:
        """Body of the kernel that merges the parts, its rows a program and the width of its tile."""
        plan, nest = self.plan, self.plan.nest
        if self.parts > MOST_PARTS:
            raise Unsupported(f"{self.parts} partial results of one reduction, at most {MOST_PARTS} fit a program")
        width = power_of_two(self.parts)
        rows = min(power_of_two(self.kept), max(1, 4096 // width))
        lines = ["p = tl.program_id(0) * PB + tl.arange(0, PB)[:, None]", "s = tl.arange(0, SP)[None, :]"]
        lines += [f"p_ok = p < {self.kept}", f"s_ok = s < {self.parts}"]
        tables = [nest.output_strides(i) for i in plan.finals]
        roots = [nest.outputs[i][0] for i in plan.finals]
        late = reach(roots, lambda e: e.op == "reduce")
        tables += [nest.load_strides(e) for e in late if e.op == "load" and not nest.sources[e.param].scalar]
        more, walks = spread(nest, plan.kept, tables, "p", "p", "kept", plan.epilogue_used())
        em = Emitter(nest, walks, masks={"p": "p_ok"})
        slot = 0
        for number, e in enumerate(plan.reductions):
            acc = _accumulator(e, f"q{number}")
            names = []
            for k in range(len(acc.parts)):
                at = f"work_ptr + ({slot * self.parts} + s) * {self.kept} + p"
                cast = "" if self.held == "float32" else f".to({acc.dtype})"
                names.append(f"q{number}_{k}")
                em.lines.append(f"{names[-1]} = tl.load({at}, mask=p_ok & s_ok, other=0.0){cast}")
                slot += 1
            em.lines += acc.merge(names, "s_ok")
            _define(em, late, e, acc)
        for i in plan.finals:
            em.store(i, sides="p")
        zero = ["p_zero = tl.zeros([PB, 1], tl.int32)"] if "p_zero" in "\n".join(em.lines) else []
        return [*lines, *more, *zero, *em.lines], rows, width


def _accumulator(e: Expr, name: str) -> Accumulator:
    dtype = compute_dtype(e.dtype)
    product = e.param == "sumexp" and is_product(e.args[0])
    return Accumulator(e.param, name, ops.TRITON_DTYPE[dtype], is_float(dtype), product=product)


def _define(em: Emitter, late: list[Expr], e: Expr, acc: Accumulator) -> None:
    """Say where the results of the reduction `e` are held."""
    members = dict(zip(("max", "sum") if e.param == "sumexp" else ("mean", "m2"), acc.parts, strict=False))
    em.define(e, acc.result)
    for part in late:
        if part.op == "part" and part.args[0] is e:
            em.define(part, members[part.param])


def _partial(e: Expr, name: str, reduced: str, mask: str, shape: tuple[int, int], blocks: tuple[int, int]) -> list[str]:
    """Lines that reduce `<name>_x` over the sides `reduced` of one tile into the accumulator's parts."""
    acc = _accumulator(e, name)
    x, n = f"{name}_x", name

    def fold(function: str, text: str) -> str:
        for axis, side in ((1, "r"), (0, "p")):
            if side in reduced:
                text = f"tl.{function}({text}, axis={axis}, keep_dims=True)"
        return text

    masked = [f"{x} = tl.where({mask}, {x}, {acc.neutral})"] if mask else []
    if e.param == "welford":
        sides = (("p", shape[0], blocks[0], "row0"), ("r", shape[1], blocks[1], "col0"))
        counts = [f"tl.minimum({size} - {start}, {block})" for side, size, block, start in sides if side in reduced]
        inside = f"{x} - {n}_mean"
        part = 1.0 / math.prod(block for side, _, block, _ in sides if side in reduced)  # sums then do not overflow
        return [
            *masked,
            f"{n}_count = ({' * '.join(counts)}).to(tl.float32)",
            f"{n}_mean = {fold('sum', f'{x} * {part}')} / ({n}_count * {part})",
            f"{n}_d = {f'tl.where({mask}, {inside}, 0.0)' if mask else inside}",
            f"{n}_m2 = {fold('sum', f'{n}_d * {n}_d')}",
            *corrected(n, fold("sum", f"{n}_d")),
            f"{n}_count = {n}_count + tl.zeros_like({n}_mean)",
        ]
    if e.param == "sumexp":
        top = f"tl.maximum({fold('max', x)}, {acc.lowest})"  # finite where all are -inf
        times = f"{x} * {n}_one" if acc.product else x
        return [
            *masked,
            f"{n}_max = {top}",
            *([f"{n}_one = {one_beside(f'{n}_max')}"] if acc.product else []),
            f"{n}_sum = {fold('sum', f'tl.exp({times} - tl.minimum({n}_max, {acc.highest}))')}",
        ]
    lines = [*masked, f"{n} = {fold(e.param, x)}"]
    if acc.floating and e.param in ("max", "min"):
        lines.append(f"{n} = tl.where({fold('max', f'({x} != {x}).to(tl.int32)')} > 0, float('nan'), {n})")
    return lines


__all__ = ["Epilogue", "MOST_PARTS"]
