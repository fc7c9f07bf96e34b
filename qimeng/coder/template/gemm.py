"""The GEMM family as Triton source: one kernel whose tiles run a main loop and an epilogue, and what surrounds it.

The entry function packs what has to be packed, launches the product, and, where the depth is split or the result is
reduced, a second or third small kernel that sums the parts and finishes. Deals in kernel text. Knows nothing about which
schedule is good (see `qimeng.coder.template.gemm_schedule`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qimeng.coder.template.gemm_epilogue import Epilogue
from qimeng.coder.template.gemm_operand import Operand, Planes, Pointers, Tensor, operand, round_up, sources_of
from qimeng.coder.template.gemm_pack import POWER, ROUND, Packer
from qimeng.coder.template.gemm_plan import GemmPlan
from qimeng.coder.template.gemm_scheme import Scheme, is_prepared, scheme_of
from qimeng.coder.template.ir import Nest
from qimeng.coder.template.sources import Loads
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.program.schedule import Schedule

ALIGNED = '''
def {prefix}_aligned(x):
    """`x`, or a copy of it where its memory does not start at a multiple of 16 bytes, which descriptors need."""
    if x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
'''

PROGRAMS = '''
def {prefix}_programs(device):
    """Programs of a persistent launch: one for each SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
'''

COLLECT = (32, 128)
"""Tile of the kernel that sums the parts of a split depth."""


def print_gemm(
    region: Region, nest: Nest, loads: Loads, plan: GemmPlan, schedule: Schedule, prefix: str
) -> Implementation:
    """The implementation of `region` under `schedule`.

    Args:
        region: what is computed.
        nest: its loop nest.
        loads: how its inputs reach the kernels.
        plan: the nest as a GEMM.
        schedule: block sizes, precision and forms.
        prefix: beginning of every top-level name.

    Raises:
        Unsupported: the schedule does not fit the plan.
    """
    printer = _Printer(region, nest, loads, plan, schedule, prefix)
    source = printer.source()
    prepared = printer.prepared
    return Implementation(
        "triton",
        source,
        f"{prefix}_run",
        prepare=f"{prefix}_prepare" if prepared else "",
        prepare_inputs=printer.inputs_of(printer.variables(prepared)) if prepared else (),
        schedule=schedule,
    )


class _Printer:
    def __init__(self, region: Region, nest: Nest, loads: Loads, plan: GemmPlan, schedule: Schedule, prefix: str):
        self.region, self.nest, self.loads, self.plan, self.schedule, self.prefix = (
            region,
            nest,
            loads,
            plan,
            schedule,
            prefix,
        )
        self.scheme = scheme_of(plan, schedule)
        self.a, self.b = (operand(plan, schedule, side, prefix, loads.names) for side in plan.sides)
        self.operands = (self.a, self.b)
        self.prepared = [o for o in self.operands if is_prepared(plan, schedule, o.side)]
        self.steps = round_up(plan.shape[3], schedule.block_k) // schedule.block_k
        self.splits = min(schedule.splits, self.steps)
        tile = (schedule.block_m, schedule.block_n)
        self.pieces = pieces(schedule)
        part = (schedule.block_m, schedule.block_n // self.pieces)
        self.epilogue = Epilogue(plan, *(part if self.splits == 1 else COLLECT), self.operands)
        self.main = Epilogue(plan, *tile, self.operands)

    # -- inputs
    def variables(self, operands: Sequence[Operand]) -> list[str]:
        """Variables of the sources below `operands`."""
        numbers = {i for o in operands for i in sources_of(o.side)}
        return [self.loads.names[i] for i in sorted(numbers)]

    def views(self, names: Sequence[str]) -> list[str]:
        """Lines of the prelude that `names` need."""
        wanted, kept = set(names), []
        for line in reversed(self.loads.prelude):
            target, call = line.split(" = ", 1)
            if target in wanted:
                kept.append(line)
                wanted |= set(re.findall(r"\b[wx]\d+\b", call))
        return kept[::-1]

    def inputs_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """Positions of the region's inputs that `names` come from."""
        text = " ".join([*names, *self.views(names)])
        return tuple(sorted({int(i) for i in re.findall(r"\bx(\d+)\b", text)}))

    def _parameters(self, numbers: Sequence[int]) -> tuple[list[str], list[str]]:
        """Kernel parameters and launch arguments for sources."""
        scalar = [self.nest.sources[i].scalar for i in numbers]
        names = [self.loads.names[i] for i in numbers]
        parameters = [f"x{i}" if s else f"x{i}_ptr" for i, s in zip(numbers, scalar, strict=True)]
        return parameters, [f"float({n})" if s else n for n, s in zip(names, scalar, strict=True)]

    # -- the file
    def source(self) -> str:
        """The whole text."""
        kernels = [self._epilogue(), self._product()]
        if self.splits > 1:
            kernels.append(self._collect())
        if self.plan.finals:
            kernels.append(self._finish())
        packers = [Packer(o, self.schedule) for o in self.operands if isinstance(o, Planes)]
        functions = [p.source() for p in packers]
        if self.prepared:
            functions.append(self._prepare())
        functions.append(self._entry())
        body = "\n\n\n".join(k.strip("\n") for k in [*kernels, *functions]) + "\n"
        helpers = [(f"{self.prefix}_power(", POWER), (f"{self.prefix}_round(", ROUND)]
        helpers += [(f"{self.prefix}_aligned(", ALIGNED), (f"{self.prefix}_programs(", PROGRAMS)]
        head = [text.format(prefix=self.prefix).strip("\n") for call, text in helpers if call in body]
        if "TensorDescriptor(" in body:
            head.insert(0, "from triton.tools.tensor_descriptor import TensorDescriptor")
        return "\n\n\n".join([*head, body])

    def _kernel(self, name: str, doc: str, parameters: Sequence[str], sizes: str, body: Sequence[str]) -> str:
        lines = [
            "@triton.jit",
            f"def {self.prefix}_{name}({', '.join([*parameters, *(f'{s}: tl.constexpr' for s in sizes.split())])}):",
            f'    """{doc}"""',
            *(f"    {line}" for line in body),
        ]
        return "\n".join(lines) + "\n"

    # -- the product
    def _product(self) -> str:
        s, plan = self.schedule, self.plan
        batch, m, n, k = plan.shape
        gm, gn = self.main.grid
        body = self._tile_of(gm, gn, batch, s.group_m)
        if any(o.uses_positions for o in self.operands):
            body += self.main.positions()
        body += [line for o in self.operands for line in o.setup]
        body += self._loop()
        if self.splits > 1:
            body += self.main.positions()
            mask = " & ".join(self.main.masks().values())
            at = f"parts_ptr + ((part * {batch} + z).to(tl.int64) * {m} + rm) * {n} + rn"
            body.append(f"tl.store({at}, acc{f', mask={mask}' if mask else ''})")
        else:
            body += self._epilogue_calls()
        if s.persistent:
            count = gm * gn * batch * self.splits
            head = f"for t in tl.range(tl.program_id(0), {count}, tl.num_programs(0)):"
            body = [head, *(f"    {line}" for line in body)]
        else:
            body.insert(0, "t = tl.program_id(0)")
        shape = f"{f'{batch} x ' if batch > 1 else ''}[{m}, {k}] x [{k}, {n}]"
        return self._kernel(
            "product",
            f"{shape}, {s.precision if not plan.half else plan.dtype}.",
            self._product_parameters()[0],
            "BM BN BK",
            body,
        )

    # -- the epilogue
    def _epilogue_parameters(self) -> list[str]:
        """What the epilogue reads and writes, as parameters of any kernel that runs it."""
        scales = [o.scale for o in self.operands if o.scale]
        return [*scales, *self._parameters(self.epilogue.sources())[0], *self._results()[0]]

    def _epilogue(self) -> str:
        """The epilogue as a function of a tile."""
        head = ["acc", *(["z"] if self.plan.batch else []), "row0", "col0"]
        return self._kernel(
            "epilogue",
            "Take a tile of the product to memory.",
            [*head, *self._epilogue_parameters()],
            "BM BN",
            self.epilogue.tile(),
        )

    def _epilogue_arguments(self, acc: str, column: str, width: str) -> str:
        head = [acc, *(["z"] if self.plan.batch else []), "row0", column]
        return ", ".join([*head, *self._epilogue_parameters(), "BM", width])

    def _epilogue_calls(self) -> list[str]:
        """Lines that run the epilogue on the tile, in narrower pieces where it is wide, to keep registers free."""
        call = f"{self.prefix}_epilogue"
        if self.pieces == 1:
            return [f"{call}({self._epilogue_arguments('acc', 'col0', 'BN')})"]
        lines = ["left, right = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))"]
        lines.append(f"{call}({self._epilogue_arguments('left', 'col0', 'BN // 2')})")
        return [*lines, f"{call}({self._epilogue_arguments('right', 'col0 + BN // 2', 'BN // 2')})"]

    def _product_parameters(self) -> tuple[list[str], list[str]]:
        parameters = [p for o in self.operands for p in o.parameters if self.splits == 1 or p != o.scale]
        arguments = [
            a
            for o in self.operands
            for p, a in zip(o.parameters, o.arguments, strict=True)
            if self.splits == 1 or p != o.scale
        ]
        numbers = {i for o in self.operands for i in o.sources}
        if self.splits == 1:
            numbers |= set(self.epilogue.sources())
        more, passed = self._parameters(sorted(numbers))
        tail, given = self._results() if self.splits == 1 else (["parts_ptr"], ["parts"])
        return [*parameters, *more, *tail], [*arguments, *passed, *given]

    def _results(self) -> tuple[list[str], list[str]]:
        """Parameters and arguments for what the epilogue writes."""
        parameters = [f"y{i}_ptr" for i in self.plan.tiles] + (["work_ptr"] if self.plan.reductions else [])
        return parameters, [p.removesuffix("_ptr") for p in parameters]

    def _tile_of(self, gm: int, gn: int, batch: int, group: int) -> list[str]:
        """Lines that find the tile's batch element, part of the depth, first row and first column from `t`."""
        lines, tile = [], "t"
        if batch > 1 or self.splits > 1:
            tile = "tile"
            lines.append(f"tile = t % {gm * gn}")
        if self.splits > 1:
            lines.append(f"part = t // {gm * gn} % {self.splits}")
            lines.append(f"z = t // {gm * gn * self.splits}")
        elif batch > 1:
            lines.append(f"z = t // {gm * gn}")
        if group > 1 and gm > 1 and gn > 1:
            lines += [
                f"first = {tile} // {group * gn} * {group}",
                f"height = tl.minimum({gm} - first, {group})",
                f"row0 = (first + {tile} % {group * gn} % height) * BM",
                f"col0 = {tile} % {group * gn} // height * BN",
            ]
        else:
            lines += [f"row0 = {tile} // {gn} * BM", f"col0 = {tile} % {gn} * BN"]
        return lines

    # -- the main loop
    def _loop(self) -> list[str]:
        """Lines that leave the product of the tile in `acc`."""
        s = self.schedule
        low, high, bounds = "0", str(self.steps), []
        per = -(-self.steps // self.splits)
        if self.splits > 1:
            bounds = [f"low = part * {per}", f"high = tl.minimum(low + {per}, {self.steps})"]
            low, high = "low", "high"
        triangle = self.plan.triangle
        if triangle is not None and self.splits == 1:
            lower = triangle.kind == "lower"
            outside = (
                f"col0 - row0 - {s.block_m - 1} > {triangle.offset}"
                if lower
                else f"col0 + {s.block_n - 1} - row0 < {triangle.offset}"
            )
            bounds, high = [f"high = tl.where({outside}, 0, {self.steps})"], "high"
        bounds.append("acc = tl.zeros([BM, BN], tl.float32)")
        promote = 0 if s.promote >= per else s.promote
        cat = s.cat and len(self.scheme.products) > 1
        if promote == 1 and not cat:
            step = self._step("part_acc", "i * BK")
            return [
                *bounds,
                f"for i in range({low}, {high}):",
                "    part_acc = tl.zeros([BM, BN], tl.float32)",
                *_indent(step),
                "    acc += part_acc",
            ]
        if not promote:
            return [*bounds, *self._run("acc", low, high, cat)]
        inner = [f"stop = tl.minimum(start + {promote}, {high})", "part_acc = tl.zeros([BM, BN], tl.float32)"]
        inner += [*self._run("part_acc", "start", "stop", cat), "acc += part_acc"]
        return [*bounds, f"for start in range({low}, {high}, {promote}):", *_indent(inner)]

    def _run(self, acc: str, low: str, high: str, cat: bool) -> list[str]:
        """Lines that add the products of steps `low` to `high` to `acc`."""
        if not cat:
            return [f"for i in range({low}, {high}):", *_indent(self._step(acc, "i * BK"))]
        products = self.scheme.products
        count = high if low == "0" else f"({high} - {low})"
        where = "i - pair * " + count if low == "0" else f"{low} + i - pair * {count}"
        planes = [
            f"{o.side.name}_plane = {_lookup([p[i] for p in products])} * {o.stride}"
            for i, o in enumerate(self.operands)
        ]
        step = [f"pair = i // {count}", f"k = ({where}) * BK", *planes]
        step += [*self.a.fetch("a0", "k", "a_plane"), *self.b.fetch("b0", "k", "b_plane"), self._dot(acc, "a0", "b0")]
        return [f"for i in range(0, {len(products)} * {count}):", *_indent(step)]

    def _step(self, acc: str, k: str) -> list[str]:
        """Lines that add the products of one step to `acc`."""
        lines = [f"k = {k}"]
        for i, o in enumerate(self.operands):
            for plane in sorted({p[i] for p in self.scheme.products}):
                lines += o.fetch(f"{o.side.name}{plane}", "k", str(plane * o.stride))
        return lines + [self._dot(acc, f"a{p}", f"b{q}") for p, q in self.scheme.products]

    def _dot(self, acc: str, a: str, b: str) -> str:
        precision = f', input_precision="{self.scheme.dot}"' if self.scheme.dot else ""
        return f"{acc} = tl.dot({a}, {b}, {acc}{precision})"

    # -- the kernels after it
    def _collect(self) -> str:
        """The kernel that sums the parts of a split depth and runs the epilogue."""
        batch, m, n, _ = self.plan.shape
        gm, gn = self.epilogue.grid
        body = ["t = tl.program_id(0)"]
        if self.plan.batch:
            body += [f"z = t // {gm * gn}", f"t = t % {gm * gn}"]
        body += [f"row0 = t // {gn} * BM", f"col0 = t % {gn} * BN", *self.epilogue.positions()]
        mask = " & ".join(self.epilogue.masks().values())
        row = f"(z * {m} + rm)" if self.plan.batch else "rm"
        row += ".to(tl.int64)" if batch * m * n >= 1 << 31 else ""
        body += [
            f"at = parts_ptr + {row} * {n} + rn",
            "acc = tl.zeros([BM, BN], tl.float32)",
            f"for part in range({self.splits}):",
            f"    acc += tl.load(at{f', mask={mask}, other=0.0' if mask else ''})",
            f"    at += {batch * m * n}",
            f"{self.prefix}_epilogue({self._epilogue_arguments('acc', 'col0', 'BN')})",
        ]
        return self._kernel(
            "collect", "Sum the parts of the depth, then the epilogue.", self._collect_parameters()[0], "BM BN", body
        )

    def _collect_parameters(self) -> tuple[list[str], list[str]]:
        scales = [(p, a) for o in self.operands for p, a in zip(o.parameters, o.arguments, strict=True) if p == o.scale]
        more, passed = self._parameters(self.epilogue.sources())
        tail, given = self._results()
        return ["parts_ptr", *(p for p, _ in scales), *more, *tail], ["parts", *(a for _, a in scales), *passed, *given]

    def _finish(self) -> str:
        body, _, _ = self.epilogue.finish()
        return self._kernel(
            "finish", "Merge the tiles' partial reductions.", self._finish_parameters()[0], "PB SP", body
        )

    def _finish_parameters(self) -> tuple[list[str], list[str]]:
        more, passed = self._parameters(self.epilogue.final_sources())
        outputs = [f"y{i}" for i in self.plan.finals]
        return ["work_ptr", *more, *(f"{y}_ptr" for y in outputs)], ["work", *passed, *outputs]

    # -- host functions
    def _prepare(self) -> str:
        names = self.variables(self.prepared)
        inputs = ", ".join(f"x{i}" for i in self.inputs_of(names))
        packs = [f"*{self.prefix}_pack_{o.side.name}({', '.join(self.variables([o]))})" for o in self.prepared]
        lines = [
            f"def {self.prefix}_prepare({inputs}):",
            '    """What is packed once: operands made of parameters alone."""',
        ]
        lines += [f"    {line}" for line in self.views(names)]
        return "\n".join([*lines, f"    return ({', '.join(packs)},)"]) + "\n"

    def _entry(self) -> str:
        s, plan = self.schedule, self.plan
        given = [v for o in self.prepared for v in self._buffers(o)]
        inputs = [f"x{i}" for i in range(len(self.region.inputs))]
        used = self._used()
        lines = [*self.views(used), f"device = {self._a_tensor()}.device"]
        for i, (_, shape, stride, dtype) in enumerate(self.nest.outputs):
            lines.append(f"y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device=device)")
        for o in self.operands:
            if isinstance(o, Planes) and o not in self.prepared:
                lines.append(
                    f"{', '.join(self._buffers(o))}, = {self.prefix}_pack_{o.side.name}({', '.join(self.variables([o]))})"
                )
        lines += [line for o in self.operands for line in o.host]
        if plan.reductions:
            lines.append(f"work = torch.empty(({self.epilogue.workspace},), dtype=torch.float32, device=device)")
        batch, m, n, _ = plan.shape
        gm, gn = self.main.grid
        count = gm * gn * batch * self.splits
        grid = f"min({count}, {self.prefix}_programs(device))" if s.persistent else str(count)
        if self.splits > 1:
            lines.append(f"parts = torch.empty(({self.splits * batch}, {m}, {n}), dtype=torch.float32, device=device)")
        blocks = f"BM={s.block_m}, BN={s.block_n}, BK={s.block_k}, num_warps={s.warps}, num_stages={s.stages}"
        lines.append(f"{self.prefix}_product[({grid},)]({', '.join([*self._product_parameters()[1], blocks])})")
        if self.splits > 1:
            cm, cn = self.epilogue.grid
            blocks = f"BM={COLLECT[0]}, BN={COLLECT[1]}, num_warps=4"
            lines.append(
                f"{self.prefix}_collect[({cm * cn * batch},)]({', '.join([*self._collect_parameters()[1], blocks])})"
            )
        if plan.finals:
            _, rows, width = self.epilogue.finish()
            blocks = f"PB={rows}, SP={width}, num_warps={4 if rows * width <= 8192 else 16}"
            grid = str(-(-self.epilogue.kept // rows))
            lines.append(f"{self.prefix}_finish[({grid},)]({', '.join([*self._finish_parameters()[1], blocks])})")
        lines.append(f"return ({', '.join(f'y{i}' for i in range(len(self.nest.outputs)))},)")
        head = f"def {self.prefix}_run({', '.join([*inputs, *given])}):"
        return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"

    def _buffers(self, o: Operand) -> list[str]:
        name = o.side.name
        return [f"{name}_planes"] + ([f"{name}_inverse"] if self.scheme.scaled else [])

    def _used(self) -> list[str]:
        """Variables that the entry function itself reads."""
        numbers = set(self.epilogue.sources()) | (set(self.epilogue.final_sources()) if self.plan.finals else set())
        for o in self.operands:
            if o not in self.prepared:
                numbers |= set(sources_of(o.side))
        return [self.loads.names[i] for i in sorted(numbers)]

    def _a_tensor(self) -> str:
        """An input that is a tensor."""
        for i, value in enumerate(self.region.inputs):
            if self.region.graph.nodes[value.node].kind != "scalar":
                return f"x{i}"
        raise AssertionError("a matrix product without tensors")


def pieces(schedule: Schedule) -> int:
    """Pieces in which a tile goes through the epilogue: two where a thread holds 128 or more of its elements."""
    held = schedule.block_m * schedule.block_n // (32 * schedule.warps)
    return 2 if held >= 128 and schedule.block_n >= 64 else 1


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _lookup(numbers: Sequence[int]) -> str:
    """An expression of `pair` that gives `numbers[pair]` (each below 4)."""
    table = sum(n << (2 * i) for i, n in enumerate(numbers))
    return f"({table} >> (2 * pair) & 3)"


__all__ = ["Operand", "Planes", "Pointers", "Scheme", "Tensor", "print_gemm"]
