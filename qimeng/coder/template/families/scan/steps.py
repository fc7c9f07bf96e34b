"""Scans inside a pass over the columns: their lines in a step, and what is carried from step to step.

Deals in lines of kernel text. Knows nothing about forms.
"""

from __future__ import annotations

from qimeng.coder.template.families.scan.plan import ScanPlan
from qimeng.coder.template.families.scan.running import Running
from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.row_passes import hoist, loop
from qimeng.coder.template.triton.row_pieces import Pieces


class Steps:
    """The scans of a plan, printed into the steps of a pass.

    Attributes:
        plan: the plan.
        pieces: rows, columns, kernels and launches.
        reverse: whether the steps go from the end to the beginning.
        running: the variables of each scan, those that others are computed from first.
    """

    def __init__(self, plan: ScanPlan, schedule: ScanSchedule, prefix: str) -> None:
        self.plan, self.pieces = plan, Pieces(plan, schedule, prefix, backwards=schedule.backwards)
        self.reverse = True in plan.directions and not schedule.backwards
        single, backwards = schedule.block_p == 1, schedule.backwards
        self.running = [
            Running(e, f"c{i}", _function(prefix, e.param.kind, e.args[0].dtype), single, backwards)
            for i, e in enumerate(plan.scans)
        ]
        self.pieces.helpers += dict.fromkeys(r.source() for r in self.running)

    def step(self, low: str, high: str) -> str:
        """The number of step `t` of a loop from `low` to `high`, in the order of the scans."""
        return f"{low} + {high} - 1 - t" if self.reverse else "t"

    def scan(self, em: Emitter, r: Running, carried: bool) -> list[str]:
        """Lines of a step that make the results of `r` known to `em`."""
        lines = [*self.operands(em, r), *r.run(), *([*r.resume(), *r.carry()] if carried else [])]
        results = dict(zip(r.scan.param.parts, r.variables("s"), strict=True))
        value, made = r.value()
        em.define(r.scan, value)
        for e in self.plan.nest.exprs:
            if e.op == "part" and e.args[0] is r.scan:
                em.define(e, results[e.param])
        return lines + made

    def operands(self, em: Emitter, r: Running) -> list[str]:
        """Lines of a step that make the operands' tiles."""
        values = [em.value(a) for a in r.scan.operands()]
        return self.pieces.flush(em) + r.take(values, em.masks.get("r", ""))

    def output_pass(self, em: Emitter, low: str, high: str) -> list[str]:
        """Scan the steps from `low` to `high`, with what is carried so far, and store what changes along them."""
        p = self.pieces
        for i in p.full_outputs:
            hoist(p, em, p.nest.outputs[i][0])
        lines = p.flush(em)
        columns, _ = p.columns(self.step(low, high))
        body = [line for r in self.running for line in self.scan(em, r, carried=True)]
        for i in p.full_outputs:
            em.store(i)
        return lines + loop(p, columns, body + p.flush(em), low, high)


def _function(prefix: str, kind: str, dtype: str) -> str:
    """Name of the operator of a kind, which is another one for integers."""
    return f"{prefix}_{kind}" if is_float(dtype) else f"{prefix}_i{kind}"


__all__ = ["Steps"]
