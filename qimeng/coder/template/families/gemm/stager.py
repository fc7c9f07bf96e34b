"""The kernel that copies a convolution's input after its prologue: channels last, with its padding, split into planes.

Deals in kernel text. Knows nothing about the product.
"""

from __future__ import annotations

from collections.abc import Mapping

from qimeng.coder.template.families.gemm.pack_parts import KERNEL
from qimeng.coder.template.families.gemm.plan import GemmPlan, used_axes
from qimeng.coder.template.families.gemm.planes import plane_of
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.families.gemm.staging import NAME
from qimeng.coder.template.nest.expr import Staging, reach
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.ops import TRITON_DTYPE
from qimeng.coder.template.triton.walks import spread

POSITIONS, CHANNELS = 64, 64
"""Most positions of the last dimension and channels of a program: memory runs along the ones where it is read and along
the others where it is written."""

FEW, TILE = 8, 4096
"""Channels up to which a program takes positions of several dimensions, as many as make so many elements."""


class Stager:
    """Prints the copy.

    Attributes:
        sources: numbers of the tensors that it is made of.
    """

    def __init__(self, plan: GemmPlan, schedule: GemmSchedule, prefix: str):
        assert plan.staging is not None
        self._staging: Staging = plan.staging
        self._plan, self._prefix = plan, prefix
        self._scheme = scheme_of(plan, schedule) if plan.a.split else None
        self._dtype = self._scheme.dtype if self._scheme else plan.dtype
        self._planes = self._scheme.planes if self._scheme else 1
        self.sources = sorted({e.param for e in reach([self._staging.fill]) if e.op == "load"})
        *outer, last, channels = self._staging.order
        self._positions = POSITIONS
        if plan.extent(channels) <= FEW:
            self._positions = TILE // power_of_two(plan.extent(channels))
            while len(outer) > 1 and plan.extent(last) < self._positions:
                last = (*outer.pop(), *last)
        self._along = tuple(a for d in outer for a in d), last, channels
        self._outer, self._rows, self._columns = (plan.extent(atoms) for atoms in self._along)
        self._held = plan.b.short[0][1] if plan.b.short else self._columns  # the others are zero

    @property
    def call(self) -> str:
        """The line of the entry function that makes the copy."""
        names = ", ".join(self._plan.loads.names[i] for i in self.sources)
        return f"{NAME} = {self._prefix}_stage({names})"

    def source(self) -> str:
        """Kernel and host function."""
        nest, names = self._plan.nest, self._plan.loads.names
        scalars = {i: nest.sources[i].scalar for i in self.sources}
        pb, rb = min(self._positions, power_of_two(self._rows)), min(CHANNELS, power_of_two(self._columns))
        blocks = -(-self._rows // pb), -(-self._columns // rb)
        parameters = [*(f"x{i}" if scalars[i] else f"x{i}_ptr" for i in self.sources), f"{NAME}_ptr"]
        passed = [*(f"float({names[i]})" if scalars[i] else names[i] for i in self.sources), NAME]
        shape = f"[{self._outer}, {self._rows}, {self._columns}]"
        text = KERNEL.format(
            name=f"{self._prefix}_stage_kernel",
            parameters=", ".join(parameters),
            doc=f"The input of the convolution, channels last and padded: {shape}.",
            body="\n".join(f"    {line}" for line in [*self._value(pb, rb, blocks), *self._store(pb, rb)]),
        )
        grid = self._outer * blocks[0] * blocks[1]
        tensor = next(names[i] for i in self.sources if not scalars[i])
        dtype = f"dtype=torch.{self._dtype}, device={tensor}.device"
        lines = [
            f"def {self._prefix}_stage({', '.join(names[i] for i in self.sources)}):",
            '    """The copy that the product reads."""',
            f"    {NAME} = torch.empty(({self._planes * self._outer * self._rows}, {self._columns}), {dtype})",
            f"    {self._prefix}_stage_kernel[({grid},)]({', '.join(passed)}, PB={pb}, RB={rb}, num_warps=4)",
            f"    return {NAME}",
        ]
        return text + "\n\n" + "\n".join(lines) + "\n"

    def _value(self, pb: int, rb: int, blocks: tuple[int, int]) -> list[str]:
        """Lines that leave the elements of one program's tile in `x`."""
        nest, fill = self._plan.nest, self._staging.fill
        lines = [
            f"z = t // {blocks[0] * blocks[1]}",
            f"p = t // {blocks[1]} % {blocks[0]} * PB + tl.arange(0, PB)[:, None]",
            f"r = t % {blocks[1]} * RB + tl.arange(0, RB)[None, :]",
        ]
        masks = _inside({"p": (self._rows, pb), "r": (self._held, rb)})
        loads = [e for e in reach([fill]) if e.op == "load" and not nest.sources[e.param].scalar]
        tables, used, walks = [nest.load_strides(e) for e in loads], used_axes(nest, [fill]), []
        for atoms, index, side in zip(self._along, "zpr", ("", "p", "r"), strict=True):
            more, found = spread(nest, atoms, tables, index, side, used=used)
            lines += more
            walks += found
        em = Emitter(nest, walks, masks=masks)
        value = em.value(fill)
        lines += [f"{side}_zero = {side} * 0" for side in "pr" if f"{side}_zero" in "\n".join(em.lines)]
        stored = f"({value} + tl.zeros([PB, RB], tl.float32))" if em.side(fill) != "pr" else value
        stored = f"{self._prefix}_round({stored})" if self._plan.a.rounded else stored
        if self._held < self._columns:
            stored = f"tl.where(r < {self._held}, {stored}, 0.0)"
        return [*lines, *em.lines, f"x = {stored}"]

    def _store(self, pb: int, rb: int) -> list[str]:
        """Lines that store `x` as it is, or as planes one after the other."""
        plane_size = self._outer * self._rows * self._columns
        row = f"({'z.to(tl.int64)' if self._planes * plane_size >= 1 << 31 else 'z'} * {self._rows} + p)"
        mask = " & ".join(_inside({"p": (self._rows, pb), "r": (self._columns, rb)}).values())
        tail = f", mask={mask}" if mask else ""
        lines = [f"at = {NAME}_ptr + {row} * {self._columns} + r"]
        if self._scheme is None:
            return [*lines, f"tl.store(at, x.to({TRITON_DTYPE[self._dtype]}){tail})"]
        for plane in range(self._planes):
            further = f" + {plane * plane_size}" if plane else ""
            rounded, *less = plane_of(self._scheme, self._prefix, "x", "part", plane, plane + 1 == self._planes)
            lines += [rounded, f"tl.store(at{further}, part{tail})", *less]
        return lines


def _inside(sides: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Side to its mask, where so many elements are no multiple of the block along it."""
    return {side: f"({side} < {count})" for side, (count, block) in sides.items() if count % block}


__all__ = ["Stager"]
