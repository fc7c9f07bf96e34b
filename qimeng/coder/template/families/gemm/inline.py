"""An operand that the main loop reads and splits into planes itself.

Deals in scales and planes in registers. Knows nothing about the loop around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.planes import plane_of
from qimeng.coder.template.families.gemm.reading import Pointers, Tensor, strides_of_tensor
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.nest.sizes import round_up


class Inline(Operand):
    """An fp32 operand that the main loop reads and splits into planes itself, or rounds to TF32, in registers.

    It is read once where packing would read, write and read it again; the loop pays for that with arithmetic. Scales,
    where the scheme has any, come of the largest magnitude of each row, which a kernel finds before together with the
    least one (`a_top`, as bits).
    """

    def _arrange(self) -> None:
        name, (_, m, n, k) = self.side.name, self.plan.shape
        tensor = self.schedule.descriptors and strides_of_tensor(self.plan, self.side) is not None
        kind = Tensor if tensor else Pointers
        self.reader = kind(self.side, self.plan, self.schedule, self.prefix, self.names)
        self.parameters, self.arguments = [*self.reader.parameters], [*self.reader.arguments]
        self.host, self.setup, self.sources = self.reader.host, [*self.reader.setup], self.reader.sources
        self.padded = round_up(m if self.is_a else n, self.rows_of_block)
        self.k_major = self.side.k_major
        self.high, self.wide = (self.padded, k) if self.k_major else (k, self.padded)
        if scheme_of(self.plan, self.schedule).scaled:
            self.scale = f"{name}_top_ptr"
            self.parameters.append(self.scale)
            self.arguments.append(f"{name}_top")
            top = f"tl.load({self.scale} + {self.at_rows}).to(tl.float32, bitcast=True)"
            self.setup.append(f"{name}_scale, {name}_inverse = {self.prefix}_power({top})")

    @property
    def made(self) -> tuple[str, ...]:
        """The largest and the least magnitudes of the rows."""
        return (f"{self.side.name}_top",) if self.scale else ()

    @property
    def maker(self) -> str:
        """The function that finds them."""
        return f"{self.prefix}_top_{self.side.name}"

    @property
    def uses_positions(self) -> bool:
        """Whether the reader or the scales need them."""
        return bool(self.scale) or self.reader.uses_positions

    def inverse(self) -> str:
        """As the setup left them."""
        return f"{self.side.name}_inverse"

    @property
    def loss_pointer(self) -> str:
        """The largest and least magnitudes tell."""
        return self.scale

    def loss(self, rows: str) -> list[str]:
        """From the largest and the least magnitude of each row."""
        name, batch = self.side.name, self.plan.shape[0]
        at = f"z * {self.padded} + {rows}" if self.plan.batch else rows
        return [
            f"{name}_far = {self.scale} + {at}",
            f"{name}_loss = {self.prefix}_span(tl.load({name}_far), tl.load({name}_far + {batch * self.padded}))",
        ]

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave the block itself, in fp32, in `target`."""
        return self.reader.fetch(target, k)

    def blocks(self, k: str, planes: Sequence[int]) -> list[str]:
        """The block once, and its planes one after the other: each is what the ones before it leave."""
        name, scheme = self.side.name, scheme_of(self.plan, self.schedule)
        lines = self.fetch(f"{name}_left", k)
        if scheme.rounds:
            return [*lines, f"{name}0 = {self.prefix}_round({name}_left)"]
        if self.scale:
            lines.append(f"{name}_left = {name}_left * {name}_scale")
        for p in planes:
            lines += plane_of(scheme, self.prefix, f"{name}_left", f"{name}{p}", p, p == planes[-1])
        return lines


__all__ = ["Inline"]
