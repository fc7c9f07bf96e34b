"""What an operand of a matrix product is to the main loop, however it reaches it.

Deals in kernel parameters, the lines of the entry function that make them, and the lines that load one block. Knows
nothing about the loop around them; the ways are `planes`, `reading` and `inline`, and `operands` chooses among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from qimeng.coder.template.families.gemm.descriptors import described
from qimeng.coder.template.families.gemm.losses import losses_of
from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.families.gemm.staging import images_of
from qimeng.coder.template.nest.expr import reach


@dataclass
class Operand(ABC):
    """One operand, ready to be printed.

    Attributes:
        side: what it is.
        parameters: the kernel's parameters for it.
        arguments: what the entry function passes for them.
        host: lines of the entry function before the launch.
        setup: lines of the kernel before the loop.
        given: further parameters of the entry function, which a family's reader passes on.
        per_step: what multiplies the products of one step of the loop, for a family's reader; `fetch` leaves it there.
        gathered: a block is at a vector of depths, which `fetch` is given, not where one depth begins.
        described: blocks are read through a tensor descriptor.
        prefix: beginning of the file's top-level names.
        names: number of a source to its variable in the entry function.
        sources: numbers of the sources that the main kernel itself reads for it.
        scale: name of the pointer to what tells the scales of its rows; empty without.
        stride: rows of the block matrix between two planes.
        padded: rows (of A) or columns (of B) rounded up to the block.
        images: number of scales where each image has one; 0 where each row has.
        losses: number of losses where images have them (see `losses`); 0 where each row has one.
    """

    side: Side
    plan: GemmPlan
    schedule: GemmSchedule
    prefix: str = ""
    names: dict[int, str] = field(default_factory=dict)
    sources: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    host: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    given: tuple[str, ...] = ()
    per_step: str = ""
    gathered: bool = False
    described: bool = False
    scale: str = ""
    stride: int = 0
    padded: int = 0
    images: int = 0
    losses: int = 0

    def __post_init__(self) -> None:
        self._arrange()

    @abstractmethod
    def _arrange(self) -> None:
        """Fill in parameters, arguments, host and setup lines."""

    def _describe(self, tensor: str, layout: str) -> None:
        """Read blocks of the entry function's `tensor` through a descriptor of `layout` (see `described`)."""
        name = self.side.name
        found = described(name, tensor, layout)
        self.parameters, self.arguments = [found.parameter], [found.argument]
        self.host, self.described = [*found.host], True

    @abstractmethod
    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave the block at depth `k` (of the plane that starts `plane` rows down) in `target`."""

    def loop(self, left: Operand) -> list[str]:
        """Lines that leave the tile's product with the operand `left` in `acc`, where a family's reader has its own."""
        return []

    def blocks(self, k: str, planes: Sequence[int]) -> list[str]:
        """Lines that leave the block at depth `k` in `<name>0`, `<name>1` … for each of `planes`."""
        return [line for p in planes for line in self.fetch(f"{self.side.name}{p}", k, str(p * self.stride))]

    @property
    def made(self) -> tuple[str, ...]:
        """Variables of the entry function that kernels before the product make of the operand."""
        return ()

    @property
    def maker(self) -> str:
        """The function that makes them."""
        return f"{self.prefix}_pack_{self.side.name}"

    def _scale_images(self) -> None:
        """Read the scales of the images that the copy's scaled planes have."""
        if not scheme_of(self.plan, self.schedule).scaled:
            return
        self.images = self.plan.extent(images_of(self.plan))
        self.losses = self.images * losses_of(self.plan).count
        self.scale = f"{self.side.name}_inverse_ptr"
        self.parameters += [self.scale, self.loss_pointer]
        self.arguments += [f"{self.side.name}_inverse", f"{self.side.name}_loss"]

    @property
    def at_rows(self) -> str:
        """The places of the tile's rows among their scales: of rows, or of the images that they belong to."""
        return self._place(self.rows, self.images)

    def _place(self, rows: str, count: int) -> str:
        """The places of `rows` among `count` numbers that each belong to as many rows; 0 if each row has one."""
        if count:
            each = self.plan.shape[1] // count
            return f"tl.minimum({rows}{f' // {each}' if each > 1 else ''}, {count - 1})"
        return f"z * {self.padded} + {rows}" if self.plan.batch else rows

    def inverse(self) -> str:
        """The inverse scales of the tile's rows."""
        return f"tl.load({self.scale} + {self.at_rows})"

    def loss(self, rows: str) -> list[str]:
        """Lines that leave in `<name>_loss` what the planes of the flat `rows` lose (`guard`)."""
        name = self.side.name
        return [f"{name}_loss = tl.load({name}_loss_ptr + {self._place(rows, self.losses)})"]

    @property
    def loss_pointer(self) -> str:
        """The kernel parameter that `loss` reads."""
        return f"{self.side.name}_loss_ptr"

    @property
    def uses_positions(self) -> bool:
        """Whether `fetch` reads the vectors of rows or columns, which otherwise wait until after the loop."""
        return not self.described

    # -- names shared by all kinds
    @property
    def is_a(self) -> bool:
        """True for the left operand."""
        return self.side.name == "a"

    @property
    def block(self) -> str:
        """Name of the block size along the rows."""
        return "BM" if self.is_a else "BN"

    @property
    def rows_of_block(self) -> int:
        """Block size along the rows."""
        return self.schedule.block_m if self.is_a else self.schedule.block_n

    @property
    def start(self) -> str:
        """Name of the first row of the tile."""
        return "row0" if self.is_a else "col0"

    @property
    def rows(self) -> str:
        """Name of the vector of rows."""
        return "rm" if self.is_a else "rn"

    def depths(self, k: str) -> str:
        """The depths of the block at `k` as a vector along the operand's own side."""
        if self.gathered:
            return k
        return f"{k} + {'tl.arange(0, BK)[None, :]' if self.is_a else 'tl.arange(0, BK)[:, None]'}"


def sources_of(side: Side) -> list[int]:
    """Numbers of the sources below an operand."""
    return sorted({e.param for e in reach([side.expr]) if e.op == "load"})


__all__ = ["Operand", "sources_of"]
