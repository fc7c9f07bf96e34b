"""The order in which rows are walked: which rows belong to each segment.

Found once where the index is made of buffers alone, else at every call. Deals in lines of kernels and of the code
around them. Knows nothing about what rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.vocabulary.irregular.plan import SegmentPlan
from qimeng.vocabulary.irregular.schedules import SegmentSchedule

BLOCK = 256
"""Rows that a program counts."""


@dataclass(frozen=True)
class Places:
    """Which segment each row belongs to.

    Attributes:
        name: variable of the index in the entry function.
        rows: number of rows.
        count: number of segments.
        stride: of the index, in elements.
        wraps: whether a negative index counts from the end.
        clamps: whether an index out of range counts as the nearest segment; elsewhere its row is in none.
    """

    name: str
    rows: int
    count: int
    stride: int = 1
    wraps: bool = False
    clamps: bool = False


class Order:
    """Where the rows of each segment are found.

    Attributes:
        index: the kernels' parameter that holds the segment of each row.
        made: variables of the entry function: the rows by segment, and where each segment begins among them.
        settled: whether those are found once.
    """

    index = "index_ptr"

    def __init__(self, places: Places, form: str, prefix: str, *, settled: bool = False):
        self.places, self.form, self.prefix, self.settled = places, form, prefix, settled
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
        places = self.places
        lines = [f"{name} = tl.load({self.index} + {row}{_step(places.stride)}, mask={mask}, other=-1)"]
        if places.wraps:
            lines.append(f"{name} = tl.where(({name} < 0) & {mask}, {name} + {places.count}, {name})")
        if places.clamps:
            lines.append(f"{name} = tl.minimum(tl.maximum({name}, 0), {places.count - 1})")
        return lines

    # -- around them

    def lines(self) -> list[str]:
        """Lines of the entry function, at every call."""
        if self.form == "sorted":
            return self._sorted()
        if self.form == "atomic":
            return []
        rows, count, by, p = self.places.rows, self.places.count, self.places.name, self.prefix
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
        if self.form != "bucket":
            return ()
        count, rows = self.places.count, self.places.rows
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
        count, by = self.places.count, self.places.name
        wrap = [f"own = torch.where(own < 0, own + {count}, own)"] if self.places.wraps else []
        return [
            f"own = {by}",
            *wrap,
            f"own = torch.where((own >= 0) & (own < {count}), own, {count}).to(torch.int32)",
            "found, order = torch.sort(own, stable=True)",
            "order = order.to(torch.int32)",
            f"ends = torch.arange({count + 1}, dtype=torch.int32, device=found.device)",
            "first = torch.searchsorted(found, ends, out_int32=True)",
        ]

    def pieces(self, longest: int) -> int:
        """How many pieces of at most `longest` rows there can be beyond the first one of each segment; 0 for none."""
        return self.places.rows // longest if longest else 0

    def piece_lines(self, longest: int) -> list[str]:
        """Lines that find the number of each segment's first piece, and the segment of each piece."""
        if not (most := self.pieces(longest)):
            return []
        return [
            f"more = (first[1:] - first[:-1] - 1).clamp_min(0) // {longest}",
            "pieces = torch.nn.functional.pad(torch.cumsum(more, 0, dtype=torch.int32), (1, 0))",
            f"numbers = torch.arange({most}, dtype=torch.int32, device=first.device)",
            "owner = torch.searchsorted(pieces[1:], numbers, right=True, out_int32=True)",
        ]

    def prepare(self, given: Sequence[str], before: Sequence[str], after: Sequence[str] = ()) -> str:
        """The function that finds the order once.

        It refuses an index out of range, as PyTorch does at every call; tensors without data have none.

        Args:
            given: its parameters.
            before: lines that make the index of them.
            after: lines that find the pieces of long segments (`piece_lines`).
        """
        count, by = self.places.count, self.places.name
        low = -count if self.places.wraps else 0
        lines = [
            f'"""Rows by segment; {count} segments."""',
            *before,
            f"if not {by}.is_meta and bool((({by} < {low}) | ({by} >= {count})).any()):",
            f'    raise ValueError("an index of a reduction by segment is not in {low} to {count - 1}")',
            *self._sorted(),
            *after,
            f"return ({', '.join([*self.made, *(('pieces', 'owner') if after else ())])})",
        ]
        return f"def {self.prefix}_prepare({', '.join(given)}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


class Neighbours(Order):
    """Rows of a segment lie side by side: there is no order to find. Offsets out of range are cut off."""

    def __init__(self, plan: SegmentPlan, prefix: str, *, whole: bool = False):
        """Where `whole` says so, offsets are copied as the kernels want them: with the last one, none out of range."""
        self.segments, self.whole = plan.segments, whole and not plan.segments.even
        found = plan.segments
        stride = 1 if found.offsets is None else plan.region.graph.meta(found.offsets).stride[0]
        self.given = found.count + 1 if found.offsets is None else plan.region.graph.meta(found.offsets).shape[0]
        super().__init__(Places(plan.place, found.size, found.count, stride), "sorted", prefix)
        made = "" if found.even else "first" if found.lengths is not None or self.whole else plan.place
        self.parameters, self.arguments = ([], []) if not made else (["first_ptr"], [made])

    def bounds(self, segment: str, mask: str, low: str, high: str) -> list[str]:
        """By offsets, by sums of lengths, or by the number of rows of each."""
        found, size, step = self.segments, self.places.rows, _step(self.places.stride)
        if found.even:
            text = f"{{0}} = tl.where({mask}, ({segment}{{1}}) * {found.even}, 0)"
            return [text.format(low, ""), text.format(high, " + 1")]
        if self.whole:
            return super().bounds(segment, mask, low, high)
        lines = []
        for name, at in ((low, segment), (high, f"({segment} + 1)")):
            inside = mask if self.given > found.count or name == low else f"({mask}) & ({at} < {self.given})"
            other = 0 if inside == mask else size
            text = f"tl.load(first_ptr + {at}{step}, mask={inside}, other={other})"
            lines.append(f"{name} = tl.minimum(tl.maximum({text}, 0), {size}).to(tl.int32)")
        if self.given == found.count:
            lines.append(f"{high} = tl.where({mask}, {high}, 0)")
        return lines

    def row(self, number: str, mask: str) -> str:
        """The row itself."""
        return number

    def lines(self) -> list[str]:
        """Where segments begin, from their lengths."""
        name, size = self.places.name, self.places.rows
        if self.segments.lengths is not None:
            lines = [f"first = torch.nn.functional.pad(torch.cumsum({name}, 0), (1, 0))"]
        elif not self.whole:
            return []
        elif self.given == self.segments.count:
            lines = [f"first = torch.nn.functional.pad({name}, (0, 1), value={size})"]
        else:
            lines = [f"first = {name}"]
        return [*lines, *([f"first = first.clamp(0, {size}).to(torch.int32)"] if self.whole else [])]

    def pieces(self, longest: int) -> int:
        """None where every segment has the same number of rows, no more than that."""
        return 0 if self.segments.even else super().pieces(longest)

    def kernels(self) -> Sequence[str]:
        """None."""
        return ()


def _step(stride: int) -> str:
    """A stride as a factor."""
    return "" if stride == 1 else f" * {stride}"


def order_of(plan: SegmentPlan, schedule: SegmentSchedule, prefix: str) -> Order:
    """How rows are found in a region."""
    found, form = plan.segments, schedule.form
    if found.by is None:
        return Neighbours(plan, prefix, whole=bool(schedule.longest) and found.size >= schedule.longest)
    places = Places(plan.place, found.size, found.count, plan.region.graph.meta(found.by).stride[0], found.wraps)
    return Order(places, form, prefix, settled=plan.settled and form == "sorted")


__all__ = ["BLOCK", "Neighbours", "Order", "Places", "order_of"]
