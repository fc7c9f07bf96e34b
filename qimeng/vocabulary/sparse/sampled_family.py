"""The family of products of which a mask in a buffer says what is wanted: tiles without anything are left out.

It prints the gemm family's kernels. Deals in what the library asks of a family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from qimeng.coder.template.families.gemm.family import Gemm
from qimeng.coder.template.families.gemm.moves import moves
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.device import Device
from qimeng.family import Cost, Family, Move, Needs
from qimeng.graph.block_shares import seen_share
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.sparse.sampled import SampledPlan, plan_sampled
from qimeng.vocabulary.sparse.sampled_kernel import SampledSchedule, print_sampled

SampledMove = Move[SampledPlan, SampledSchedule]


class Sampled(Family[SampledPlan, SampledSchedule]):
    """A product whose result a buffer masks: a program whose tile nobody needs stores it without a loop.

    What it starts from, needs and costs is as of the gemm family, which computes every tile; lowering measures both.
    """

    name = "sampled"
    about = "products under a mask that a buffer holds"
    schedule = SampledSchedule
    rivals = ("gemm",)

    def __init__(self) -> None:
        self._gemm = Gemm()
        self.moves: Mapping[str, SampledMove] = {name: _Plain(move) for name, move in moves().items()}

    def plan(self, region: Region) -> SampledPlan:
        """The product and its mask."""
        return plan_sampled(region)

    def default(self, plan: SampledPlan, device: Device, mode: str) -> SampledSchedule:
        """As of a product."""
        return _mine(self._gemm.default(plan.gemm, device, mode))

    def guesses(
        self, plan: SampledPlan, schedule: SampledSchedule, device: Device, mode: str
    ) -> Sequence[SampledSchedule]:
        """As of a product."""
        found = [_mine(s) for s in self._gemm.guesses(plan.gemm, schedule, device, mode)]
        return list(dict.fromkeys(s for s in found if s != schedule))

    def reduced(self, plan: SampledPlan, schedule: SampledSchedule) -> SampledSchedule:
        """As of a product."""
        return _mine(self._gemm.reduced(plan.gemm, schedule))

    def needs(self, plan: SampledPlan, schedule: SampledSchedule) -> Needs:
        """As of a product."""
        return self._gemm.needs(plan.gemm, schedule)

    def print(self, plan: SampledPlan, schedule: SampledSchedule, prefix: str) -> Implementation:
        """The product's kernels, the one that finds empty tiles once, and those that look for infinities."""
        return print_sampled(plan, schedule, prefix)

    def cost(self, plan: SampledPlan, schedule: SampledSchedule) -> Cost:
        """As of a product of all tiles, times the share of those that masks leave, where it is known."""
        cost = self._gemm.cost(plan.gemm, schedule)
        share = seen_share(plan.gemm.region, (schedule.block_m, schedule.block_n))
        return replace(cost, padded=cost.padded * share)

    def intents(
        self, region: Region, schedule: SampledSchedule | None, device: Device, mode: str
    ) -> Sequence[tuple[str, str]]:
        """As of a product."""
        return self._gemm.intents(region, schedule, device, mode)


class _Plain(Move[SampledPlan, SampledSchedule]):
    """A tuning of the gemm family, without the two loops of a persistent program run as one: some tiles have none."""

    def __init__(self, move: Move[GemmPlan, GemmSchedule]):
        self._move = move

    def check(self, plan: SampledPlan, schedule: SampledSchedule, param: str, device: Device, mode: str) -> None:
        """As of a product."""
        self._move.check(plan.gemm, schedule, param, device, mode)

    def probe(
        self, plan: SampledPlan, schedule: SampledSchedule, param: str, device: Device
    ) -> Sequence[SampledSchedule]:
        """As of a product."""
        return [_mine(s) for s in self._move.probe(plan.gemm, schedule, param, device)]

    def schedules(
        self, plan: SampledPlan, schedule: SampledSchedule, param: str, device: Device
    ) -> Sequence[SampledSchedule]:
        """As of a product."""
        return [_mine(s) for s in self._move.schedules(plan.gemm, schedule, param, device)]


def _mine(schedule: GemmSchedule) -> SampledSchedule:
    """`schedule` as one of this family."""
    values = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.init}
    return SampledSchedule(**values | {"flat": False})


__all__ = ["Sampled"]
