"""A reduction by segment in which programs own segments and walk their rows.

Of a long segment, pieces may be walked by programs of their own first; the segment's program then takes their results
in order, so that they are the same in every call. Deals in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.triton.emitter import Emitter, without_unused
from qimeng.vocabulary.irregular.printed import NEUTRAL, STEP, Printed


class Walked(Printed):
    """A program owns segments and walks their rows."""

    def pieces(self) -> tuple[list[str], list[str]]:
        """One kernel, or one before it for the pieces of long segments."""
        plan, s, count = self.plan, self.schedule, self.segments.count
        em, wide, long = self.emitter(), ".to(tl.int64)" if self.plan.wide else "", s.longest
        step, pieces = STEP[self.segments.kind], self.order.pieces(long)
        body = [
            f"block = tl.program_id(0) // {self.blocks}",
            *self.columns(f"tl.program_id(0) % {self.blocks}"),
            "lane = tl.arange(0, SB * EB)[:, None]",
            "owner = block * SB + lane // EB",
            *self.order.bounds("owner", f"owner < {count}", "low", "high"),
            *([f"high = tl.minimum(high, low + {long})"] if pieces else []),
            *self._walk(em, "EB"),
            *self._collapsed(s.block_s, s.block_e, "[SB, RB]"),
            f"s = block * SB + tl.arange(0, SB)[:, None]{wide}",
            f"s_mask = s < {count}",
            *self.order.bounds("s", "s_mask", "begin", "end"),
            "count = end - begin",
        ]
        if pieces:
            body += [
                "piece = tl.load(pieces_ptr + s, mask=s_mask, other=0)",
                "more = tl.load(pieces_ptr + s + 1, mask=s_mask, other=0) - piece",
                "for t in range(0, tl.max(more)):",
                f"    part_mask = {self.mask('(t < more)', f'(piece + t < {pieces})')}",
                f"    place = (piece + t){wide} * {plan.columns} + r",
                f"    part = tl.load(part_ptr + place, mask=part_mask, other={NEUTRAL[self.segments.kind]})",
                f"    total = {step.format('total', 'part')}",
            ]
        body += self.finish(em, "total", "count", self.mask("s_mask"))
        found, orders = ["pieces", "part"] if pieces else [], self.order.arguments
        extra = [*self.order.parameters, *(f"{n}_ptr" for n in found), *(["base_ptr"] if plan.base else []), "y_ptr"]
        used = [a for _, a in self.sources(without_unused(body))]
        arguments = [*used, *orders, *found, *([plan.base] if plan.base else []), "y"]
        kernels = [self.kernel("reduce", extra, body)]
        launches = [self.launch("reduce", str(-(-count // s.block_s) * self.blocks), arguments)]
        if not pieces:
            return kernels, launches
        first, launch = self._pieces(pieces)
        return [first, *kernels], [*launch, *launches]

    def _walk(self, em: Emitter, step: str) -> list[str]:
        """Lines that walk the rows from `low` to `high`, `step` of each segment at a time."""
        kind = self.segments.kind
        value = em.value(self.plan.nest.outputs[0][0])
        inside = [
            f"i = low + t + lane % {step}",
            "p_mask = i < high",
            f"p = {self.order.row('i', 'p_mask')}{'.to(tl.int64)' if self.plan.wide else ''}",
            "p_zero = p * 0",
            *self.row_lines,
            *em.lines,
            f"taken = tl.where(p_mask, {value}, {NEUTRAL[kind]})",
            f"acc = {STEP[kind].format('acc', 'taken')}",
        ]
        em.lines = []
        return [
            "longest = tl.max(high - low)",
            f"acc = tl.full([SB * EB, RB], {NEUTRAL[kind]}, tl.float32)",
            f"for t in range(0, longest, {step}):",
            *(f"    {line}" for line in inside),
        ]

    def _collapsed(self, segments: int, each: int, shape: str) -> list[str]:
        """Lines that make one row of each segment's lanes."""
        kind = self.segments.kind
        if each == 1:
            return ["total = acc"]
        lanes, after = ("acc", "0") if segments == 1 else ("tl.reshape(acc, [SB, EB, RB])", "1")
        if kind in ("sum", "mean"):
            text = f"tl.sum({lanes}, {after})"
        else:
            text = f"tl.reduce({lanes}, {after}, {self.prefix}_{kind})"
        return [f"total = tl.reshape({text}, {shape})"]

    def _pieces(self, count: int) -> tuple[str, list[str]]:
        """The kernel that reduces what of a segment is beyond its first rows, and its launch."""
        plan, long, segments = self.plan, self.schedule.longest, self.segments.count
        em, lanes = self.emitter(), self.schedule.lanes
        body = [
            f"block = tl.program_id(0) // {self.blocks}",
            *self.columns(f"tl.program_id(0) % {self.blocks}"),
            "owner = tl.load(owner_ptr + block)",
            f"if owner < {segments}:",
        ]
        inside = [
            "lane = tl.arange(0, SB * EB)[:, None]",
            "number = block - tl.load(pieces_ptr + owner) + 1",
            *self.order.bounds("owner", f"owner < {segments}", "begin", "end"),
            f"low = begin + number * {long}",
            f"high = tl.minimum(end, low + {long})",
            "high = high + lane * 0",
            *self._walk(em, "(SB * EB)"),
            *self._collapsed(1, lanes, "[1, RB]"),
            f"place = block{'.to(tl.int64)' if plan.wide else ''} * {plan.columns} + r",
            f"tl.store(part_ptr + place, total, mask={self.mask() or None})",
        ]
        body += [f"    {line}" for line in inside]
        used = [a for _, a in self.sources(without_unused(body))]
        names = ["owner", "pieces", "part"]
        kernel = self.kernel("pieces", [*self.order.parameters, *(f"{n}_ptr" for n in names)], body)
        device = f"{plan.parameters[0]}.device"
        made = f"part = torch.empty({count}, {plan.columns}, dtype=torch.float32, device={device})"
        arguments = [*used, *self.order.arguments, *names]
        return kernel, [made, self.launch("pieces", str(count * self.blocks), arguments)]


__all__ = ["Walked"]
