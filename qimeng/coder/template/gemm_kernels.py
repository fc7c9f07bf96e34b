"""The kernels around the main loop: the product, its exact form, the sum of a split depth, the end of a reduction.

Where scaled planes do not hold a tile's values (`qimeng.coder.template.gemm_guard`) the product leaves it out, and the
exact form, a kernel of its own after it, computes only such tiles. Deals in kernel text and launch lines. Knows nothing
about packing or the entry function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from qimeng.coder.template.gemm_epilogue import Epilogue
from qimeng.coder.template.gemm_loop import indent, main_loop
from qimeng.coder.template.gemm_operand import Operand, operand, round_up
from qimeng.coder.template.gemm_pack import power_of_two
from qimeng.coder.template.gemm_plan import GemmPlan, Side
from qimeng.coder.template.gemm_schedule import promotion
from qimeng.coder.template.gemm_scheme import SCHEMES, scheme_of
from qimeng.program.schedule import Schedule

COLLECT = (32, 128)
"""Largest tile of the kernel that sums the parts of a split depth."""

EXACT_TILE, EXACT_DEPTH = 128, 32
"""Largest side and depth of a tile of the exact form."""

COLLECTORS = 256
"""Programs of that kernel below which it takes smaller tiles and sums several parts at once: a few programs that add
one part after the other wait for memory as often as there are parts."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's text and the line that launches it."""

    text: str
    launch: str


class Kernels:
    """The kernels of one plan under one schedule.

    Attributes:
        splits: programs that share the depth of a tile (no more than have something to do).
        epilogue: the epilogue for the tiles that go through it.
    """

    def __init__(
        self, plan: GemmPlan, schedule: Schedule, operands: tuple[Operand, Operand], names: dict[int, str], prefix: str
    ):
        self.plan, self.schedule, self.operands, self.names, self.prefix = plan, schedule, operands, names, prefix
        steps = _steps(plan, schedule)
        per = -(-steps // min(schedule.splits, steps))
        self.splits = -(-steps // per)
        self.pieces = _pieces(schedule)
        if self.splits > 1:
            self.epilogue = Epilogue(plan, *_collect_tile(plan), fast=schedule.fast)
        else:
            width = schedule.block_n // self.pieces
            self.epilogue = Epilogue(plan, schedule.block_m, width, self.pieces, schedule.fast)
        self.exact = exact_schedules(plan, schedule)
        self.exact_operands = [(self._read_by(s, plan.a), self._read_by(s, plan.b)) for s in self.exact]

    def _read_by(self, schedule: Schedule, side: Side) -> Operand:
        return operand(self.plan, schedule, side, self.prefix, self.names)

    def kernels(self) -> list[Kernel]:
        """Every kernel in the order of their launches."""
        found = [self._product()]
        if self.exact:
            found.append(self._exact())
        if self.splits > 1:
            found.append(self._collect())
        return [*found, self._finish()] if self.plan.finals else found

    def buffers(self) -> list[str]:
        """Lines that allocate what passes between the kernels."""
        batch, m, n, _ = self.plan.shape
        lines = []
        if self.exact:
            lines.append(f"levels = torch.empty(({self._tiles},), dtype=torch.int32, device=device)")
        if self.splits > 1:
            shape = f"({self.splits * batch}, {m}, {n})"
            lines.append(f"parts = torch.empty({shape}, dtype=torch.float32, device=device)")
        if self.plan.reductions:
            shape = f"({self.epilogue.workspace},)"
            lines.append(f"work = torch.empty({shape}, dtype=torch.{self.epilogue.held}, device=device)")
        return lines

    # -- the epilogue as a function of a tile
    def epilogue_function(self) -> str:
        """Its text."""
        head = ["acc", *self._z(), "row0", "col0", *self._epilogue_parameters()]
        return self._text("epilogue", "Take a tile of the product to memory.", head, "BM BN", self.epilogue.tile())

    def _z(self) -> list[str]:
        return ["z"] if self.plan.batch else []

    def _epilogue_parameters(self) -> list[str]:
        """What the epilogue reads and writes, as parameters of any kernel that runs it."""
        results = self.epilogue.results() + (["work_ptr"] if self.plan.reductions else [])
        return [*self._tensors(self.epilogue.sources()), *results]

    def _epilogue_call(self, acc: str, column: str, width: str) -> str:
        arguments = [acc, *self._z(), "row0", column, *self._epilogue_parameters(), "BM", width]
        return f"{self.prefix}_epilogue({', '.join(arguments)})"

    def _finish_tile(self, pieces: int) -> list[str]:
        """Lines that run the epilogue on `acc`, in narrower pieces where it is large, to keep registers free."""
        if pieces == 1:
            return [self._epilogue_call("acc", "col0", "BN")]
        return [
            "left, right = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))",
            self._epilogue_call("left", "col0", "BN // 2"),
            self._epilogue_call("right", "col0 + BN // 2", "BN // 2"),
        ]

    # -- the kernels
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
        body += main_loop(plan, s, self.operands, _steps(plan, s), self.splits, "level > 0" if self.exact else "")
        body += tiles.positions() if not early and (scaled or self.splits > 1) else []
        if scaled:
            body.append(f"acc = acc * ({' * '.join(o.inverse() for o in scaled)})")
        body += self._deliver(tiles, self.pieces)
        grid = str(self._tiles)
        if s.persistent:
            grid = f"min({grid}, {self.prefix}_programs(device))"
            body = [f"for t in tl.range(tl.program_id(0), {self._tiles}, tl.num_programs(0)):", *indent(body)]
        else:
            body.insert(0, "t = tl.program_id(0)")
        doc = f"{plan.dtype if plan.half else s.precision}."
        parameters = [p for o in self.operands for p in o.parameters] + ["levels_ptr"] * bool(self.exact)
        sources = [i for o in self.operands for i in o.sources]
        return self._of_tiles("product", doc, s, parameters, sources, body, grid)

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
        plan, first = self.plan, self.exact[0]
        whole, tiles = _blocks(self.schedule), Epilogue(plan, *_blocks(first))
        down, across = (w // b for w, b in zip(whole, _blocks(first), strict=True))
        piece = [
            f"row0 = {'first_row' if down == 1 else f'first_row + piece // {across} * BM'}",
            f"col0 = {'first_column' if across == 1 else f'first_column + piece % {across} * BN'}",
            *tiles.positions(),
        ]
        for i, (s, operands) in enumerate(zip(self.exact, self.exact_operands, strict=True)):
            work = [line for o in operands for line in o.setup]
            work += main_loop(plan, s, operands, _steps(plan, s), self.splits)
            work += self._deliver(tiles, self.pieces if plan.reductions else 1)
            last = i + 1 == len(self.exact)
            piece += (
                work if len(self.exact) == 1 else [f"if level {'>' if last else '=='} {i + (not last)}:", *indent(work)]
            )
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
            *(f"                {line}" for line in piece),
        ]
        doc = f"{' or '.join(s.precision for s in self.exact)}, of the tiles that the planes do not hold."
        both = [o for operands in self.exact_operands for o in operands]
        parameters = ["levels_ptr", *(p for o in both for p in o.parameters)]
        programs = f"min({self._tiles}, {self.prefix}_programs(device))"
        sizes = {"PER": f"triton.next_power_of_2(triton.cdiv({self._tiles}, {programs}))"}
        sources = [i for o in both for i in o.sources]
        return self._of_tiles("exact", doc, first, parameters, sources, body, programs, sizes)

    def _deliver(self, tiles: Epilogue, pieces: int) -> list[str]:
        """Lines that hand `acc` to the epilogue, or to memory where other programs have the rest of its depth."""
        batch, m, n, _ = self.plan.shape
        if self.splits == 1:
            return self._finish_tile(pieces)
        at = f"parts_ptr + ((part * {batch} + z).to(tl.int64) * {m} + rm) * {n} + rn"
        return [f"tl.store({at}, acc{self._mask(tiles)})"]

    def _of_tiles(
        self,
        name: str,
        doc: str,
        s: Schedule,
        parameters: list[str],
        sources: list[int],
        body: list[str],
        grid: str,
        more: Mapping[str, str] | None = None,
    ) -> Kernel:
        """A kernel over the tiles of the product."""
        batch, m, n, k = self.plan.shape
        parameters = [*parameters, *self._tensors(sorted(set(sources)))]
        parameters += ["parts_ptr"] if self.splits > 1 else self._epilogue_parameters()
        doc = f"{f'{batch} x ' if batch > 1 else ''}[{m}, {k}] x [{k}, {n}], {doc}"
        sizes: dict[str, int | str] = {"BM": s.block_m, "BN": s.block_n, "BK": s.block_k, **(more or {})}
        options = f"num_warps={s.warps}, num_stages={s.stages}"
        return self._kernel(name, doc, parameters, sizes, body, grid, options)

    def _tile_of(self, gm: int, gn: int, blocks: tuple[int, int] | None = None) -> list[str]:
        """Lines that find the tile's batch element, part of the depth, first row and first column from `t`.

        Args:
            gm: tiles along the rows.
            gn: tiles along the columns.
            blocks: rows and columns of a tile, where they are not the kernel's own.
        """
        rows, columns = blocks or ("BM", "BN")
        group, lines, tile = self.schedule.group_m, [], "t"
        if self.plan.batch or self.splits > 1:
            tile = "tile"
            lines.append(f"tile = t % {gm * gn}")
            if self.splits > 1:
                lines.append(f"part = t // {gm * gn} % {self.splits}")
            lines.append(f"z = t // {gm * gn * self.splits}")
        if group > 1 and gm > 1 and gn > 1:
            return [
                *lines,
                f"first = {tile} // {group * gn} * {group}",
                f"height = tl.minimum({gm} - first, {group})",
                f"row0 = (first + {tile} % {group * gn} % height) * {rows}",
                f"col0 = {tile} % {group * gn} // height * {columns}",
            ]
        return [*lines, f"row0 = {tile} // {gn} * {rows}", f"col0 = {tile} % {gn} * {columns}"]

    def _collect(self) -> Kernel:
        batch, m, n, _ = self.plan.shape
        gm, gn = self.epilogue.grid
        body = ["t = tl.program_id(0)"]
        if self.plan.batch:
            body += [f"z = t // {gm * gn}", f"t = t % {gm * gn}"]
        row = f"(z * {m} + rm)" if self.plan.batch else "rm"
        row += ".to(tl.int64)" if batch * m * n >= 1 << 31 else ""
        body += [
            f"row0 = t // {gn} * BM",
            f"col0 = t % {gn} * BN",
            *self.epilogue.positions(),
            f"at = parts_ptr + {row} * {n} + rn",
        ]
        bm, bn = self.epilogue.bm, self.epilogue.bn
        at_once = min(power_of_two(self.splits), max(1, COLLECT[0] * COLLECT[1] // 2 // (bm * bn)))
        body += self._sum_in_turn() if at_once == 1 else self._sum_at_once(at_once)
        body.append(self._epilogue_call("acc", "col0", "BN"))
        parameters = ["parts_ptr", *self._epilogue_parameters()]
        doc = "Sum the parts of the depth, then the epilogue."
        sizes = {"BM": bm, "BN": bn} | ({"BP": at_once} if at_once > 1 else {})
        return self._kernel("collect", doc, parameters, sizes, body, str(gm * gn * batch), "num_warps=4")

    def _sum_in_turn(self) -> list[str]:
        """Lines that sum the parts at `at` one by one."""
        batch, m, n, _ = self.plan.shape
        return [
            "acc = tl.zeros([BM, BN], tl.float32)",
            f"for part in range({self.splits}):",
            f"    acc += tl.load(at{self._mask(self.epilogue)}{', other=0.0' if self.epilogue.masks() else ''})",
            f"    at += {batch * m * n}",
        ]

    def _sum_at_once(self, at_once: int) -> list[str]:
        """Lines that sum the parts at `at`, `BP` of them in flight."""
        batch, m, n, _ = self.plan.shape
        inside = [f"({mask})[None, :, :]" for mask in self.epilogue.masks().values()]
        inside += [f"(part + lane < {self.splits})"] if self.splits % at_once else []
        guard = f", mask={' & '.join(inside)}, other=0.0" if inside else ""
        return [
            "lane = tl.arange(0, BP)[:, None, None]",
            f"at = at[None, :, :] + lane * {batch * m * n}",
            "sums = tl.zeros([BP, BM, BN], tl.float32)",
            f"for part in range(0, {self.splits}, BP):",
            f"    sums += tl.load(at{guard})",
            f"    at += BP * {batch * m * n}",
            "acc = tl.sum(sums, axis=0)",
        ]

    def _finish(self) -> Kernel:
        body, rows, width = self.epilogue.finish()
        outputs = [f"y{i}_ptr" for i in self.plan.finals]
        parameters = ["work_ptr", *self._tensors(self.epilogue.final_sources()), *outputs]
        sizes, warps = {"PB": rows, "SP": width}, 4 if rows * width <= 8192 else 16
        grid = str(-(-self.epilogue.kept // rows))
        doc = "Merge the tiles' partial reductions."
        return self._kernel("finish", doc, parameters, sizes, body, grid, f"num_warps={warps}")

    # -- text
    def _mask(self, tiles: Epilogue) -> str:
        return f", mask={' & '.join(tiles.masks().values())}" if tiles.masks() else ""

    def _tensors(self, numbers: Sequence[int]) -> list[str]:
        """Kernel parameters for sources."""
        return [f"x{i}" if self.plan.nest.sources[i].scalar else f"x{i}_ptr" for i in numbers]

    def _argument(self, parameter: str) -> str:
        """What the entry function passes for a kernel parameter."""
        name = parameter.removesuffix("_ptr")
        if name[0] == "x" and name[1:].isdigit():
            source = self.plan.nest.sources[int(name[1:])]
            return f"float({self.names[source.number]})" if source.scalar else self.names[source.number]
        for o in (*self.operands, *(o for pair in self.exact_operands for o in pair)):
            if parameter in o.parameters:
                return o.arguments[o.parameters.index(parameter)]
        return name

    def _text(self, name: str, doc: str, parameters: Sequence[str], sizes: str, body: Sequence[str]) -> str:
        head = ", ".join([*parameters, *(f"{s}: tl.constexpr" for s in sizes.split())])
        return (
            "\n".join(["@triton.jit", f"def {self.prefix}_{name}({head}):", f'    """{doc}"""', *indent(body)]) + "\n"
        )

    def _kernel(
        self,
        name: str,
        doc: str,
        parameters: Sequence[str],
        sizes: Mapping[str, int | str],
        body: list[str],
        grid: str,
        options: str,
    ) -> Kernel:
        parameters = list(dict.fromkeys(parameters))
        passed = [*map(self._argument, parameters), *(f"{k}={v}" for k, v in sizes.items()), options]
        text = self._text(name, doc, parameters, " ".join(sizes), body)
        return Kernel(text, f"{self.prefix}_{name}[({grid},)]({', '.join(passed)})")


def exact_schedules(plan: GemmPlan, schedule: Schedule) -> tuple[Schedule, ...]:
    """How the exact forms of `schedule` are computed, by level; none where its planes hold all values.

    They read the operands as they are, in pieces of the product's tiles. Reductions of the result are laid out by
    tiles, which are whole then.
    """
    bm, bn = _blocks(schedule)
    if not plan.reductions:
        bm, bn = min(bm, EXACT_TILE), min(bn, EXACT_TILE)
    found = []
    for precision in scheme_of(plan, schedule).exact:
        s = Schedule("gemm", block_m=bm, block_n=bn, block_k=min(EXACT_DEPTH, schedule.block_k), stages=3)
        s = s.but(warps=max(4, min(8, bm * bn // 2048)), precision=precision, cat=False, fast=schedule.fast)
        s = s.but(inline="ab" if SCHEMES[precision].splits else "")
        found.append(s.but(promote=promotion(plan, s)))
    return tuple(found)


def _blocks(schedule: Schedule) -> tuple[int, int]:
    return schedule.block_m, schedule.block_n


def _steps(plan: GemmPlan, schedule: Schedule) -> int:
    return round_up(plan.shape[3], schedule.block_k) // schedule.block_k


def _collect_tile(plan: GemmPlan) -> tuple[int, int]:
    """The largest tile up to `COLLECT` that leaves `COLLECTORS` programs, at least one row of 32."""
    batch, m, n, _ = plan.shape
    rows, columns = COLLECT
    while rows * columns > 32 and batch * -(-m // rows) * -(-n // columns) < COLLECTORS:
        rows, columns = (rows // 2, columns) if rows > 1 else (rows, columns // 2)
    return rows, columns


def _pieces(schedule: Schedule) -> int:
    """Pieces in which a tile goes through the epilogue: two where a thread holds 128 or more of its elements."""
    held = schedule.block_m * schedule.block_n // (32 * schedule.warps)
    return 2 if held >= 128 and schedule.block_n >= 64 else 1


__all__ = ["COLLECT", "Kernel", "Kernels", "exact_schedules"]
