"""A program sorts whole rows: an element's order and its place in 64 bits, by a bitonic network (Triton's `tl.sort`).

The place in the low bits makes the order stable, and says where the element itself is read again: zeros keep their sign
and NaN its bits. Deals in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.program.program import Implementation
from qimeng.program.schedule import Schedule, family_field, power_of_two
from qimeng.vocabulary.irregular.sorting import SortPlan

MOST_32 = 0x7FFFFFFF
"""The largest order: of NaN."""

PLACES = 0xFFFFFFFF
"""The bits of a place."""


@dataclass(frozen=True)
class SortSchedule(Schedule):
    """How many rows a program sorts.

    Attributes:
        block_p: rows of a program.
        warps: warps of one.
    """

    family: str = family_field("sort")
    block_p: int = power_of_two(1)
    warps: int = power_of_two(4)


def print_sort(plan: SortPlan, schedule: SortSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`."""
    n, inner, rows, count = plan.length, plan.inner, plan.rows, plan.count
    wide = ".to(tl.int64)" if plan.meta.numel >= 1 << 31 else ""
    step = "" if inner == 1 else f" * {inner}"
    first = f"p * {n}" if inner == 1 else f"p // {inner} * {n * inner} + p % {inner}"
    stored = f"p * {count}" if inner == 1 else f"p // {inner} * {count * inner} + p % {inner}"
    part = plan.kept < plan.width
    lines = [
        f"p = (tl.program_id(0) * PB + tl.arange(0, PB)[:, None]){wide}",
        "r = tl.arange(0, RB)[None, :]",
        f"first = {first}",
        f"x = tl.load(x_ptr + first + r{step}, mask=(p < {rows}) & (r < {n}), other=0)",
        *_order(plan),
        "packed = (order.to(tl.int64) << 32) | r.to(tl.int64)  # the place, so that equal elements keep their order",
        f"packed = tl.where(r < {n}, packed, {(1 << 63) - 1})",
        *([f"packed = ~tl.topk(~packed, {plan.kept})"] if part else ["packed = tl.sort(packed)"]),
        f"place = packed & {PLACES}",
        f"r = tl.arange(0, {plan.kept})[None, :]" if part else "",
        f"kept = (p < {rows}) & (r < {count})",
        f"at = {stored} + r{step}",
        f"value = tl.load(x_ptr + first + place{step}, mask=kept, other=0)",
        "tl.store(y_ptr + at, value, mask=kept)",
        "tl.store(i_ptr + at, place, mask=kept)",
    ]
    if 0 not in plan.outputs:
        lines = [line for line in lines if not line.startswith(("value", "tl.store(y_"))]
    if 1 not in plan.outputs:
        lines = [line for line in lines if not line.startswith("tl.store(i_")]
    names = {0: ("y", plan.meta.dtype), 1: ("i", "int64")}
    used = [names[port][0] for port in sorted(set(plan.outputs))]
    head = ", ".join(["x_ptr", *(f"{name}_ptr" for name in used), "PB: tl.constexpr", "RB: tl.constexpr"])
    shape = tuple(count if d == plan.dim else size for d, size in enumerate(plan.meta.shape))
    grid = -(-rows // schedule.block_p)
    options = f"PB={schedule.block_p}, RB={plan.width}, num_warps={schedule.warps}"
    entry = [
        *(f"{n} = torch.empty({shape}, dtype=torch.{t}, device=x.device)" for n, t in names.values() if n in used),
        f"{prefix}_sort[({grid},)](x, {', '.join(used)}, {options})",
        f"return ({', '.join(names[port][0] for port in plan.outputs)},)",
    ]
    text = f"@triton.jit\ndef {prefix}_sort({head}):\n" + "".join(f"    {line}\n" for line in lines if line)
    text += f"\n\ndef {prefix}_run(x):\n" + "".join(f"    {line}\n" for line in entry)
    return Implementation("triton", text, f"{prefix}_run", schedule=schedule)


def _order(plan: SortPlan) -> list[str]:
    """Lines that leave in `order` an int32 that is smaller the earlier an element comes."""
    if is_float(plan.meta.dtype):
        lines = [
            "x = x.to(tl.float32)",
            "bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))  # zeros are equal",
            f"order = tl.where(x != x, {MOST_32}, bits ^ ((bits >> 31) & {MOST_32}))",
        ]
    else:
        lines = ["order = x.to(tl.int32)"]
    return [*lines, *(["order = ~order"] if plan.descending else [])]


__all__ = ["SortSchedule", "print_sort"]
