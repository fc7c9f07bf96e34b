"""What both forms of a reduction by segment are printed from: a tile of rows, its result, the entry function.

Deals in kernel text. Knows nothing about which schedule is good, or about how rows are walked.
"""

from __future__ import annotations

from qimeng.coder.template.triton.emitter import Emitter, literal, without_unused
from qimeng.coder.template.triton.walks import spread
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


class Printed:
    """What both forms share: a tile of rows, the entry function."""

    def __init__(self, plan: SegmentPlan, schedule: SegmentSchedule, prefix: str):
        self.plan, self.schedule, self.prefix = plan, schedule, prefix
        self.segments, self.order = plan.segments, order_of(plan, schedule, prefix)
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
        long = order.piece_lines(schedule.longest) if (schedule := self.schedule).form != "atomic" else []
        made_once = (*order.made, *(("pieces", "owner") if long else ()))
        given = [*plan.parameters, *(made_once if order.settled else ())]
        tensor = plan.parameters[0]
        lines = [*plan.before, *([] if order.settled else [*order.lines(), *long])]
        made = f"{plan.out.shape}, {plan.out.stride}, dtype=torch.{plan.out.dtype}, device={tensor}.device"
        lines += [f"y = torch.empty_strided({made})"] if "torch.empty_strided" not in "".join(launches) else []
        lines = without_unused([*lines, *launches, "return (y,)"])
        entry = [f"def {p}_run({', '.join(given)}):", *(f"    {line}" for line in lines)]
        parts = [*kernels, *([] if order.settled else order.kernels())]
        if order.settled:
            parts.append(order.prepare([plan.parameters[i] for i in plan.order_inputs], plan.order, long))
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


__all__ = ["NEUTRAL", "STEP", "Printed"]
