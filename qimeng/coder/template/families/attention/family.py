"""The attention family: two matrix products with weights between them, in one kernel with an online softmax.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

from qimeng.coder.template.families.attention import words
from qimeng.coder.template.families.attention.host import print_attention
from qimeng.coder.template.families.attention.moves import moves
from qimeng.coder.template.families.attention.plan import AttentionPlan, plan_attention
from qimeng.coder.template.families.attention.schedule import LEAST, AttentionSchedule
from qimeng.coder.template.families.attention.sweeps import compilable, default_schedule, guesses, needs
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs, Sample
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.program.program import Implementation


class Attention(Family[AttentionPlan, AttentionSchedule]):
    """Weights of a product's results, and a product with them: a program owns a tile of queries and walks the keys."""

    name = "attention"
    about = "attention: a product, weights such as a softmax, and a second product"
    schedule = AttentionSchedule
    spares = True

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> AttentionPlan:
        """The region as scores, weights and values."""
        return plan_attention(region)

    def concerns(self, region: Region) -> bool:
        """Whatever PyTorch computes as one attention."""
        return any(category(n) == "attention" for n in region.ops)

    def default(self, plan: AttentionPlan, device: Device, mode: str) -> AttentionSchedule:
        """Fixed tiles, cut to the problem and to the device."""
        return default_schedule(plan, device, mode)

    def guesses(
        self, plan: AttentionPlan, schedule: AttentionSchedule, device: Device, mode: str
    ) -> list[AttentionSchedule]:
        """Other tiles; for fp32 operands the tensor cores at the precisions that the mode admits."""
        return list(guesses(plan, schedule, device, mode))

    def reduced(self, plan: AttentionPlan, schedule: AttentionSchedule) -> AttentionSchedule:
        """Blocks no larger than half of a smaller problem, so that several are walked."""
        _, rows, keys, _, _ = plan.shape
        block_m = min(schedule.block_m, max(LEAST, power_of_two(rows) // 2))
        block_n = min(schedule.block_n, max(LEAST, power_of_two(keys) // 2))
        splits = min(schedule.splits, -(-keys // block_n))
        return compilable(plan, schedule.but(block_m=block_m, block_n=block_n, splits=splits))

    def needs(self, plan: AttentionPlan, schedule: AttentionSchedule) -> Needs:
        """Queries, keys and values in shared memory; scores and products in registers."""
        return needs(plan, schedule)

    def print(self, plan: AttentionPlan, schedule: AttentionSchedule, prefix: str) -> Implementation:
        """One kernel, and where blocks are left out one before it that looks for infinities."""
        return print_attention(plan, schedule, prefix)

    def cost(self, plan: AttentionPlan, schedule: AttentionSchedule) -> Cost:
        """Tiles that overhang are computed whole; keys that nobody sees by their position are left out."""
        batch, rows, keys, depth, columns = plan.shape
        blocks = schedule.row_blocks(plan.shape[1])
        padded = power_of_two(depth, LEAST) + power_of_two(columns, LEAST)
        done = blocks * schedule.block_m * -(-keys // schedule.block_n) * schedule.block_n * padded
        return Cost(
            tile=(schedule.block_m, schedule.block_n),
            products=3 if schedule.precision == "tf32x3" and not plan.half else 1,
            programs=batch * blocks * schedule.splits,
            padded=plan.seen * done / (rows * keys * (depth + columns)),
        )

    def intents(
        self, region: Region, schedule: AttentionSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """By precision mode, and by how many programs there are."""
        programs = 0 if schedule is None else self.cost(self.plan(region), schedule).programs or 0
        return words.intents(region, mode, few=programs < device.sms)

    def samples(self) -> tuple[Sample, ...]:
        """Attention of a few heads."""
        return words.samples()


__all__ = ["Attention"]
