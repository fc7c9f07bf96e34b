"""The kernels that copy a convolution's input after its prologue: channels last, padded, in planes where asked for.

Scaled planes need the largest magnitude of each image, which a kernel finds before; what they lose is noted beside them
(see `guard` and `losses`). Deals in kernel text. Knows nothing about the product.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.guard import BITS, EXTREME, REMOTE, TINY
from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.losses import losses_of
from qimeng.coder.template.families.gemm.pack_parts import KERNEL
from qimeng.coder.template.families.gemm.plan import GemmPlan, used_axes
from qimeng.coder.template.families.gemm.planes import plane_of
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.families.gemm.staging import NAME, images_of
from qimeng.coder.template.nest.expr import Staging, reach
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.ops import TRITON_DTYPE
from qimeng.coder.template.triton.walks import spread

POSITIONS, CHANNELS = 64, 64
"""Most positions of the last dimension and channels of a program: memory runs along the ones where it is read and along
the others where it is written."""

THIN, TILE = 8, 4096
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
        self._scaled = self._scheme is not None and self._scheme.scaled
        self._dtype = self._scheme.dtype if self._scheme else plan.dtype
        self._planes = self._scheme.planes if self._scheme else 1
        self.sources = sorted({e.param for e in reach([self._staging.fill]) if e.op == "load"})
        *outer, last, channels = self._staging.order
        most = POSITIONS
        if plan.extent(channels) <= THIN:
            most = TILE // power_of_two(plan.extent(channels))
            while len(outer) > 1 and plan.extent(last) < most:
                last = (*outer.pop(), *last)
        self._along = tuple(a for d in outer for a in d), last, channels
        self._outer, self._rows, self._columns = (plan.extent(atoms) for atoms in self._along)
        self._held = plan.b.short[0][1] if plan.b.short else self._columns  # the others are zero
        self._tile = min(most, power_of_two(self._rows)), min(CHANNELS, power_of_two(self._columns))
        self._blocks = -(-self._rows // self._tile[0]), -(-self._columns // self._tile[1])

    @property
    def _made(self) -> tuple[str, ...]:
        """Variables of the entry function."""
        return (NAME, "a_inverse", "a_loss") if self._scaled else (NAME,)

    @property
    def call(self) -> str:
        """The line of the entry function that makes the copy."""
        names = ", ".join(self._plan.loads.names[i] for i in self.sources)
        return f"{', '.join(self._made)} = {self._prefix}_stage({names})"

    def source(self) -> str:
        """Kernels and host function."""
        nest, names = self._plan.nest, self._plan.loads.names
        tensor = next(names[i] for i in self.sources if not nest.sources[i].scalar)
        high = self._planes * self._outer * self._rows
        lines = [
            f"def {self._prefix}_stage({', '.join(names[i] for i in self.sources)}):",
            '    """The copy that the product reads."""',
            f"    device = {tensor}.device",
            f"    {NAME} = torch.empty(({high}, {self._columns}), dtype=torch.{self._dtype}, device=device)",
        ]
        shape = f"[{self._outer}, {self._rows}, {self._columns}]"
        doc = f"The input of the convolution, channels last and padded: {shape}."
        text, launch = self._kernel("", doc, self._copied(), self._made)
        if self._scaled:
            losses, base = losses_of(self._plan), 2 * self._plan.shape[3]
            first, found = self._kernel("_top", "Largest magnitude of each image, as bits.", self._top(), ("top",))
            text, images = first + text, self._images
            lines += [
                f"    top = torch.zeros(({images},), dtype=torch.int32, device=device)",
                f"    a_inverse = torch.empty(({images},), dtype=torch.float32, device=device)",
                f"    a_loss = torch.full(({images}, {losses.count}), {base}, dtype=torch.int32, device=device)",
                f"    {found}",
            ]
        return text + "\n\n" + "\n".join([*lines, f"    {launch}", f"    return {', '.join(self._made)}"]) + "\n"

    def _kernel(self, suffix: str, doc: str, body: list[str], made: tuple[str, ...]) -> tuple[str, str]:
        """A kernel and the line that launches it."""
        nest, names = self._plan.nest, self._plan.loads.names
        scalars = {i: nest.sources[i].scalar for i in self.sources}
        made = (*made, "top") if suffix == "" and self._scaled else made
        parameters = [*(f"x{i}" if scalars[i] else f"x{i}_ptr" for i in self.sources), *(f"{m}_ptr" for m in made)]
        passed = [*(f"float({names[i]})" if scalars[i] else names[i] for i in self.sources), *made]
        name = f"{self._prefix}_stage{suffix}_kernel"
        lines = "\n".join(f"    {line}" for line in body)
        text = KERNEL.format(name=name, parameters=", ".join(parameters), doc=doc, body=lines)
        grid = self._outer * self._blocks[0] * self._blocks[1]
        pb, rb = self._tile
        return text, f"{name}[({grid},)]({', '.join(passed)}, PB={pb}, RB={rb}, num_warps=4)"

    @property
    def _images(self) -> int:
        return self._plan.extent(images_of(self._plan))

    def _inside(self) -> dict[str, str]:
        """Masks of positions and channels inside the copy, where tiles overhang it."""
        (pb, rb), sizes = self._tile, (self._rows, self._columns)
        return {"p": f"(p < {sizes[0]})" if sizes[0] % pb else "", "r": f"(r < {sizes[1]})" if sizes[1] % rb else ""}

    def _value(self) -> tuple[list[str], str]:
        """Lines of a program, and the text of what its tile of the copy holds."""
        nest, fill, (down, across) = self._plan.nest, self._staging.fill, self._blocks
        lines = [
            f"z = t // {down * across}",
            f"p = t // {across} % {down} * PB + tl.arange(0, PB)[:, None]",
            f"r = t % {across} * RB + tl.arange(0, RB)[None, :]",
        ]
        masks = {"p": self._inside()["p"], "r": f"(r < {self._held})" if self._held % self._tile[1] else ""}
        loads = [e for e in reach([fill]) if e.op == "load" and not nest.sources[e.param].scalar]
        tables, used, walks = [nest.load_strides(e) for e in loads], used_axes(nest, [fill]), []
        for atoms, index, side in zip(self._along, "zpr", ("", "p", "r"), strict=True):
            more, found = spread(nest, atoms, tables, index, side, used=used)
            lines += more
            walks += found
        em = Emitter(nest, walks, masks={side: mask for side, mask in masks.items() if mask})
        value = em.value(fill)
        lines += [f"{side}_zero = {side} * 0" for side in "pr" if f"{side}_zero" in "\n".join(em.lines)]
        stored = f"({value} + tl.zeros([PB, RB], tl.float32))" if em.side(fill) != "pr" else value
        stored = f"{self._prefix}_round({stored})" if self._plan.a.rounded else stored
        zero = [masks["p"]] if self._scaled and masks["p"] else []
        zero += [masks["r"]] if self._held < self._columns or (self._scaled and masks["r"]) else []
        return [*lines, *em.lines], f"tl.where({' & '.join(zero)}, {stored}, 0.0)" if zero else stored

    def _top(self) -> list[str]:
        """Lines that find the largest magnitude of a program's tile."""
        lines, value = self._value()
        best = f"tl.max(tl.max({BITS}, axis=1), axis=0)"
        return [*lines, f"x = {value}", f'tl.atomic_max(top_ptr + {self._image}, {best}, sem="relaxed")']

    @property
    def _image(self) -> str:
        """The number of a program's image."""
        each = self._outer // self._images
        return "z" if each == 1 else f"z // {each}"

    def _copied(self) -> list[str]:
        """Lines that store a program's tile of the copy, as it is or as planes one after the other."""
        lines, value = self._value()
        big = self._planes * self._outer * self._rows * self._columns >= 1 << 31
        row = f"({'z.to(tl.int64)' if big else 'z'} * {self._rows} + p)"
        tail = f", mask={mask}" if (mask := " & ".join(m for m in self._inside().values() if m)) else ""
        lines.append(f"at = {NAME}_ptr + {row} * {self._columns} + r")
        if self._scheme is None:
            return [*lines, f"value = ({value}).to({TRITON_DTYPE[self._dtype]})", f"tl.store(at, value{tail})"]
        lines += [f"x = {value}", *(self._scale() if self._scaled else [])]
        for plane in range(self._planes):
            further = f" + {plane * self._outer * self._rows * self._columns}" if plane else ""
            rounded, *less = plane_of(self._scheme, self._prefix, "x", "part", plane, plane + 1 == self._planes)
            lines += [rounded, f"tl.store(at{further}, part{tail})", *less]
        return [*lines, *(self._note() if self._scaled else [])]

    def _scale(self) -> list[str]:
        """Lines that scale `x`, note the image's scale, and leave in `lost` what planes lose of it."""
        lost = f"tl.where(tl.abs(x) < {REMOTE!r}, {EXTREME}, (tl.abs(x * scale) < {TINY!r}).to(tl.int32))"
        lost = f"tl.max(tl.where(x != 0.0, {lost}, 0), axis=1{'' if self._one_loss else ', keep_dims=True'})"
        return [
            f"image = {self._image}",
            "top = tl.load(top_ptr + image)",
            f"scale, inverse = {self._prefix}_power(top.to(tl.float32, bitcast=True))",
            "tl.store(a_inverse_ptr + image, inverse)",
            f"lost = {f'tl.max({lost}, axis=0)' if self._one_loss else lost}",
            f"lost = tl.where({self._prefix}_extreme(top), {EXTREME}, lost)",
            "x = x * scale",
        ]

    def _note(self) -> list[str]:
        """Lines that note what is lost; after the stores, where registers are free."""
        some = "lost" if self._one_loss else "tl.max(tl.max(lost, axis=1), axis=0)"
        noted = f"tl.where(lost < {EXTREME}, {2 * self._plan.shape[3]} + lost, lost)"
        return [f"if {some} > 0:", *indent(losses_of(self._plan).note(self._rows, noted))]

    @property
    def _one_loss(self) -> bool:
        """Whether all of a program's positions belong to the same losses."""
        return losses_of(self._plan).along_z(self._rows)


__all__ = ["Stager"]
