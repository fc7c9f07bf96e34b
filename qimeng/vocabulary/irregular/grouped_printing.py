"""A grouped product as Triton source.

Slots are counted into groups by atomics; a program then finds the group of its tile among the groups' ends, gathers its
slots' rows and multiplies them with the group's matrix. No row's result depends on the order of slots in a group. Deals
in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.grouped_plan import GroupedPlan, GroupedSchedule, tiles
from qimeng.vocabulary.irregular.order import Order, Places

KERNEL = """@triton.jit
def {prefix}_product(x_ptr, w_ptr, order_ptr, first_ptr, y_ptr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
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
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, {depth}, BK):
            k = start + tl.arange(0, BK)
            a_place = {a_place}
            b_place = {b_place}
            a = tl.load(x_ptr + a_place, mask={a_mask}, other=0.0)
            b = tl.load(w_ptr + b_place, mask={b_mask}, other=0.0)
            acc = tl.dot(a, b, acc{precision})
        tl.store(y_ptr + {y_place}, acc.to(tl.{dtype}), mask={y_mask})
"""


def print_grouped(plan: GroupedPlan, schedule: GroupedSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`."""
    found, s, out = plan.grouped, schedule, plan.out
    order = Order(Places("by", found.slots, found.groups, wraps=found.wraps, clamps=True), "bucket", prefix)
    grid = f"{tiles(plan, s)}, {-(-found.columns // s.block_n)}"
    options = f"BM={s.block_m}, BN={s.block_n}, BK={s.block_k}, num_warps={s.warps}, num_stages={s.stages}"
    made = f"{out.shape}, {out.stride}, dtype=torch.{out.dtype}, device={plan.rows}.device"
    lines = [
        *plan.before,
        f"by = {plan.by}.reshape(-1)",
        *order.lines(),
        f"y = torch.empty_strided({made})",
        f"{prefix}_product[({grid})]({plan.rows}, {plan.weight}, order, first, y, {options})",
        "return (y,)",
    ]
    entry = [f"def {prefix}_run({', '.join(plan.parameters)}):", *(f"    {line}" for line in lines)]
    parts = [*order.kernels(), _kernel(plan, s, prefix), "\n".join(entry) + "\n"]
    return Implementation("triton", "\n\n".join(parts), f"{prefix}_run", schedule=schedule)


def _kernel(plan: GroupedPlan, s: GroupedSchedule, prefix: str) -> str:
    found, out = plan.grouped, plan.out
    (row, inner), (matrix, deep, across) = found.row_strides, found.weight_strides
    overhangs, along = found.depth % s.block_k, found.columns % s.block_n
    slot = "s" if found.each == 1 else f"(s // {found.each})"
    batch, column = out.stride[0], out.stride[2 if out.shape[1] == 1 else 1]
    within = "n" if found.each == 1 else f"((s % {found.each}) * {found.columns} + n)"
    precision = "" if plan.half else f', input_precision="{s.precision}"'
    return KERNEL.format(
        prefix=prefix,
        all=power_of_two(found.groups),
        groups=found.groups,
        slots=found.slots,
        wide=".to(tl.int64)" if _is_wide(plan) else "",
        depth=found.depth,
        a_place=f"{_times(slot, row)} + {_times('k[None, :]', inner)}",
        b_place=f"group.to(tl.int64) * {matrix} + {_times('k[:, None]', deep)} + {_times('n', across)}",
        a_mask=f"inside & (k < {found.depth})[None, :]" if overhangs else "inside",
        b_mask=" & ".join(
            [
                *([f"(k < {found.depth})[:, None]"] if overhangs else []),
                *([f"(n < {found.columns})"] if along else []),
            ]
        )
        or "None",
        precision=precision,
        y_place=f"{_times(slot, batch)} + {_times(within, column)}",
        y_mask=f"inside & (n < {found.columns})" if along else "inside",
        dtype=out.dtype,
    ).replace(", mask=None, other=0.0", "")


def _times(text: str, step: int) -> str:
    return text if step == 1 else f"{text} * {step}"


def _is_wide(plan: GroupedPlan) -> bool:
    """Whether offsets of rows or results pass 31 bits."""
    spans: list[int] = [_span(plan.out), plan.grouped.slots * max(plan.grouped.row_strides)]
    return max(spans) >= 1 << 31


def _span(meta: Meta) -> int:
    return sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True)) + 1


__all__ = ["print_grouped"]
