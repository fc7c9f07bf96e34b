"""The recurrent family: loops over steps whose states meet weights.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.coder.template.families.common import fast_by_default
from qimeng.coder.template.families.recurrent.defaults import (
    CYCLES_A_MS,
    cycles,
    default_schedule,
    depth_block,
    guesses,
    no_tensor_cores,
    programs_of,
    shared_bytes,
    waiting,
)
from qimeng.coder.template.families.recurrent.moves import moves
from qimeng.coder.template.families.recurrent.plan import RecurrentPlan, plan_recurrent
from qimeng.coder.template.families.recurrent.printer import print_recurrent
from qimeng.coder.template.families.recurrent.schedule import LEAST, RecurrentSchedule
from qimeng.coder.template.families.recurrent.words import INTENTS
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs
from qimeng.graph.loops.loop import is_loop
from qimeng.graph.region import Region
from qimeng.program.program import Implementation


@dataclass(frozen=True)
class AtOnce(Needs):
    """The needs of a kernel whose programs wait for each other.

    Attributes:
        programs: those that must run at the same time; 0 where none waits.
        lacks: why the schedule does not fit the loop; empty where it does.
    """

    programs: int = 0
    lacks: str = ""

    def refusal(self, device: Device) -> str | None:
        """None where `device` has it, else why not, with the numbers."""
        if self.lacks:
            return self.lacks
        if self.programs > device.sms:
            return f"{self.programs} programs wait for each other, {device.name} has {device.sms} multiprocessors"
        return super().refusal(device)


class Recurrent(Family[RecurrentPlan, RecurrentSchedule]):
    """Loops over steps: programs keep states in registers, exchange them after each step, and hold the weights."""

    name = "recurrent"
    about = "loops over steps with states, such as LSTM, GRU and RNN layers"
    schedule = RecurrentSchedule

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> RecurrentPlan:
        """The region as one loop over steps."""
        return plan_recurrent(region)

    def concerns(self, region: Region) -> bool:
        """Whatever has such a loop."""
        return any(is_loop(n) for n in region.ops)

    def default(self, plan: RecurrentPlan, device: Device, mode: str) -> RecurrentSchedule:
        """By the sizes of the batch and the states, on tensor cores in fp32's precision."""
        return default_schedule(plan, device).but(fast=fast_by_default(plan.nest, device))

    def guesses(
        self, plan: RecurrentPlan, schedule: RecurrentSchedule, device: Device, mode: str
    ) -> list[RecurrentSchedule]:
        """Other cuts of the states."""
        return [s.but(fast=schedule.fast) for s in guesses(plan, device)]

    def reduced(self, plan: RecurrentPlan, schedule: RecurrentSchedule) -> RecurrentSchedule:
        """Blocks no larger than a smaller problem needs."""
        p = min(schedule.block_p, power_of_two(plan.row_count))
        r = min(schedule.block_r, max(power_of_two(plan.column_count) // 2, 1))
        if schedule.dot:
            return schedule.but(block_k=max(power_of_two(plan.column_count), LEAST))
        return schedule.but(block_p=p, block_r=r, block_k=depth_block(plan, p, r, schedule.warps))

    def needs(self, plan: RecurrentPlan, schedule: RecurrentSchedule) -> Needs:
        """One tile of a product at a time stays in registers; warps exchange its sums through shared memory.

        On tensor cores weights stay in shared memory.
        """
        tile = schedule.block_p * schedule.block_r
        programs = programs_of(plan, schedule) if waiting(plan, schedule) > 1 else 0
        if schedule.dot:
            lacks = no_tensor_cores(plan, schedule)
            return AtOnce(shared_bytes(plan, schedule), schedule.warps, tile, 192, programs, lacks)
        values = tile * max(schedule.block_k if plan.products else 1, len(plan.products))
        return AtOnce(4 * tile * schedule.warps, schedule.warps, values, 192, programs)

    def print(self, plan: RecurrentPlan, schedule: RecurrentSchedule, prefix: str) -> Implementation:
        """One kernel for all steps."""
        return print_recurrent(plan, schedule, prefix)

    def cost(self, plan: RecurrentPlan, schedule: RecurrentSchedule) -> Cost:
        """Steps come one after the other; what they move is little."""
        return Cost(waiting_ms=plan.loop.count * cycles(plan, schedule) / CYCLES_A_MS)

    def intents(
        self, region: Region, schedule: RecurrentSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """The same for all."""
        return INTENTS


__all__ = ["AtOnce", "Recurrent"]
