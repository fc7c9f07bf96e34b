"""Kernels that write an operand of a matrix product as planes, with its prologue fused.

A program owns a tile of the matrix of planes (see `Planes`). Scales need the largest magnitude of a row: where the
whole depth fits one tile it is found and used at once; else a first kernel leaves it in `top` by an atomic maximum of
the bits, which is exact and independent of order (and puts a NaN above all numbers). What scaled planes lose of each
row is noted beside them (see `guard`). Deals in kernel text. Knows nothing about the product.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qimeng.coder.template.families.gemm.guard import BITS
from qimeng.coder.template.families.gemm.pack_parts import Parts, Tile
from qimeng.coder.template.nest.sizes import power_of_two

RESIDENT_ROW = 32768
"""Elements of a row that a program may hold."""

RESIDENT_COLUMN = 1024
"""Depth of strided rows of which a program may hold 32 side by side (twice that with 16, where they are aligned)."""


WRITTEN, WRITERS = 8, 512
"""Most blocks of the depth that a program writes, so that few of them add up what a row loses, and the programs that
there are at least then."""


class Packer(Parts):
    """Prints the kernels and the host function that pack one operand."""

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


class Scaler(Packer):
    """Prints the kernel and the host function that find the scales of an operand which the main loop splits."""

    def source(self) -> str:
        """Kernel and host function."""
        count = self.batch * self.planes.padded
        made = [f"top = torch.zeros(({2 * count},), dtype=torch.int32, device=device)"]
        doc = f"Largest and (2^31 - 1 minus) least magnitudes of the rows of operand {self.side.name}, as bits."
        return self._text(doc, made, [self._top(least=count)], "top,")


__all__ = ["Packer", "Scaler"]
