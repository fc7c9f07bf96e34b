"""The order in which rows are walked: which rows belong to each segment.

Found once where the index is made of buffers alone, else at every call. Deals in lines of kernels and of the code
around them. Knows nothing about what rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.vocabulary.irregular.plan import SegmentPlan
from qimeng.vocabulary.irregular.schedules import SegmentSchedule

BLOCK = 256
"""Rows that a program counts."""


class Order:
    """Where the rows of each segment are found.

    Attributes:
        index: the kernels' parameter that holds the segment of each row.
        made: variables of the entry function: the rows by segment, and where each segment begins among them.
        settled: whether those are found once.
    """

    index = "index_ptr"

    def __init__(self, plan: SegmentPlan, schedule: SegmentSchedule, prefix: str):
        self.plan, self.schedule, self.prefix = plan, schedule, prefix
        self.settled = plan.settled and schedule.form == "sorted"
        self.made = ("order", "first")
        self.parameters, self.arguments = ["order_ptr", "first_ptr"], ["order", "first"]

    # -- in kernels that walk segments

    def bounds(self, segment: str, mask: str, low: str, high: str) -> list[str]:
        """Lines that find the numbers of the first row of `segment` and of the first after it."""
        load = "tl.load(first_ptr + {0}, mask={1}, other=0)"
        return [f"{low} = {load.format(segment, mask)}", f"{high} = {load.format(f'{segment} + 1', mask)}"]

    def row(self, number: str, mask: str) -> str:
        """The row with that number in the order."""
        return f"tl.load(order_ptr + {number}, mask={mask}, other=0)"

    # -- in kernels that walk rows

    def segment(self, row: str, mask: str, name: str) -> list[str]:
        """Lines that load the segment of `row`; negative ones count from the end where PyTorch lets them."""
        stride = self.plan.region.graph.meta(self.plan.segments.by).stride[0]
        step = "" if stride == 1 else f" * {stride}"
        lines = [f"{name} = tl.load({self.index} + {row}{step}, mask={mask}, other=-1)"]
        if self.plan.segments.wraps:
            lines.append(f"{name} = tl.where(({name} < 0) & {mask}, {name} + {self.plan.segments.count}, {name})")
        return lines

    # -- around them

    def lines(self) -> list[str]:
        """Lines of the entry function, at every call."""
        if self.schedule.form == "sorted":
            return self._sorted()
        if self.schedule.form == "atomic":
            return []
        rows, count, by, p = self.plan.rows, self.plan.segments.count, self.plan.by, self.prefix
        grid = f"[({-(-rows // BLOCK)},)]"
        return [
            f"rank = torch.empty({rows}, dtype=torch.int32, device={by}.device)",
            "order = torch.empty_like(rank)",
            f"first = torch.zeros({count + 1}, dtype=torch.int32, device={by}.device)",
            f"{p}_count{grid}({by}, first, rank, B={BLOCK})",
            "first = torch.cumsum(first, 0, dtype=torch.int32)",
            f"{p}_put{grid}({by}, first, rank, order, B={BLOCK})",
        ]

    def kernels(self) -> Sequence[str]:
        """The kernels that `lines` launch."""
        if self.schedule.form != "bucket":
            return ()
        count, rows = self.plan.segments.count, self.plan.rows
        head = [
            "e = tl.program_id(0) * B + tl.arange(0, B)",
            f"inside = e < {rows}",
            *self.segment("e", "inside", "s"),
            f"kept = inside & (s >= 0) & (s < {count})",
        ]
        counted = [
            *head,
            'rank = tl.atomic_add(first_ptr + s + 1, 1, mask=kept, sem="relaxed")',
            "tl.store(rank_ptr + e, rank, mask=kept)",
        ]
        put = [
            *head,
            "at = tl.load(first_ptr + s, mask=kept, other=0) + tl.load(rank_ptr + e, mask=kept, other=0)",
            "tl.store(order_ptr + at, e, mask=kept)",
        ]
        return [
            self._kernel("count", f"{self.index}, first_ptr, rank_ptr", counted),
            self._kernel("put", f"{self.index}, first_ptr, rank_ptr, order_ptr", put),
        ]

    def _kernel(self, name: str, parameters: str, body: Sequence[str]) -> str:
        head = f"@triton.jit\ndef {self.prefix}_{name}({parameters}, B: tl.constexpr):\n"
        return head + "\n".join(f"    {line}" for line in body) + "\n"

    def _sorted(self) -> list[str]:
        """Rows by their segment, of equal ones the first first; those outside come last, and no segment has them."""
        count, by = self.plan.segments.count, self.plan.by
        wrap = [f"own = torch.where(own < 0, own + {count}, own)"] if self.plan.segments.wraps else []
        return [
            f"own = {by}",
            *wrap,
            f"own = torch.where((own >= 0) & (own < {count}), own, {count}).to(torch.int32)",
            "found, order = torch.sort(own, stable=True)",
            "order = order.to(torch.int32)",
            f"ends = torch.arange({count + 1}, dtype=torch.int32, device=found.device)",
            "first = torch.searchsorted(found, ends, out_int32=True)",
        ]

    def prepare(self) -> str:
        """The function that finds the order once.

        It refuses an index out of range, as PyTorch does at every call; tensors without data have none.
        """
        given = ", ".join(self.plan.parameters[i] for i in self.plan.order_inputs)
        count, by, least = self.plan.segments.count, self.plan.by, -self.plan.segments.count
        low = least if self.plan.segments.wraps else 0
        lines = [
            f'"""Rows by segment; {count} segments."""',
            *self.plan.order,
            f"if not {by}.is_meta and bool((({by} < {low}) | ({by} >= {count})).any()):",
            f'    raise ValueError("an index of a reduction by segment is not in {low} to {count - 1}")',
            *self._sorted(),
            "return (order, first)",
        ]
        return f"def {self.prefix}_prepare({given}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


__all__ = ["BLOCK", "Order"]
