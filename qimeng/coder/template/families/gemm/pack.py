"""Kernels that write an operand of a matrix product as planes, with its prologue fused.

A program owns a tile of the matrix of planes (see `Planes`). Scales need the largest magnitude of a row: where the
whole depth fits one tile it is found and used at once; else a first kernel leaves it in `top` by an atomic maximum of
the bits, which is exact and independent of order (and puts a NaN above all numbers). What scaled planes lose of each
row is noted beside them (see `guard`). Deals in kernel text. Knows nothing about the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qimeng.coder.template.families.gemm.guard import EXTREME, MISSED, REMOTE, tiny
from qimeng.coder.template.families.gemm.inline import Inline
from qimeng.coder.template.families.gemm.operand import sources_of
from qimeng.coder.template.families.gemm.planes import Planes, plane_of
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.families.gemm.walks import spread
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.emitter import Emitter

BITS = "(x.to(tl.int32, bitcast=True) & 2147483647)"
"""The magnitude of `x` as bits, which order like the magnitudes; NaN is above all."""

KERNEL = '''
@triton.jit
def {name}({parameters}, PB: tl.constexpr, RB: tl.constexpr):
    """{doc}"""
    t = tl.program_id(0)
{body}
'''

RESIDENT_ROW = 32768
"""Elements of a row that a program may hold."""

RESIDENT_COLUMN = 1024
"""Depth of strided rows of which a program may hold 32 side by side (twice that with 16, where they are aligned)."""


WRITTEN, WRITERS = 8, 512
"""Most blocks of the depth that a program writes, so that few of them add up what a row loses, and the programs that
there are at least then."""


@dataclass(frozen=True)
class Tile:
    """A tile of the matrix of planes and how it is launched."""

    pb: int
    rb: int
    warps: int
    loop: int = 1


class Packer:
    """Prints the kernels and the host function that pack one operand.

    Attributes:
        planes: the operand.
        name: beginning of the names.
    """

    def __init__(self, planes: Planes | Inline, schedule: GemmSchedule):
        self.planes, self.plan, self.side = planes, planes.plan, planes.side
        self.scheme = scheme_of(self.plan, schedule)
        self.name = planes.maker
        batch, m, n, k = self.plan.shape
        rows = m if planes.is_a else n
        self.batch = batch
        self.real_p, self.real_r = (rows, k) if planes.k_major else (k, rows)
        self.high, self.wide = planes.high, planes.wide
        self.row_of = "p" if planes.k_major else "r"

    def source(self) -> str:
        """Kernels and the host function."""
        steps = self._steps()
        rows = self.scheme.planes * self.batch * self.high
        count = self.batch * self.planes.padded
        made = [f"planes = torch.empty(({rows}, {self.wide}), dtype=torch.{self.scheme.dtype}, device=device)"]
        if self.scheme.scaled:
            made.append(f"inverse = torch.empty(({count},), dtype=torch.float32, device=device)")
            if len(steps) > 1:
                made.append(f"top, loss = torch.zeros((2, {count}), dtype=torch.int32, device=device)")
            else:
                made.append(f"loss = torch.empty(({count},), dtype=torch.int32, device=device)")
        shape = f"{self.scheme.planes} x [{self.batch * self.high}, {self.wide}]"
        doc = f"The planes of operand {self.side.name}: {shape}."
        return self._text(doc, made, steps, "planes, inverse, loss" if self.scheme.scaled else "planes,")

    def _steps(self) -> list[tuple[str, str]]:
        """Kernels and the lines that launch them."""
        if self._fits():
            return [self._resident()]
        return [self._top(), self._write()] if self.scheme.scaled else [self._write()]

    def _text(self, doc: str, made: list[str], steps: list[tuple[str, str]], result: str) -> str:
        """`steps` and the host function that allocates `made`, launches them and returns `result`."""
        numbers = sources_of(self.side)
        names = [self.planes.names[i] for i in numbers]
        tensor = next(self.planes.names[i] for i in numbers if not self.plan.nest.sources[i].scalar)
        lines = [f"device = {tensor}.device", *made, *(line for _, line in steps), f"return {result}"]
        head = [f"def {self.name}({', '.join(names)}):", f'    """{doc}"""', *(f"    {line}" for line in lines)]
        return "".join(text for text, _ in steps) + "\n\n" + "\n".join(head) + "\n"

    # -- forms
    def _fits(self) -> bool:
        """Whether the depth of a row fits one tile, so that one kernel does."""
        if not self.scheme.scaled:
            return False
        if self.row_of == "p":
            return self.wide <= RESIDENT_ROW
        return self.high <= RESIDENT_COLUMN * (1 if self.real_r % 16 else 2)

    def _resident(self) -> tuple[str, str]:
        if self.row_of == "p":
            rb = power_of_two(self.wide)
            tile = Tile(min(16, max(1, 4096 // rb)), rb, 4 if rb <= 4096 else 8 if rb <= 8192 else 16)
        else:
            pb = power_of_two(self.high)
            tile = Tile(pb, max(32 if pb <= RESIDENT_COLUMN else 16, 8192 // pb), max(4, min(32, pb // 64)))
        body = [*self._place(tile), *self._element()]
        body.append(f"top = tl.max({BITS}, axis={self._axis}, keep_dims=True)")
        body += [*self._scale(tile, ""), *self._look(), *self._note(tile, True), *self._split(tile)]
        pointers = ["planes", "inverse", "loss"]
        return self._kernel("", [f"{p}_ptr" for p in pointers], "Scale and split.", body, tile, pointers)

    @property
    def _axis(self) -> int:
        """The axis of a tile along the depth."""
        return 1 if self.row_of == "p" else 0

    def _top(self, least: int = 0) -> tuple[str, str]:
        """The kernel that finds the largest magnitude of each row, and `least` places further on the least one."""
        rb = min(4096, power_of_two(self.wide))
        tile = Tile(4096 // rb, rb, 8, min(8, -(-self.wide // rb)))
        if self.row_of == "r":
            tile = Tile(32, 128, 4, min(8, -(-self.high // 32)))
        axis, body = self._axis, self._place(tile)
        inner = [self._step(tile), *self._element(), f"bits = {BITS}", "best = tl.maximum(best, bits)"]
        found = {"best": 0}
        if least:
            inner.append("under = tl.maximum(under, tl.where(bits > 0, 2147483647 - bits, 0))")
            found["under"] = least
        body += [f"{name} = tl.zeros([PB, RB], tl.int32)" for name in found]
        body += [f"for c in range({tile.loop}):", *(f"    {line}" for line in inner)]
        at, ok = self._row(), self._ok(tile)[self.row_of]
        mask = ok or f"{self.row_of} >= 0"
        for name, place in found.items():
            target = f"top_ptr + {at}" + (f" + {place}" if place else "")
            value = f"tl.max({name}, axis={axis}, keep_dims=True)"
            body.append(f'tl.atomic_max({target}, {value}, mask={mask}, sem="relaxed")')
        return self._kernel("_top", ["top_ptr"], "Largest magnitude of each row, as bits.", body, tile, ["top"])

    def _write(self) -> tuple[str, str]:
        """The kernel that writes the planes when the scales are known or not needed."""
        rb = min(1024, power_of_two(self.wide))
        tile = Tile((4096 if self.plan.half else 1024) // rb, rb, 4)
        if self.side.k_major != self.planes.k_major:
            tile = Tile(32, 32, 4)
        if not self.scheme.scaled:
            body = [*self._place(tile), *self._element(), *self._split(tile)]
            return self._kernel("", ["planes_ptr"], "Write the planes.", body, tile, ["planes"])
        programs = self.batch * math.prod(self._blocks(tile))
        tile = replace(tile, loop=min(WRITTEN, max(1, programs // WRITERS)))
        count = "[PB, 1]" if self._axis else "[1, RB]"
        body = [
            *self._place(tile),
            f"top = tl.load(top_ptr + {self._row()}, mask={self._inside(tile, self.row_of)}, other=0)",
            *self._scale(tile, "j == 0" if self._axis else "i == 0"),
            f"all_missed = tl.zeros({count}, tl.int32)",
            f"all_lost = tl.zeros({count}, tl.int32)",
            f"for c in range({tile.loop}):",
        ]
        inner = [
            self._step(tile),
            *self._element(),
            *self._look(),
            "all_missed += missed",
            "all_lost = all_lost | lost",
        ]
        body += [f"    {line}" for line in [*inner, *self._split(tile)]]
        body += ["missed, lost = all_missed, all_lost", *self._note(tile, False)]
        pointers = ["top", "planes", "inverse", "loss"]
        return self._kernel("", [f"{p}_ptr" for p in pointers], "Scale and split.", body, tile, pointers)

    # -- parts of a kernel
    def _blocks(self, tile: Tile) -> tuple[int, int]:
        """Programs along p and r for each element of the batch."""
        loop_p, loop_r = (1, tile.loop) if self.row_of == "p" else (tile.loop, 1)
        return -(-self.high // (tile.pb * loop_p)), -(-self.wide // (tile.rb * loop_r))

    def _place(self, tile: Tile) -> list[str]:
        """Which tile this program owns, and its positions."""
        p_blocks, r_blocks = self._blocks(tile)
        lines = [f"j = t % {r_blocks}", f"i = t // {r_blocks}"]
        if self.plan.batch:
            lines = [f"z = t // {p_blocks * r_blocks}", f"j = t % {r_blocks}", f"i = t // {r_blocks} % {p_blocks}"]
        return [*lines, "p = i * PB + tl.arange(0, PB)[:, None]", "r = j * RB + tl.arange(0, RB)[None, :]"]

    def _step(self, tile: Tile) -> str:
        """The line that goes to the next block of the depth in a loop over `c`."""
        if self._axis:
            return f"r = (j * {tile.loop} + c) * RB + tl.arange(0, RB)[None, :]"
        return f"p = (i * {tile.loop} + c) * PB + tl.arange(0, PB)[:, None]"

    def _ok(self, tile: Tile) -> dict[str, str]:
        """Masks of positions inside the matrix of planes, where the tiles overhang it."""
        p_blocks, r_blocks = self._blocks(tile)
        loop_p, loop_r = (1, tile.loop) if self.row_of == "p" else (tile.loop, 1)
        return {
            "p": f"(p < {self.high})" if p_blocks * tile.pb * loop_p != self.high else "",
            "r": f"(r < {self.wide})" if r_blocks * tile.rb * loop_r != self.wide else "",
        }

    def _inside(self, tile: Tile, sides: str, extra: str = "") -> str:
        """A mask text over `sides` that is never empty."""
        parts = [self._ok(tile)[s] for s in sides if self._ok(tile)[s]] + ([f"({extra})"] if extra else [])
        return " & ".join(parts or [f"({sides[0]} >= 0)"])

    def _row(self) -> str:
        """The position of a row among the scales."""
        return f"z * {self.planes.padded} + {self.row_of}" if self.plan.batch else self.row_of

    def _element(self) -> list[str]:
        """Lines that leave the operand's values in `x`, zero where the planes are padded."""
        nest, plan = self.plan.nest, self.plan
        tables = [nest.load_strides(e) for e in self.side.loads]
        along_p, along_r = (self.side.rows, plan.k) if self.row_of == "p" else (plan.k, self.side.rows)
        lines, walks = [], []
        for atoms, index, side in ((plan.batch, "z", ""), (along_p, "p", "p"), (along_r, "r", "r")):
            more, found = spread(nest, atoms, tables, index, side)
            lines += more
            walks += found
        masks = {"p": f"(p < {self.real_p})", "r": f"(r < {self.real_r})"}
        em = Emitter(nest, walks, masks=masks)
        value = em.value(self.side.expr)
        return [*lines, *em.lines, f"x = tl.where({masks['p']} & {masks['r']}, {value}, 0.0)"]

    def _scale(self, tile: Tile, once: str) -> list[str]:
        """Lines that make the scale of `top` and store its inverse; `once` tells which program of several does."""
        at = f"inverse_ptr + {self._row()}"
        return [
            f"scale, inverse = {self.planes.prefix}_power(top.to(tl.float32, bitcast=True))",
            f"tl.store({at}, inverse, mask={self._inside(tile, self.row_of, once)})",
        ]

    def _split(self, tile: Tile) -> list[str]:
        """Lines that store `x` as planes, scaled where the scheme scales."""
        s = self.scheme
        lines = ["x = x * scale"] if s.scaled else []
        if s.rounds:
            lines.append(f"x = {self.planes.prefix}_round(x)")
        big = s.planes * self.planes.stride * self.wide >= 1 << 31
        row = f"(z * {self.high} + p)" if self.plan.batch else "p"
        row += ".to(tl.int64)" if big else ""
        lines.append(f"at = planes_ptr + {row} * {self.wide} + r")
        mask = " & ".join(m for m in self._ok(tile).values() if m)
        tail = f", mask={mask}" if mask else ""
        for plane in range(s.planes):
            shift = f" + {plane * self.planes.stride * self.wide}" if plane else ""
            rounded, *less = plane_of(s, self.planes.prefix, "x", "part", plane, plane + 1 == s.planes)
            lines += [rounded, f"tl.store(at{shift}, part{tail})", *less]
        return lines

    def _look(self) -> list[str]:
        """Lines that leave in `missed` and `lost` what the planes lose of `x` (see `guard`)."""
        axis = f"axis={self._axis}, keep_dims=True"
        inside = f"(p < {self.real_p}) & (r < {self.real_r})"
        lost = f"tl.where(tl.abs(x) < {REMOTE!r}, {EXTREME}, (size < {tiny(self.scheme)!r}).to(tl.int32))"
        return [
            "size = tl.abs(x * scale)",
            f"missed = tl.sum(((size < {MISSED!r}) & {inside}).to(tl.int32), {axis})",
            f"lost = tl.max(tl.where(x != 0.0, {lost}, 0), {axis})",
        ]

    def _note(self, tile: Tile, whole: bool) -> list[str]:
        """Lines that store the loss of the rows.

        Args:
            tile: the tile.
            whole: whether a program has whole rows; else several of them add up what they see.
        """
        at, mask = f"loss_ptr + {self._row()}", self._inside(tile, self.row_of)
        lines = [
            "missed = tl.where(top > 0, missed, 0)",
            f"lost = tl.where({self.planes.prefix}_extreme(top), {EXTREME}, lost)",
        ]
        if whole:
            return [*lines, f"tl.store({at}, tl.where(lost < {EXTREME}, missed * 2 + lost, lost), mask={mask})"]
        return [
            *lines,
            f'tl.atomic_add({at}, missed * 2, mask={mask} & (missed > 0), sem="relaxed")',
            f'tl.atomic_or({at}, lost, mask={mask} & (lost > 0), sem="relaxed")',
        ]

    def _kernel(
        self, suffix: str, extra: list[str], doc: str, body: list[str], tile: Tile, arguments: list[str]
    ) -> tuple[str, str]:
        nest = self.plan.nest
        numbers = sources_of(self.side)
        parameters = [f"x{i}" if nest.sources[i].scalar else f"x{i}_ptr" for i in numbers] + extra
        passed = [f"float({self.planes.names[i]})" if nest.sources[i].scalar else self.planes.names[i] for i in numbers]
        p_blocks, r_blocks = self._blocks(tile)
        kernel = f"{self.name}{suffix}_kernel"
        text = KERNEL.format(
            name=kernel, parameters=", ".join(parameters), doc=doc, body="\n".join(f"    {b}" for b in body)
        )
        grid = p_blocks * r_blocks * self.batch
        sizes = f"PB={tile.pb}, RB={tile.rb}, num_warps={tile.warps}"
        return text, f"{kernel}[({grid},)]({', '.join([*passed, *arguments, sizes])})"


class Scaler(Packer):
    """Prints the kernel and the host function that find the scales of an operand which the main loop splits."""

    def source(self) -> str:
        """Kernel and host function."""
        count = self.batch * self.planes.padded
        made = [f"top = torch.zeros(({2 * count},), dtype=torch.int32, device=device)"]
        doc = f"Largest and (2^31 - 1 minus) least magnitudes of the rows of operand {self.side.name}, as bits."
        return self._text(doc, made, [self._top(least=count)], "top,")


__all__ = ["Packer", "Scaler"]
