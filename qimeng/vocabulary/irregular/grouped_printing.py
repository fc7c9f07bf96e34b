"""A grouped product as Triton source.

Slots are counted into groups by atomics; a program then finds the group of its tile among the groups' ends, gathers its
slots' rows and multiplies them with the group's matrix. No row's result depends on the order of slots in a group. Deals
in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.grouped_plan import GroupedPlan, GroupedSchedule, tiles
from qimeng.vocabulary.irregular.order import Order, Places

HEAD = """@triton.jit
def {name}({parameters}, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tile = tl.program_id(0)
    groups = tl.arange(0, {all})
    begin = tl.load(first_ptr + groups, mask=groups < {groups}, other={slots})
    end = tl.load(first_ptr + groups + 1, mask=groups < {groups}, other={slots})
    counts = (end - begin + BM - 1) // BM
    group = tl.sum((tl.cumsum(counts, 0) <= tile).to(tl.int32), 0)
    if group < {groups}:
        number = tile - tl.sum(tl.where(groups < group, counts, 0), 0)
        low = tl.load(first_ptr + group) + number * BM
        high = tl.load(first_ptr + group + 1)
        i = low + tl.arange(0, BM)[:, None]
        inside = i < high
        s = tl.load(order_ptr + i, mask=inside, other=0){wide}
        n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
"""


@dataclass(frozen=True)
class Product:
    """A kernel that multiplies rows with the matrices of their groups.

    Attributes:
        name: of the kernel.
        groups: number of groups.
        slots: number of slots.
        each: slots of a row.
        depth: K.
        columns: N.
        rows: strides of the rows, along them and along K.
        leaves: for each product with a row, the strides of its matrices along groups, K and N, and the place of its
            first column.
        place: where the result of slot `s` and column `n` goes.
        dtype: of the result.
        half: whether operands are of a half type.
        value: the result in terms of the sums ``acc0``, ``acc1`` …
        finish: lines before that.
        extra: further parameters of the kernel.
        wide: whether offsets pass 31 bits.
        paired: whether the one product gives two results, whose columns take turns: ``acc0`` and ``acc1``. Reading
            them side by side reads whole lines of memory, where one of them alone is every second element.
    """

    name: str
    groups: int
    slots: int
    each: int
    depth: int
    columns: int
    rows: tuple[int, int]
    leaves: tuple[tuple[int, int, int, int], ...]
    place: str
    dtype: str
    half: bool
    value: str = "acc0"
    finish: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    wide: bool = False
    paired: bool = False

    def text(self, s: GemmSchedule) -> str:
        """The kernel; its parameters are rows, matrices, order, firsts, `extra` and the result."""
        weights = [f"w{j}_ptr" for j in range(len(self.leaves))]
        head = HEAD.format(
            name=self.name,
            parameters=", ".join(["x_ptr", *weights, "order_ptr", "first_ptr", *self.extra, "y_ptr"]),
            all=power_of_two(self.groups),
            groups=self.groups,
            slots=self.slots,
            wide=".to(tl.int64)" if self.wide else "",
        )
        deep = [f"(k < {self.depth})"] if self.depth % s.block_k else []
        across = [f"(n < {self.columns})"] if self.columns % s.block_n else []
        column, width, before, after = "n", "BN", list[str](), list[str]()
        if self.paired:
            column, width = "c", "BN * 2"
            before = ["c = tl.program_id(1) * BN * 2 + tl.arange(0, BN * 2)[None, :]"]
            after = ["acc0, acc1 = tl.split(tl.reshape(acc0, [BM, BN, 2]))"]
        slot = "s" if self.each == 1 else f"(s // {self.each})"
        precision = "" if self.half else f', input_precision="{s.precision}"'
        load = "{0} = tl.load({1}_ptr + {2}{3})"
        inside = " & ".join(["inside", *(f"{m}[None, :]" for m in deep)])
        place = f"{_times(slot, self.rows[0])} + {_times('k[None, :]', self.rows[1])}"
        step = ["k = start + tl.arange(0, BK)", load.format("a", "x", place, f", mask={inside}, other=0.0")]
        bound = [f"(c < {self.columns * 2})"] if self.paired and across else across
        mask = " & ".join([*(f"{m}[:, None]" for m in deep), *bound])
        given = f", mask={mask}, other=0.0" if mask else ""
        for j, (matrix, along, stride, first) in enumerate(self.leaves):
            place = f"group.to(tl.int64) * {matrix} + {_times('k[:, None]', along)} + {_times(column, stride)}"
            place += f" + {first}" if first else ""
            step += [load.format(f"b{j}", f"w{j}", place, given), f"acc{j} = tl.dot(a, b{j}, acc{j}{precision})"]
        body = [
            *before,
            *(f"acc{j} = tl.zeros([BM, {width}], tl.float32)" for j in range(len(self.leaves))),
            f"for start in range(0, {self.depth}, BK):",
            *(f"    {line}" for line in step),
            *after,
            *self.finish,
            f"tl.store(y_ptr + {self.place}, ({self.value}).to(tl.{self.dtype}), mask="
            f"{' & '.join(['inside', *across])})",
        ]
        return head + "\n".join(f"        {line}" for line in body) + "\n"


def launch(name: str, arguments: Sequence[str], grid: tuple[int, int], s: GemmSchedule) -> str:
    """The launch of a kernel of a product."""
    options = f"BM={s.block_m}, BN={s.block_n}, BK={s.block_k}, num_warps={s.warps}, num_stages={s.stages}"
    return f"{name}[({grid[0]}, {grid[1]})]({', '.join(arguments)}, {options})"


def print_grouped(plan: GroupedPlan, schedule: GroupedSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`."""
    found, s, out = plan.grouped, schedule, plan.out
    order = Order(Places("by", found.slots, found.groups, wraps=found.wraps, clamps=True), "bucket", prefix)
    grid = tiles(plan, s), -(-found.columns // s.block_n)
    made = f"{out.shape}, {out.stride}, dtype=torch.{out.dtype}, device={plan.rows}.device"
    lines = [
        *plan.before,
        f"by = {plan.by}.reshape(-1)",
        *order.lines(),
        f"y = torch.empty_strided({made})",
        launch(f"{prefix}_product", [plan.rows, plan.weight, "order", "first", "y"], grid, s),
        "return (y,)",
    ]
    entry = [f"def {prefix}_run({', '.join(plan.parameters)}):", *(f"    {line}" for line in lines)]
    parts = [*order.kernels(), _product(plan, f"{prefix}_product").text(s), "\n".join(entry) + "\n"]
    return Implementation("triton", "\n\n".join(parts), f"{prefix}_run", schedule=schedule)


def _product(plan: GroupedPlan, name: str) -> Product:
    found, out = plan.grouped, plan.out
    batch, column = out.stride[0], out.stride[2 if out.shape[1] == 1 else 1]
    slot = "s" if found.each == 1 else f"(s // {found.each})"
    within = "n" if found.each == 1 else f"((s % {found.each}) * {found.columns} + n)"
    return Product(
        name,
        found.groups,
        found.slots,
        found.each,
        found.depth,
        found.columns,
        found.row_strides,
        ((*found.weight_strides, 0),),
        f"{_times(slot, batch)} + {_times(within, column)}",
        out.dtype,
        plan.half,
        wide=_is_wide(plan),
    )


def _times(text: str, step: int) -> str:
    return text if step == 1 else f"{text} * {step}"


def _is_wide(plan: GroupedPlan) -> bool:
    """Whether offsets of rows or results pass 31 bits."""
    spans: list[int] = [_span(plan.out), plan.grouped.slots * max(plan.grouped.row_strides)]
    return max(spans) >= 1 << 31


def _span(meta: Meta) -> int:
    return sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True)) + 1


__all__ = ["Product", "launch", "print_grouped"]
