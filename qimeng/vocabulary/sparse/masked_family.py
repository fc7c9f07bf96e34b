"""The family of attentions under a mask of buffers, whose hidden blocks are left out by a list that is made once.

It prints the attention family's kernels with a loop of its own. Deals in what the library asks of a family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from qimeng.coder.template.families.attention.family import Attention
from qimeng.coder.template.families.attention.moves import moves
from qimeng.coder.template.families.attention.plan import TALL, AttentionPlan
from qimeng.coder.template.families.attention.schedule import AttentionSchedule
from qimeng.coder.template.families.attention.sweeps import Blocks, fitted, shared, with_blocks
from qimeng.device import Device
from qimeng.family import Cost, Family, Move, Needs
from qimeng.graph.block_shares import seen_share
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.sparse.masked import plan_masked
from qimeng.vocabulary.sparse.masked_kernel import MaskedSchedule, print_masked

HALVES: Blocks = (64, 64, 4, 3)
"""Blocks of half operands at first: small ones leave out more. With two loops and a mask to read, 128 queries by 64
keys take 8 warps: 4 spill 30 registers (Triton 3.6, sm_90, depth 32)."""

MaskedMove = Move[AttentionPlan, MaskedSchedule]


class Masked(Family[AttentionPlan, MaskedSchedule]):
    """An attention under a mask of buffers: a program walks the blocks of keys that a list has for its queries.

    What it starts from, needs and costs is as of the attention family, which reads the mask at every call and walks
    from the first block to the last; lowering measures both.
    """

    name = "masked"
    about = "attention under a mask that a buffer holds"
    schedule = MaskedSchedule
    rivals = ("attention",)
    spares = True

    def __init__(self) -> None:
        self._attention = Attention()
        self.moves: Mapping[str, MaskedMove] = {name: _OneLoop(move) for name, move in moves().items()}

    def plan(self, region: Region) -> AttentionPlan:
        """The attention, its bounds by lists."""
        return plan_masked(region)

    def default(self, plan: AttentionPlan, device: Device, mode: str) -> MaskedSchedule:
        """As of an attention, its blocks of half operands no larger than `HALVES`."""
        found = self._attention.default(plan, device, mode)
        made = MaskedSchedule(**{f.name: getattr(found, f.name) for f in fields(found) if f.init})
        return _mine(shared(plan, fitted(plan, with_blocks(plan, made, HALVES), device), device)) if plan.half else made

    def guesses(
        self, plan: AttentionPlan, schedule: MaskedSchedule, device: Device, mode: str
    ) -> Sequence[MaskedSchedule]:
        """As of an attention, with more warps for the tall tiles of half operands."""
        found = [_mine(s) for s in self._attention.guesses(plan, schedule, device, mode)]
        made = [s.but(warps=8) if plan.half and s.block_m >= TALL else s for s in found]
        return list(dict.fromkeys(s for s in made if s != schedule))

    def reduced(self, plan: AttentionPlan, schedule: MaskedSchedule) -> MaskedSchedule:
        """As of an attention."""
        return _mine(self._attention.reduced(plan, schedule))

    def needs(self, plan: AttentionPlan, schedule: MaskedSchedule) -> Needs:
        """As of an attention."""
        return self._attention.needs(plan, schedule)

    def print(self, plan: AttentionPlan, schedule: MaskedSchedule, prefix: str) -> Implementation:
        """The kernel, one before it that looks for infinities, and the one that lists blocks once."""
        return print_masked(plan, schedule, prefix)

    def cost(self, plan: AttentionPlan, schedule: MaskedSchedule) -> Cost:
        """As of an attention that walks all keys, times the share of the blocks that masks leave, where it is known."""
        cost = self._attention.cost(plan, schedule)
        share = seen_share(plan.region, (schedule.block_m, schedule.block_n))
        return replace(cost, padded=cost.padded * share)

    def intents(
        self, region: Region, schedule: MaskedSchedule | None, device: Device, mode: str
    ) -> Sequence[tuple[str, str]]:
        """As of an attention; smaller blocks before larger ones."""
        found = self._attention.intents(region, schedule, device, mode)
        return (("tiling", "smaller"), *(i for i in found if i != ("tiling", "smaller")))


class _OneLoop(Move[AttentionPlan, MaskedSchedule]):
    """A tuning of the attention family, without warps that copy by themselves: the compiler shares one loop alone."""

    def __init__(self, move: Move[AttentionPlan, AttentionSchedule]):
        self._move = move

    def check(self, plan: AttentionPlan, schedule: MaskedSchedule, param: str, device: Device, mode: str) -> None:
        """As of an attention."""
        self._move.check(plan, schedule, param, device, mode)

    def schedules(
        self, plan: AttentionPlan, schedule: MaskedSchedule, param: str, device: Device
    ) -> Sequence[MaskedSchedule]:
        """Those with one kind of warps."""
        return [_mine(s) for s in self._move.schedules(plan, schedule, param, device) if not s.specialize]


def _mine(schedule: AttentionSchedule) -> MaskedSchedule:
    """`schedule`, which was made of one of this family."""
    assert isinstance(schedule, MaskedSchedule)
    return schedule


__all__ = ["Masked"]
