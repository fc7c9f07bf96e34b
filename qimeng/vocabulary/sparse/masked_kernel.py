"""The kernel of an attention whose blocks are listed, and the one that lists them.

A list has all steps of keys of a tile of queries: first those that every query sees whole, then those that a mask cuts
across, then those that it hides. The kernel walks the first without a mask and the second under it. Where values are
not finite it walks the third as well, since a weight of 0 times an infinity is NaN (`guard` of the attention family).

Deals in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from qimeng.coder.template.families.attention.guard import looked_at, seen_batch
from qimeng.coder.template.families.attention.host import GUARD_WARPS, kernel_text, print_attention, sizes_of
from qimeng.coder.template.families.attention.kernel import Kernel
from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.schedule import AttentionSchedule
from qimeng.coder.template.families.attention.tiles import Tiles
from qimeng.family import family_field
from qimeng.program.program import Implementation
from qimeng.vocabulary.sparse.masked import ListedBounds, held
from qimeng.vocabulary.sparse.preparing import made_of

PLACES, WHOLE, SOME = "places", "whole", "some"
"""Variables of the entry function: the steps of each tile of queries in the order of a list, how many of them are seen
whole, and how many are seen at all."""


@dataclass(frozen=True)
class MaskedSchedule(AttentionSchedule):
    """As of an attention; `block_m` and `block_n` are the sides of a block of the list as well."""

    family: str = family_field("masked")


class Listed(Kernel):
    """Walks the blocks of its list."""

    given = (PLACES, WHOLE, SOME)

    def keys(self) -> list[str]:
        """Lines that walk the blocks that are seen whole, then those that are seen in part."""
        steps, splits, place = self.t.steps, self.t.schedule.splits, self.base.value(self.seen_index)
        lines, self.base.lines = self.base.lines, []
        lines += [
            f"own = ({place}) * {self.t.row_blocks} + block",
            f"whole = tl.load({WHOLE}_ptr + own)",
            f"some = tl.load({SOME}_ptr + own)",
            *self.wild(),
            f"some = tl.where(wild, {steps}, some)",
        ]
        low, until, high = "0", "whole", "some"
        if splits > 1:
            low, until, high = "low", "until", "high"
            lines += [
                f"each = (some + {splits - 1}) // {splits}",
                "low = part * each",
                "high = tl.minimum(low + each, some)",
                "until = tl.maximum(low, tl.minimum(whole, high))",
            ]
        return [*lines, *self._listed(low, until, False, "u"), *self._listed(until, high, True, "v")]

    def _listed(self, low: str, high: str, masked: bool, letter: str) -> list[str]:
        start = f"    start = tl.load({PLACES}_ptr + own * {self.t.steps} + i) * BN"
        return self.loop([f"for i in range({low}, {high}):", start], masked, letter)


def print_masked(plan: AttentionPlan, schedule: MaskedSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`."""
    made = print_attention(plan, schedule, prefix, Listed)
    tiles = Tiles(plan, schedule, prefix)
    count = plan.extent(seen_batch(plan)) * tiles.row_blocks * tiles.steps
    options = f"num_warps={GUARD_WARPS}"
    kernel, launch = kernel_text(plan, f"{prefix}_list", list_body(tiles), sizes_of(tiles), count, options, ("kind",))
    names = {plan.loads.names[n] for n in held(plan.region, plan.loads)} & set(re.findall(r"\w+", launch))
    given, views = made_of(names, plan.loads.prelude)
    by = f"x{given[0]}"
    lines = [
        f'"""Steps of {schedule.block_n} keys of each tile of {schedule.block_m} queries: whole, in part, hidden."""',
        *views,
        f"kind = torch.empty(({count},), dtype=torch.int32, device={by}.device)",
        launch,
        f"kind = kind.view(-1, {tiles.steps})",
        "order = torch.sort(kind, dim=1, descending=True, stable=True).indices.to(torch.int32)",
        "return order, (kind == 2).sum(1, dtype=torch.int32), (kind > 0).sum(1, dtype=torch.int32)",
    ]
    text = f"def {prefix}_prepare({', '.join(f'x{i}' for i in given)}):\n" + "".join(f"    {line}\n" for line in lines)
    source = "\n\n".join([made.source, kernel, text])
    return replace(made, source=source, prepare=f"{prefix}_prepare", prepare_inputs=given)


def list_body(tiles: Tiles) -> list[str]:
    """The lines of the kernel that writes of one block: 2 where every query sees every key, 1 where any does, else 0.

    Queries beyond the last one see whatever the others do; keys beyond the last one are seen by none.
    """
    bounds = tiles.plan.bounds
    assert isinstance(bounds, ListedBounds)
    lines, texts, (rows, keys) = looked_at(tiles, bounds.listed, seen_batch(tiles.plan))
    inside, whole = " & ".join(filter(None, [*texts, rows, keys])), " & ".join(filter(None, [*texts, keys]))
    hidden = f"tl.where({whole}, 0, 1)" if not rows else f"tl.where(({whole}) | ({rows} == 0), 0, 1)"
    return [
        *lines,
        f"seen = tl.where({inside}, 1, 0) + tl.zeros([BM, BN], tl.int32)",
        f"lost = {hidden} + tl.zeros([BM, BN], tl.int32)",
        "any = tl.max(tl.max(seen, axis=1), axis=0)",
        "tl.store(kind_ptr + t, 1 + any - tl.max(tl.max(lost, axis=1), axis=0))",
    ]


__all__ = ["Listed", "MaskedSchedule", "list_body", "print_masked"]
