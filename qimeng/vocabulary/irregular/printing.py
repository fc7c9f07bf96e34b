"""A reduction by segment as Triton source.

``sorted`` and ``bucket``: a program walks the rows of its segments through their order, computes each where it is
needed and keeps running sums; ``atomic``: a program computes rows as they come and adds them to sums in memory. Deals
in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

import math

from qimeng.coder.template.triton.emitter import Emitter, literal, without_unused
from qimeng.coder.template.triton.walks import spread
from qimeng.family import Unsupported
from qimeng.graph.opgraph import Meta, row_major
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.order import order_of
from qimeng.vocabulary.irregular.plan import SegmentPlan
from qimeng.vocabulary.irregular.schedules import SegmentSchedule

NEUTRAL = {"sum": "0.0", "mean": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
"""What a missing row counts as."""

STEP = {
    "sum": "{0} + {1}",
    "mean": "{0} + {1}",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}
"""How two rows become one."""

BETTER = """@triton.jit
def {prefix}_{kind}(a, b):
    return tl.{kind}imum(a, b, propagate_nan=tl.PropagateNan.ALL)


"""


def print_segments(plan: SegmentPlan, schedule: SegmentSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Raises:
        Unsupported: the schedule does not fit the plan.
    """
    if schedule.form == "atomic" and plan.segments.kind not in ("sum", "mean"):
        raise Unsupported(f"atomics for the {plan.segments.kind} of rows")
    if schedule.form != "sorted" and plan.segments.by is None:
        raise Unsupported(f"the form {schedule.form!r} for rows that lie in the order of their segments")
    return (_Atomic if schedule.form == "atomic" else _Walked)(plan, schedule, prefix).implementation()


class _Printed:
    """What both forms share: a tile of rows, the entry function."""

    def __init__(self, plan: SegmentPlan, schedule: SegmentSchedule, prefix: str):
        self.plan, self.schedule, self.prefix = plan, schedule, prefix
        self.segments, self.order = plan.segments, order_of(plan, schedule.form, prefix)
        self.blocks = -(-plan.columns // schedule.block_r)
        self.stored = plan.out if not self._in_parts() else Meta(plan.out.shape, row_major(plan.out.shape), "float32")

    def _in_parts(self) -> bool:
        """Whether sums in fp32 lie apart from the result."""
        return self.schedule.form == "atomic" and not (self.segments.plain and self.plan.out.dtype == "float32")

    def emitter(self) -> Emitter:
        """Of the rows' values; rows have a mask always, columns where they overhang."""
        plan, nest = self.plan, self.plan.nest
        tables = [s for s, _ in nest.accesses()] + [plan.column_strides(m) for m in (plan.out, self.stored)]
        lines, rows = spread(nest, plan.row_axes, tables, "p", side="p")
        more, columns = spread(nest, plan.column_axes, tables, "r", side="r")
        masks = {"p": "p_mask"} | ({"r": "r_mask"} if plan.columns % self.schedule.block_r else {})
        em = Emitter(nest, rows + columns, plan.wide, masks)
        self.row_lines, self.column_lines = lines, more
        return em

    def columns(self, number: str) -> list[str]:
        """Lines that set the variables along a row, from the number of the block of columns."""
        wide = [f"r_base = tl.cast({number}, tl.int64) * RB" if self.plan.wide else f"r_base = ({number}) * RB"]
        mask = [f"r_mask = r < {self.plan.columns}"] if self.plan.columns % self.schedule.block_r else []
        lines = [*wide, "r = r_base + tl.arange(0, RB)[None, :]", "r_zero = r * 0", *mask]
        return [*lines, *self.column_lines]

    def place(self, em: Emitter, meta: Meta) -> str:
        """Where an element of segment `s` lies in a tensor [segments, …]."""
        step = "" if meta.stride[0] == 1 else f" * {meta.stride[0]}"
        return f"s{step} + {em.offset(self.plan.column_strides(meta), 'r')}"

    def mask(self, *more: str) -> str:
        """The mask of an access that has columns."""
        return " & ".join([*more, *(["r_mask"] if self.plan.columns % self.schedule.block_r else [])])

    def kernel(self, name: str, extra: list[str], body: list[str]) -> str:
        """A kernel with the parameters that it uses."""
        lines = without_unused(body)
        given = [p for p, _ in self.sources(lines)] + extra
        head = f"@triton.jit\ndef {self.prefix}_{name}({', '.join(given)}, SB: tl.constexpr, EB: tl.constexpr, "
        return head + "RB: tl.constexpr):\n" + "\n".join(f"    {line}" for line in lines) + "\n"

    def sources(self, lines: list[str]) -> list[tuple[str, str]]:
        """Parameters and arguments of the tensors that `lines` load."""
        text = "\n".join(lines)
        found = [(f"x{s.number}_ptr", self.plan.names[s.number]) for s in self.plan.nest.sources]
        return [(p, a) for p, a in found if f"{p} " in text]

    def launch(self, name: str, grid: str, arguments: list[str]) -> str:
        """The launch of a kernel."""
        s = self.schedule
        options = f"SB={s.block_s}, EB={s.block_e}, RB={s.block_r}, num_warps={s.warps}"
        return f"{self.prefix}_{name}[({grid},)]({', '.join(arguments)}, {options})"

    def result(self, total: str, count: str, base: str) -> str:
        """The result of a segment from the sum (or extreme) of its rows, their number and what it begins with."""
        kind, joins = self.segments.kind, self.segments.joins
        if joins:
            both = STEP[kind].format(total, base)
            return f"({both}) / ({count} + 1)" if kind == "mean" else both
        value = f"{total} / tl.maximum({count}, 1)" if kind == "mean" else total
        return f"tl.where({count} > 0, {value}, {base})"

    def finish(self, em: Emitter, total: str, count: str, mask: str) -> list[str]:
        """Lines that store a tile of results; `mask` says which segments and columns exist."""
        base, lines = literal(self.segments.fill, "float32"), []
        if self.plan.base:
            meta = self.plan.region.graph.meta(self.segments.base)  # type: ignore[arg-type]
            lines = [f"base = tl.load(base_ptr + {self.place(em, meta)}, mask={mask}, other=0.0).to(tl.float32)"]
            base = "base"
        value = total if self.segments.plain else self.result(total, count, base)
        place, dtype = self.place(em, self.plan.out), self.plan.out.dtype
        return [*lines, f"tl.store(y_ptr + {place}, ({value}).to(tl.{dtype}), mask={mask})"]

    def implementation(self) -> Implementation:
        """The whole text."""
        kernels, launches = self.pieces()
        plan, order, p = self.plan, self.order, self.prefix
        given = [*plan.parameters, *(order.made if order.settled else ())]
        tensor = plan.parameters[0]
        lines = [*plan.before, *([] if order.settled else order.lines())]
        made = f"{plan.out.shape}, {plan.out.stride}, dtype=torch.{plan.out.dtype}, device={tensor}.device"
        lines += [f"y = torch.empty_strided({made})"] if "torch.empty_strided" not in "".join(launches) else []
        entry = [f"def {p}_run({', '.join(given)}):", *(f"    {line}" for line in (*lines, *launches, "return (y,)"))]
        parts = [*kernels, *([] if order.settled else order.kernels())]
        if order.settled:
            parts.append(order.prepare([plan.parameters[i] for i in plan.order_inputs], plan.order))
        body = "\n\n".join([*(part.rstrip("\n") + "\n" for part in parts), "\n".join(entry) + "\n"])
        helper = BETTER.format(prefix=p, kind=self.segments.kind) if f"{p}_{self.segments.kind})" in body else ""
        once = order.settled
        return Implementation(
            "triton", helper + body, f"{p}_run", prepare=f"{p}_prepare" if once else "",
            prepare_inputs=plan.order_inputs if once else (), schedule=self.schedule,
        )  # fmt: skip

    def pieces(self) -> tuple[list[str], list[str]]:
        """Kernels, and lines of the entry function that launch them."""
        raise NotImplementedError


class _Walked(_Printed):
    """A program owns segments and walks their rows."""

    def pieces(self) -> tuple[list[str], list[str]]:
        """One kernel."""
        plan, s, kind = self.plan, self.schedule, self.segments.kind
        em, count = self.emitter(), plan.segments.count
        value = em.value(plan.nest.outputs[0][0])
        step = STEP[kind].format("acc", "taken")
        wide = ".to(tl.int64)" if plan.wide else ""
        head = [
            f"block = tl.program_id(0) // {self.blocks}",
            *self.columns(f"tl.program_id(0) % {self.blocks}"),
            "lane = tl.arange(0, SB * EB)[:, None]",
            "owner = block * SB + lane // EB",
            *self.order.bounds("owner", f"owner < {count}", "low", "high"),
            "longest = tl.max(high - low)",
            f"acc = tl.full([SB * EB, RB], {NEUTRAL[kind]}, tl.float32)",
            "for t in range(0, longest, EB):",
        ]
        inside = [
            "i = low + t + lane % EB",
            "p_mask = i < high",
            f"p = {self.order.row('i', 'p_mask')}{wide}",
            "p_zero = p * 0",
            *self.row_lines,
            *em.lines,
            f"taken = tl.where(p_mask, {value}, {NEUTRAL[kind]})",
            f"acc = {step}",
        ]
        em.lines = []
        tail = [
            *self._collapsed(kind),
            f"s = block * SB + tl.arange(0, SB)[:, None]{wide}",
            f"s_mask = s < {count}",
            *self.order.bounds("s", "s_mask", "begin", "end"),
            "count = end - begin",
            *self.finish(em, "total", "count", self.mask("s_mask")),
        ]
        body = [*head, *(f"    {line}" for line in inside), *tail]
        extra = [*self.order.parameters, *(["base_ptr"] if plan.base else []), "y_ptr"]
        used = [a for _, a in self.sources(without_unused(body))]
        arguments = [*used, *self.order.arguments, *([plan.base] if plan.base else []), "y"]
        grid = str(-(-count // s.block_s) * self.blocks)
        return [self.kernel("reduce", extra, body)], [self.launch("reduce", grid, arguments)]

    def _collapsed(self, kind: str) -> list[str]:
        """Lines that make one row of each segment's lanes."""
        s = self.schedule
        if s.block_e == 1:
            return ["total = acc"]
        if s.block_s == 1:
            lanes, after = "acc", "0"
        else:
            lanes, after = "tl.reshape(acc, [SB, EB, RB])", "1"
        if kind in ("sum", "mean"):
            text = f"tl.sum({lanes}, {after})"
        else:
            text = f"tl.reduce({lanes}, {after}, {self.prefix}_{kind})"
        return [f"total = tl.reshape({text}, [SB, RB])"]


class _Atomic(_Printed):
    """A program owns rows, and adds each to its segment's sum."""

    def pieces(self) -> tuple[list[str], list[str]]:
        """A kernel of sums and, where those are not the result, one that makes it of them."""
        plan, s = self.plan, self.schedule
        em, mean = self.emitter(), self.segments.kind == "mean" or not self.segments.joins and not self.segments.plain
        value = em.value(plan.nest.outputs[0][0])
        wide = ".to(tl.int64)" if plan.wide else ""
        body = [
            f"block = tl.program_id(0) // {self.blocks}",
            *self.columns(f"tl.program_id(0) % {self.blocks}"),
            f"p = block * (SB * EB) + tl.arange(0, SB * EB)[:, None]{wide}",
            f"p_mask = p < {plan.rows}",
            "p_zero = p * 0",
            *self.row_lines,
            *self.order.segment("p", "p_mask", "s"),
            f"kept = p_mask & (s >= 0) & (s < {plan.segments.count})",
            *em.lines,
            f"taken = ({value}) + tl.zeros([SB * EB, RB], tl.float32)",
            f'tl.atomic_add(total_ptr + {self.place(em, self.stored)}, taken, mask={self.mask("kept")}, sem="relaxed")',
        ]
        em.lines = []
        if mean:
            first = f"kept & (tl.program_id(0) % {self.blocks} == 0)"
            body.append(f'tl.atomic_add(count_ptr + s, 1, mask={first}, sem="relaxed")')
        sums = ["total", *(["count"] if mean else [])]
        used = [a for _, a in self.sources(without_unused(body))]
        kernels = [self.kernel("add", [self.order.index, *(f"{n}_ptr" for n in sums)], body)]
        device = f"{plan.parameters[0]}.device"
        count = plan.segments.count
        shape = f"{plan.out.shape}, {self.stored.stride}"
        launches = [f"total = torch.empty_strided({shape}, dtype=torch.float32, device={device}).zero_()"]
        launches += [f"count = torch.zeros({count}, dtype=torch.int32, device={device})"] if mean else []
        grid = str(-(-plan.rows // s.lanes) * self.blocks)
        launches.append(self.launch("add", grid, [*used, plan.place, *sums]))
        if not self._in_parts():
            return kernels, [*launches, "y = total"]
        return [*kernels, self._finishing(em, sums)], [*launches, *self._finished(sums)]

    def _finishing(self, em: Emitter, sums: list[str]) -> str:
        """The kernel that makes results of sums."""
        count = self.plan.segments.count
        mask = self.mask("s_mask")
        lines = [
            f"block = tl.program_id(0) // {self.blocks}",
            *self.columns(f"tl.program_id(0) % {self.blocks}"),
            f"s = block * (SB * EB) + tl.arange(0, SB * EB)[:, None]{'.to(tl.int64)' if self.plan.wide else ''}",
            f"s_mask = s < {count}",
            f"total = tl.load(total_ptr + {self.place(em, self.stored)}, mask={mask}, other=0.0)",
            *(["count = tl.load(count_ptr + s, mask=s_mask, other=0)"] if "count" in sums else []),
            *self.finish(em, "total", "count", mask),
        ]
        extra = [*(f"{n}_ptr" for n in sums), *(["base_ptr"] if self.plan.base else []), "y_ptr"]
        return self.kernel("finish", extra, lines)

    def _finished(self, sums: list[str]) -> list[str]:
        plan = self.plan
        made = f"{plan.out.shape}, {plan.out.stride}, dtype=torch.{plan.out.dtype}, device={plan.parameters[0]}.device"
        grid = str(-(-plan.segments.count // self.schedule.lanes) * self.blocks)
        arguments = [*sums, *([plan.base] if plan.base else []), "y"]
        return [f"y = torch.empty_strided({made})", self.launch("finish", grid, arguments)]


def tile_bytes(schedule: SegmentSchedule) -> int:
    """Bytes that a block asks for before it waits: a tile of rows in fp32."""
    return 4 * math.prod((schedule.lanes, schedule.block_r))


__all__ = ["print_segments", "tile_bytes"]
