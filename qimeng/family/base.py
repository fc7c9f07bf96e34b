"""What a family of kernels is: who covers a region, under which schedules, and what those need and cost.

A family owns one kind of loop nest from end to end: which regions it covers, its own class of schedules, the tunings
(`Move`) that lead from one schedule to others, what a block needs of the GPU, the printing, the figures of the analytic
model and the words for planners and prompts. Everything else asks a region's family and knows none by name.

Deals in the frame and in matching. Knows nothing about any one family, about actions or about coders. Where families
are registered: `qimeng.family.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from qimeng.device import Device
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.program.schedule import Schedule

if TYPE_CHECKING:
    import torch

MAX_ALTERNATIVES = 8
"""Most configurations that one step may try."""

P = TypeVar("P")
"""A family's plan of a region: its loop nest in the family's own terms."""

S = TypeVar("S", bound=Schedule)
"""A family's class of schedules."""

Sample = tuple[Callable[[], "torch.nn.Module"], tuple[tuple[int, ...], ...]]
"""Makes a tiny module, and the shapes of its inputs."""


class Unsupported(Exception):
    """A family has no loop nest for this region, or no kernel for this schedule; the message says why."""


class NotConcerned(Unsupported):
    """Such regions are another family's business, whose own reason says more."""


@dataclass(frozen=True)
class Needs:
    """What a block of a kernel needs of the GPU, as far as it is known before compiling.

    Attributes:
        shared_bytes: shared memory in bytes.
        warps: warps.
        values: 32-bit values that the block's threads hold together.
        values_per_thread: most of these that one thread may hold; it has 255 registers.
    """

    shared_bytes: int = 0
    warps: int = 4
    values: int = 0
    values_per_thread: int = 255

    def refusal(self, device: Device) -> str | None:
        """None where `device` has it, else why not, with the numbers."""
        if self.shared_bytes > device.shared_per_block:
            has = f"{device.name} allows {device.shared_per_block} B a block"
            return f"needs {self.shared_bytes} B of shared memory, {has}"
        threads = self.warps * device.warp_size
        if threads > 1024:
            return f"{self.warps} warps are {threads} threads, a block has at most 1024"
        per_thread = self.values // threads
        if per_thread > self.values_per_thread:
            held = f"a tile of {self.values} elements is {per_thread} a thread at {self.warps} warps"
            return f"{held}; a thread has 255 registers"
        return None


@dataclass(frozen=True)
class Cost:
    """What the analytic model (`qimeng.envs.cost.kernel_time`) cannot tell from the compiled kernels alone.

    Attributes:
        tile: rows and columns of the output tile of a product.
        products: products of planes that each product is computed by.
        programs: programs that multiply; None where the kernel's grid says so.
        padded: multiply-adds carried out, those in overhanging tiles too, over those asked for.
        splits_operands: the main loop makes planes of what it reads, which takes time from its products.
        block_bytes: bytes that a block asks for before it waits; 0 where nothing is known.
        again_reads: times that data are read after the first time.
        again_bytes: bytes of each such reading.
        held_bytes: bytes that each resident block reads again, so that the L2 cache must hold them; 0 where what is
            read again is always there.
        waiting_ms: milliseconds of steps that come one after the other, whatever they move.
    """

    tile: tuple[int, int] = (128, 128)
    products: int = 1
    programs: int | None = None
    padded: float = 1.0
    splits_operands: bool = False
    block_bytes: int = 0
    again_reads: int = 0
    again_bytes: int = 0
    held_bytes: int = 0
    waiting_ms: float = 0.0


class Move(ABC, Generic[P, S]):
    """One tuning of a family: the schedules that an option of a kind of action leads to.

    Moves are pure. Tile sizes and thresholds stand beside them, with where they were measured.
    """

    def check(self, plan: P, schedule: S, param: str, device: Device, mode: str) -> None:
        """Raise `IllegalAction`, with the numbers, where the move is out of the question.

        Whether there is anything to change and whether it fits the device is checked besides (`probe`).
        """

    @abstractmethod
    def schedules(self, plan: P, schedule: S, param: str, device: Device) -> Sequence[S]:
        """The schedules, best guess first; none where there is nothing to change. At most 8 that fit are tried."""

    def probe(self, plan: P, schedule: S, param: str, device: Device) -> Sequence[S]:
        """The move is legal where one of these fits the device; by default all that it leads to."""
        return self.schedules(plan, schedule, param, device)


class Family(ABC, Generic[P, S]):
    """One kind of loop nest, from matching to printing.

    Attributes:
        name: unique; what the schedules' field `family` says.
        about: what it covers, in a few words.
        schedule: its class of schedules.
        spares: what it fuses products with never goes to memory and would be large there, so that a planner does well
            to fuse towards it even where a library is fast at the products alone.
        rivals: names of families that may be faster where they cover a region as well; lowering measures their plain
            schedules beside this one's.
        moves: name of a kind of action to the move that carries it out; kinds that are missing here do not apply.
    """

    name: str
    about: str = ""
    schedule: type[S]
    spares: bool = False
    rivals: tuple[str, ...] = ()
    moves: Mapping[str, Move[P, S]] = {}

    # -- matching

    @abstractmethod
    def plan(self, region: Region) -> P:
        """The loop nest of `region` in the family's own terms; a pure function of what the region computes.

        Raises:
            Unsupported: the family does not cover the region; the message says why in a few words.
        """

    def concerns(self, region: Region) -> bool:
        """Whether regions like this are the family's business, covered or not; a look at the operators is enough."""
        return False

    # -- schedules

    @abstractmethod
    def default(self, plan: P, device: Device, mode: str) -> S:
        """The plain schedule that lowering starts from, right without tuning."""

    def guesses(self, plan: P, schedule: S, device: Device, mode: str) -> Sequence[S]:
        """Schedules that may well be faster than the plain one, so that lowering measures them beside it."""
        return ()

    def unmeasured(self, plan: P, device: Device, mode: str) -> S:
        """The schedule of a kernel that no other is measured beside, as where one step writes many; the plain one."""
        return self.default(plan, device, mode)

    def reduced(self, plan: P, schedule: S) -> S:
        """`schedule` for a region of smaller sizes, so that an interpreter can run it."""
        return schedule

    # -- what a schedule needs, prints and costs

    def needs(self, plan: P, schedule: S) -> Needs:
        """What a block needs of the GPU."""
        return Needs()

    @abstractmethod
    def print(self, plan: P, schedule: S, prefix: str) -> Implementation:
        """The implementation under `schedule`; every top-level name of its text begins with `prefix`.

        Raises:
            Unsupported: the schedule does not fit the plan.
        """

    def cost(self, plan: P, schedule: S) -> Cost:
        """What the analytic model of time should know."""
        return Cost()

    # -- words

    def word(self, region: Region) -> str:
        """One word for regions like this, which planners read; by default the family's name."""
        return self.name

    def intents(self, region: Region, schedule: S | None, device: Device, mode: str) -> Sequence[tuple[str, str]]:
        """(kind, option) of the tunings that are worth trying, in order, for a planner that goes by rules.

        Args:
            region: the region.
            schedule: the present one; None where the kernel was written without one.
            device: for which device.
            mode: precision mode.
        """
        return ()

    def samples(self) -> Sequence[Sample]:
        """Tiny computations that it covers, which examples in prompts are made of."""
        return ()


AnyFamily = Family[Any, Any]
"""A family of any plan and any schedule."""

__all__ = ["MAX_ALTERNATIVES", "AnyFamily", "Cost", "Family", "Move", "Needs", "NotConcerned", "Sample", "Unsupported"]
