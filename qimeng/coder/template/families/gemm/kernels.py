"""The kernels around the main loop: the product, its exact form, the sum of a split depth, the end of a reduction.

Where scaled planes do not hold a tile's values (see `guard`) the product leaves it out, and the exact form, a kernel of
its own after it, computes only such tiles. Deals in kernel text and launch lines. Knows nothing about packing or the
entry function.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from qimeng.coder.template.families.gemm.ends import collect, finish
from qimeng.coder.template.families.gemm.epilogue import Epilogue
from qimeng.coder.template.families.gemm.frame import Frame, Kernel, steps_of
from qimeng.coder.template.families.gemm.loop import indent, main_loop
from qimeng.coder.template.families.gemm.positions import columns_read
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two

EXACT_PROGRAMS = 256
"""Programs of the exact form at most: about two for each SM of a large GPU. Not the number of SMs of the GPU at hand:
that is known only where the kernel is launched, and would compile it a second time."""


class Kernels(Frame):
    """The kernels of one plan under one schedule."""

    def kernels(self) -> list[Kernel]:
        """Every kernel in the order of their launches."""
        found = [self._product()]
        if self.exact:
            found.append(self._exact())
        if self.splits > 1:
            found.append(collect(self))
        return [*found, finish(self)] if self.plan.finals else found

    def buffers(self) -> list[str]:
        """Lines that allocate what passes between the kernels."""
        batch, m, n, _ = self.plan.shape
        lines = [line for d in self.results.values() for line in d.host]
        if self.exact:
            lines.append(f"levels = torch.empty(({self._tiles},), dtype=torch.int32, device=device)")
        if self.splits > 1:
            shape = f"({self.splits * batch}, {m}, {n})"
            lines.append(f"parts = torch.empty({shape}, dtype=torch.float32, device=device)")
        if self.plan.reductions:
            shape = f"({self.epilogue.workspace},)"
            lines.append(f"work = torch.empty({shape}, dtype=torch.{self.epilogue.held}, device=device)")
        return lines

    @property
    def _tiles(self) -> int:
        """Tiles of the product, and parts of their depth."""
        return prod(Epilogue(self.plan, *_blocks(self.schedule)).grid) * self.plan.shape[0] * self.splits

    def _product(self) -> Kernel:
        s, plan = self.schedule, self.plan
        scaled = [o for o in self.operands if o.scale]
        tiles = Epilogue(plan, *_blocks(s))
        early = any(o.uses_positions for o in self.operands)
        body = self._tile_of(*tiles.grid)
        body += tiles.positions() if early else []
        body += [*(self._level() if self.exact else []), *(line for o in self.operands for line in o.setup)]
        tests = [*(["(level > 0)"] if self.exact else []), *([f"({self.skips.test})"] if self.skips else [])]
        tests += self._beside(*columns_read(plan))
        body += main_loop(plan, s, self.operands, steps_of(plan, s), self.splits, " | ".join(tests))
        body += tiles.positions() if not early and (scaled or self.splits > 1) else []
        if scaled:
            body.append(f"acc = acc * ({' * '.join(o.inverse() for o in scaled)})")
        body += self._deliver(tiles, self.pieces)
        grid = str(self._tiles)
        if s.persistent:
            grid = f"min({grid}, {self.prefix}_programs(device))"
            how = ", flatten=True" if s.flat else ""
            body = [f"for t in tl.range(tl.program_id(0), {self._tiles}, tl.num_programs(0){how}):", *indent(body)]
        else:
            body.insert(0, "t = tl.program_id(0)")
        doc = f"{plan.dtype if plan.half else s.precision}."
        parameters = [p for o in self.operands for p in o.parameters] + ["levels_ptr"] * bool(self.exact)
        parameters += [f"{name}_ptr" for name in self.skips.read] if self.skips else []
        sources = [i for o in self.operands for i in o.sources]
        return self._of_tiles("product", doc, s, parameters, sources, body, grid)

    def _beside(self, first: int, end: int) -> list[str]:
        """What is true for tiles without any of these columns of the product."""
        columns, width = self.plan.shape[2], self.schedule.block_n
        tests = [f"(col0 + BN <= {first})"] if first >= width else []
        return tests + ([f"(col0 >= {end})"] if (columns - 1) // width * width >= end else [])

    def _level(self) -> list[str]:
        """Lines that find the tile's level, for the main loop and for the kernel of the exact forms."""
        length = max(_blocks(self.schedule))
        rows = [
            f"({o.start} + tl.arange(0, {length}){f' % {o.block}' if o.rows_of_block < length else ''})"
            for o in self.operands
        ]
        return [
            *(line for o, at in zip(self.operands, rows, strict=True) for line in o.loss(at)),
            "level = 0",
            "if tl.max((a_loss | b_loss) & 1, axis=0) > 0:",
            f"    level = {self.prefix}_level(a_loss, b_loss)",
            "tl.store(levels_ptr + t, level)",
        ]

    def _exact(self) -> Kernel:
        """The product of the tiles that the planes do not hold, if there are any, by a few programs."""
        plan, first = self.plan.original, self.exact[0]
        whole, tiles = _blocks(self.schedule), Epilogue(plan, *_blocks(first))
        down, across = (w // b for w, b in zip(whole, _blocks(first), strict=True))
        where = [
            f"row0 = {'first_row' if down == 1 else f'first_row + piece // {across} * BM'}",
            f"col0 = {'first_column' if across == 1 else f'first_column + piece % {across} * BN'}",
        ]
        piece = tiles.positions()
        for i, (s, operands) in enumerate(zip(self.exact, self.exact_operands, strict=True)):
            work = [line for o in operands for line in o.setup]
            work += main_loop(plan, s, operands, steps_of(plan, s), self.splits)
            work += self._deliver(tiles, self.pieces if plan.reductions else 1)
            last = i + 1 == len(self.exact)
            piece += (
                work if len(self.exact) == 1 else [f"if level {'>' if last else '=='} {i + (not last)}:", *indent(work)]
            )
        _, m, n, _ = plan.shape
        tests = [f"row0 < {m}"] if down > 1 and m % whole[0] else []
        tests += [f"col0 < {n}"] if across > 1 and n % whole[1] else []
        if tests:  # a tile may overhang by whole pieces, which their masks do not tell
            piece = [f"if {' and '.join(tests)}:", *indent(piece)]
        tile = self._tile_of(*Epilogue(plan, *whole).grid, whole)
        body = [
            "mine = tl.program_id(0) + tl.arange(0, PER) * tl.num_programs(0)",
            f"if tl.max(tl.load(levels_ptr + mine, mask=mine < {self._tiles}, other=0), axis=0) > 0:",
            f"    for t in range(tl.program_id(0), {self._tiles}, tl.num_programs(0)):",
            "        level = tl.load(levels_ptr + t)",
            "        if level > 0:",
            *(f"            {line}" for line in tile),
            "            first_row, first_column = row0, col0",
            f"            for piece in range({down * across}):",
            *(f"                {line}" for line in [*where, *piece]),
        ]
        doc = f"{' or '.join(s.precision for s in self.exact)}, of the tiles that the planes do not hold."
        both = [o for operands in self.exact_operands for o in operands]
        parameters = ["levels_ptr", *(p for o in both for p in o.parameters)]
        programs = min(self._tiles, EXACT_PROGRAMS)
        sizes = {"PER": power_of_two(-(-self._tiles // programs))}
        sources = [i for o in both for i in o.sources]
        return self._of_tiles("exact", doc, first, parameters, sources, body, str(programs), sizes)

    def _deliver(self, tiles: Epilogue, pieces: int) -> list[str]:
        """Lines that hand `acc` to the epilogue, or to memory where other programs have the rest of its depth."""
        batch, m, n, _ = self.plan.shape
        if self.splits == 1:
            return self.finish_tile(pieces)
        at = f"parts_ptr + ((part * {batch} + z).to(tl.int64) * {m} + rm) * {n} + rn"
        return [f"tl.store({at}, acc{self.mask(tiles)})"]

    def _of_tiles(
        self,
        name: str,
        doc: str,
        s: GemmSchedule,
        parameters: list[str],
        sources: list[int],
        body: list[str],
        grid: str,
        more: Mapping[str, int] | None = None,
    ) -> Kernel:
        """A kernel over the tiles of the product."""
        batch, m, n, k = self.plan.shape
        parameters = [*parameters, *self.tensors(sorted(set(sources)))]
        made = {f"y{i}_tiles": d.parameter for i, d in self.results.items()}
        parameters += ["parts_ptr"] if self.splits > 1 else [made.get(p, p) for p in self.epilogue_parameters()]
        doc = f"{f'{batch} x ' if batch > 1 else ''}[{m}, {k}] x [{k}, {n}], {doc}"
        sizes: dict[str, int | str] = {"BM": s.block_m, "BN": s.block_n, "BK": s.block_k, **(more or {})}
        options = f"num_warps={s.warps}, num_stages={s.stages}"
        return self.kernel(name, doc, parameters, sizes, body, grid, options)

    def _tile_of(self, gm: int, gn: int, blocks: tuple[int, int] | None = None) -> list[str]:
        """Lines that find the tile's batch element, part of the depth, first row and first column from `t`.

        Args:
            gm: tiles along the rows.
            gn: tiles along the columns.
            blocks: rows and columns of a tile, where they are not the kernel's own.
        """
        rows, columns = blocks or ("BM", "BN")
        group, lines, tile = self.schedule.group_m, list[str](), "t"
        if self.plan.batch or self.splits > 1:
            tile = "tile"
            sizes = {"tile": gm * gn, "part": self.splits, "z": self.plan.shape[0]}
            # neighbours in memory are written at the same time, so that their lines leave the cache once
            order = ("z", "tile", "part") if self.plan.interleaved else ("tile", "part", "z")
            lines = _counted("t", {name: sizes[name] for name in order if name != "part" or self.splits > 1})
        if group > 1 and gm > 1 and gn > 1:
            return [
                *lines,
                f"first = {tile} // {group * gn} * {group}",
                f"height = tl.minimum({gm} - first, {group})",
                f"row0 = (first + {tile} % {group * gn} % height) * {rows}",
                f"col0 = {tile} % {group * gn} // height * {columns}",
            ]
        return [*lines, f"row0 = {tile} // {gn} * {rows}", f"col0 = {tile} % {gn} * {columns}"]


def _counted(number: str, sizes: Mapping[str, int]) -> list[str]:
    """Lines that take a number apart into digits with these names and sizes, the fastest first."""
    below, lines = 1, []
    for place, (name, size) in enumerate(sizes.items(), 1):
        digit = f"{number} // {below}" if below > 1 else number
        lines.append(f"{name} = {digit}" + (f" % {size}" if place < len(sizes) else ""))
        below *= size
    return lines


def _blocks(schedule: GemmSchedule) -> tuple[int, int]:
    return schedule.block_m, schedule.block_n


__all__ = ["Kernels"]
