"""A reduction by segment in which programs own rows and add them to sums in memory.

Deals in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.triton.emitter import Emitter, without_unused
from qimeng.vocabulary.irregular.printed import Printed


class Atomic(Printed):
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


__all__ = ["Atomic"]
