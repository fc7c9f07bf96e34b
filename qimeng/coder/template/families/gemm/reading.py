"""An operand that the main loop reads where it lies: through a descriptor of its own, or by pointers.

Deals in strides, masks and loads. Knows nothing about how planes are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from qimeng.coder.template.families.gemm.descriptors import Strides, strides_in
from qimeng.coder.template.families.gemm.operand import Operand, sources_of
from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.families.gemm.positions import Positions
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.triton.emitter import Emitter, Walk
from qimeng.coder.template.triton.ops import TRITON_DTYPE
from qimeng.coder.template.triton.walks import spread
from qimeng.graph.opgraph import itemsize


class Tensor(Operand):
    """A tensor read through a descriptor of its own, which fills what overhangs with zeros."""

    def _arrange(self) -> None:
        s = self.schedule
        assert self.side.plain is not None
        number = self.side.plain.param
        strides_found = strides_of_tensor(self.plan, self.side)
        assert strides_found is not None
        z, row, k = strides_found
        batch, m, n, depth = self.plan.shape
        rows, block = (m, s.block_m) if self.is_a else (n, s.block_n)
        self.k_major = k == 1
        shape, strides, box = [rows, depth], [row, 1], [block, s.block_k]
        if not self.k_major:
            shape, strides, box = [depth, rows], [k, 1], [s.block_k, block]
        if self.plan.batch:
            shape, strides, box = [batch, *shape], [z, *strides], [1, *box]
        self._describe(f"{self.prefix}_aligned({self.names[number]})", f"{shape}, {strides}, {box}")

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block in `target`."""
        name, first, second = self.side.name, *((self.start, k) if self.k_major else (k, self.start))
        turn = ".T" if self.k_major != self.is_a else ""
        if self.plan.batch:
            shape = f"({self.block}, BK)" if self.k_major else f"(BK, {self.block})"
            return [f"{target} = {name}.load([z, {first}, {second}]).reshape{shape}{turn}"]
        return [f"{target} = {name}.load([{first}, {second}]){turn}"]


class Pointers(Operand):
    """Any expression of tensors with any strides, computed in the loop from masked loads."""

    def _arrange(self) -> None:
        plan, s, nest = self.plan, self.schedule, self.plan.nest
        batch, m, n, k = plan.shape
        tables = [nest.load_strides(e) for e in self.side.loads]
        name, me = self.side.name, "p" if self.is_a else "r"
        used = plan.used(self.side)
        zs, self.z_walks = spread(nest, plan.batch, tables, "z", stem=f"{name}_z", used=used)
        rows, self.row_walks = spread(nest, self.side.rows, tables, self.rows, me, f"{name}_row", used)
        other = "r" if me == "p" else "p"
        deep, self.depth_walks = spread(nest, plan.k, tables, f"{name}_k", other, used=used)
        extent, block = (m, s.block_m) if self.is_a else (n, s.block_n)
        self.along = me, other
        self.masks = {me: f"{'m' if self.is_a else 'n'}_ok"} if extent % block else {}
        if k % s.block_k:
            self.masks[other] = f"{name}_k < {k}"
        for side, walks in ((me, self.row_walks), (other, self.depth_walks)):
            if tests := [*([self.masks[side]] if side in self.masks else []), *within(walks, self.side)]:
                self.masks[side] = " & ".join(f"({t})" for t in tests) if len(tests) > 1 else tests[0]
        if self.side.split:
            assert self.side.plain is not None
            self.stride = prod(nest.sources[self.side.plain.param].shape)
            self._scale_images()
        masks = {side: f"({m})" for side, m in self.masks.items()}
        fixed = [*self.z_walks, *self.row_walks]
        self.positions = found = Positions(nest, self.side, fixed, self.depth_walks, masks)
        self.setup = [*zs, *rows, *_zeros({me: self.rows}, found.setup), *found.setup]
        self.deep_lines = [*deep, *_zeros({other: f"{name}_k"}, found.steps), *found.steps]
        self.sources = sources_of(self.side)

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block in `target`."""
        name, nest = self.side.name, self.plan.nest
        lines = [f"{name}_k = {self.depths(k)}", *self.deep_lines]
        masks = {s: f"({m})" for s, m in self.masks.items()}
        plain = self.side.plain
        starts = {plain.param: plane} if plain is not None and plane != "0" else {}
        em = Emitter(nest, [*self.z_walks, *self.row_walks, *self.depth_walks], masks=masks, starts=starts)
        mask = em.mask("pr")
        shape = "[BM, BK]" if self.is_a else "[BK, BN]"
        read = self.positions.load(plain, mask, plane) if em.side(self.side.expr) == "pr" else None
        if read is not None:
            lines.append(f"{target} = {read}")
        elif plain is not None and not self.side.computed:
            strides = nest.load_strides(plain)
            inside = em.mask(em.side_of(strides))
            other = f", mask={inside}, other=0.0" if inside else ""
            lines.append(f"{target} = tl.load(x{plain.param}_ptr + {em.offset(strides)}{other})")
            if em.side_of(strides) != "pr":
                lines.append(f"{target} = tl.broadcast_to({target}, {shape})")
        else:
            self.positions.define(em)
            value = em.value(self.side.expr)
            lines += _zeros(dict(zip(self.along, (self.rows, f"{name}_k"), strict=True)), em.lines) + em.lines
            whole = em.side(self.side.expr) == "pr"
            full = value if whole else f"{value} + tl.zeros({shape}, tl.float32)"
            masked = mask and not (whole and plain is not None)  # a tensor's own read has given zeros
            lines.append(f"{target} = tl.where({mask}, {full}, 0.0)" if masked else f"{target} = {full}")
            if self.plan.half or self.side.split:
                dtype = scheme_of(self.plan, self.schedule).dtype
                lines.append(f"{target} = {target}.to({TRITON_DTYPE[dtype]})")
        return lines


def within(walks: Sequence[Walk], side: Side) -> list[str]:
    """Tests that a position lies among the elements of the tensors below an operand (see `Side.short`)."""
    at = {w.atoms[-1]: w.name for w in walks if w.atoms}
    return [f"{at[atom]} < {count}" for atom, count in side.short if atom in at]


def _zeros(along: Mapping[str, str], lines: Sequence[str]) -> list[str]:
    """Lines that define the zeros along each side that `lines` add to an address."""
    text = "\n".join(lines)
    return [f"{side}_zero = {at} * 0" for side, at in along.items() if f"{side}_zero" in text]


def strides_of_tensor(plan: GemmPlan, side: Side) -> Strides | None:
    """Strides along batch, rows and depth where each is one walk and a descriptor can take them; else None."""
    nest = plan.nest
    if side.plain is None or side.computed or side.short:
        return None
    source, strides = nest.sources[side.plain.param], nest.load_strides(side.plain)
    return strides_in(nest, strides, (plan.batch, side.rows, plan.k), itemsize(source.dtype))


__all__ = ["Pointers", "Tensor", "strides_of_tensor", "within"]
