"""The kernels around the main loop: the product, the sum of a split depth, and the end of a reduction.

Deals in kernel text and launch lines. Knows nothing about packing or the entry function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.gemm_epilogue import Epilogue
from qimeng.coder.template.gemm_loop import indent, main_loop
from qimeng.coder.template.gemm_operand import Operand, round_up
from qimeng.coder.template.gemm_pack import power_of_two
from qimeng.coder.template.gemm_plan import GemmPlan
from qimeng.program.schedule import Schedule

COLLECT = (32, 128)
"""Largest tile of the kernel that sums the parts of a split depth."""

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
        self.steps = round_up(plan.shape[3], schedule.block_k) // schedule.block_k
        per = -(-self.steps // min(schedule.splits, self.steps))
        self.splits = -(-self.steps // per)
        self.pieces = _pieces(schedule)
        self.main = Epilogue(plan, schedule.block_m, schedule.block_n, operands)
        if self.splits > 1:
            self.epilogue = Epilogue(plan, *_collect_tile(plan), operands, fast=schedule.fast)
        else:
            width = schedule.block_n // self.pieces
            self.epilogue = Epilogue(plan, schedule.block_m, width, operands, self.pieces, schedule.fast)

    def kernels(self) -> list[Kernel]:
        """Every kernel in the order of their launches."""
        found = [self._product()]
        if self.splits > 1:
            found.append(self._collect())
        return [*found, self._finish()] if self.plan.finals else found

    def buffers(self) -> list[str]:
        """Lines that allocate what passes between the kernels."""
        batch, m, n, _ = self.plan.shape
        lines = []
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
        return [*(o.scale for o in self.operands if o.scale), *self._tensors(self.epilogue.sources()), *results]

    def _epilogue_call(self, acc: str, column: str, width: str) -> str:
        arguments = [acc, *self._z(), "row0", column, *self._epilogue_parameters(), "BM", width]
        return f"{self.prefix}_epilogue({', '.join(arguments)})"

    def _finish_tile(self) -> list[str]:
        """Lines that run the epilogue on `acc`, in narrower pieces where it is large, to keep registers free."""
        if self.pieces == 1:
            return [self._epilogue_call("acc", "col0", "BN")]
        return [
            "left, right = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))",
            self._epilogue_call("left", "col0", "BN // 2"),
            self._epilogue_call("right", "col0 + BN // 2", "BN // 2"),
        ]

    # -- the kernels
    def _product(self) -> Kernel:
        s, plan = self.schedule, self.plan
        batch, m, n, k = plan.shape
        gm, gn = self.main.grid
        body = self._tile_of(gm, gn)
        if any(o.uses_positions for o in self.operands):
            body += self.main.positions()
        body += [line for o in self.operands for line in o.setup]
        body += main_loop(plan, s, self.operands, self.steps, self.splits)
        parameters = [p for o in self.operands for p in o.parameters]
        sources = sorted({i for o in self.operands for i in o.sources})
        if self.splits > 1:
            body += self.main.positions()
            at = f"parts_ptr + ((part * {batch} + z).to(tl.int64) * {m} + rm) * {n} + rn"
            body.append(f"tl.store({at}, acc{self._mask(self.main)})")
            parameters += [*self._tensors(sources), "parts_ptr"]
        else:
            body += self._finish_tile()
            parameters += [*self._tensors(sources), *self._epilogue_parameters()]
        count = gm * gn * batch * self.splits
        grid = str(count)
        if s.persistent:
            grid = f"min({count}, {self.prefix}_programs(device))"
            body = [f"for t in tl.range(tl.program_id(0), {count}, tl.num_programs(0)):", *indent(body)]
        else:
            body.insert(0, "t = tl.program_id(0)")
        doc = (
            f"{f'{batch} x ' if batch > 1 else ''}[{m}, {k}] x [{k}, {n}], {plan.dtype if plan.half else s.precision}."
        )
        sizes = {"BM": s.block_m, "BN": s.block_n, "BK": s.block_k}
        return self._kernel(
            "product", doc, parameters, sizes, body, grid, f"num_warps={s.warps}, num_stages={s.stages}"
        )

    def _tile_of(self, gm: int, gn: int) -> list[str]:
        """Lines that find the tile's batch element, part of the depth, first row and first column from `t`."""
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
                f"row0 = (first + {tile} % {group * gn} % height) * BM",
                f"col0 = {tile} % {group * gn} // height * BN",
            ]
        return [*lines, f"row0 = {tile} // {gn} * BM", f"col0 = {tile} % {gn} * BN"]

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
        for o in self.operands:
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
        sizes: dict[str, int],
        body: list[str],
        grid: str,
        options: str,
    ) -> Kernel:
        parameters = list(dict.fromkeys(parameters))
        passed = [*map(self._argument, parameters), *(f"{k}={v}" for k, v in sizes.items()), options]
        text = self._text(name, doc, parameters, " ".join(sizes), body)
        return Kernel(text, f"{self.prefix}_{name}[({grid},)]({', '.join(passed)})")


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


__all__ = ["COLLECT", "Kernel", "Kernels"]
