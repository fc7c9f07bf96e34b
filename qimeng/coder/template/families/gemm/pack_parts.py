"""Parts of the kernels that walk the tiles of an operand: places, masks, values, scales, and what planes lose.

Deals in lines of kernel text. Knows nothing about which kernels are made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.coder.template.families.gemm.guard import EXTREME, MISSED, REMOTE, TINY
from qimeng.coder.template.families.gemm.inline import Inline
from qimeng.coder.template.families.gemm.operand import sources_of
from qimeng.coder.template.families.gemm.planes import Planes, plane_of
from qimeng.coder.template.families.gemm.reading import within
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.walks import spread

KERNEL = '''
@triton.jit
def {name}({parameters}, PB: tl.constexpr, RB: tl.constexpr):
    """{doc}"""
    t = tl.program_id(0)
{body}
'''


@dataclass(frozen=True)
class Tile:
    """A tile of the matrix of planes and how it is launched."""

    pb: int
    rb: int
    warps: int
    loop: int = 1


class Parts:
    """What is printed for one operand, piece by piece.

    Attributes:
        planes: the operand.
        name: beginning of the names.
    """

    def __init__(self, planes: Planes | Inline, schedule: GemmSchedule):
        self.planes, self.plan, self.side = planes, planes.plan, planes.side
        self.scheme = scheme_of(self.plan, schedule)
        self.name = planes.maker
        batch, m, n, k = self.plan.shape
        rows = m if planes.is_a else n
        self.batch = batch
        self.real_p, self.real_r = (rows, k) if planes.k_major else (k, rows)
        self.high, self.wide = planes.high, planes.wide
        self.row_of = "p" if planes.k_major else "r"

    @property
    def _axis(self) -> int:
        """The axis of a tile along the depth."""
        return 1 if self.row_of == "p" else 0

    def _blocks(self, tile: Tile) -> tuple[int, int]:
        """Programs along p and r for each element of the batch."""
        loop_p, loop_r = (1, tile.loop) if self.row_of == "p" else (tile.loop, 1)
        return -(-self.high // (tile.pb * loop_p)), -(-self.wide // (tile.rb * loop_r))

    def _place(self, tile: Tile) -> list[str]:
        """Which tile this program owns, and its positions."""
        p_blocks, r_blocks = self._blocks(tile)
        lines = [f"j = t % {r_blocks}", f"i = t // {r_blocks}"]
        if self.plan.batch:
            lines = [f"z = t // {p_blocks * r_blocks}", f"j = t % {r_blocks}", f"i = t // {r_blocks} % {p_blocks}"]
        return [*lines, "p = i * PB + tl.arange(0, PB)[:, None]", "r = j * RB + tl.arange(0, RB)[None, :]"]

    def _step(self, tile: Tile) -> str:
        """The line that goes to the next block of the depth in a loop over `c`."""
        if self._axis:
            return f"r = (j * {tile.loop} + c) * RB + tl.arange(0, RB)[None, :]"
        return f"p = (i * {tile.loop} + c) * PB + tl.arange(0, PB)[:, None]"

    def _ok(self, tile: Tile) -> dict[str, str]:
        """Masks of positions inside the matrix of planes, where the tiles overhang it."""
        p_blocks, r_blocks = self._blocks(tile)
        loop_p, loop_r = (1, tile.loop) if self.row_of == "p" else (tile.loop, 1)
        return {
            "p": f"(p < {self.high})" if p_blocks * tile.pb * loop_p != self.high else "",
            "r": f"(r < {self.wide})" if r_blocks * tile.rb * loop_r != self.wide else "",
        }

    def _inside(self, tile: Tile, sides: str, extra: str = "") -> str:
        """A mask text over `sides` that is never empty."""
        parts = [self._ok(tile)[s] for s in sides if self._ok(tile)[s]] + ([f"({extra})"] if extra else [])
        return " & ".join(parts or [f"({sides[0]} >= 0)"])

    def _row(self) -> str:
        """The position of a row among the scales."""
        return f"z * {self.planes.padded} + {self.row_of}" if self.plan.batch else self.row_of

    def _element(self) -> list[str]:
        """Lines that leave the operand's values in `x`, zero where the planes are padded."""
        nest, plan = self.plan.nest, self.plan
        tables = [nest.load_strides(e) for e in self.side.loads]
        along_p, along_r = (self.side.rows, plan.k) if self.row_of == "p" else (plan.k, self.side.rows)
        lines, walks = [], []
        for atoms, index, side in ((plan.batch, "z", ""), (along_p, "p", "p"), (along_r, "r", "r")):
            more, found = spread(nest, atoms, tables, index, side, used=plan.used(self.side))
            lines += more
            walks += found
        masks = {"p": f"(p < {self.real_p})", "r": f"(r < {self.real_r})"}
        deep = "r" if self.row_of == "p" else "p"
        masks[deep] = " & ".join([masks[deep], *(f"({test})" for test in within(walks, self.side))])
        em = Emitter(nest, walks, masks=masks)
        value = em.value(self.side.expr)
        lines += [f"{side}_zero = {side} * 0" for side in "pr" if f"{side}_zero" in "\n".join(em.lines)]
        return [*lines, *em.lines, f"x = tl.where({masks['p']} & {masks['r']}, {value}, 0.0)"]

    def _scale(self, tile: Tile, once: str) -> list[str]:
        """Lines that make the scale of `top` and store its inverse; `once` tells which program of several does."""
        at = f"inverse_ptr + {self._row()}"
        return [
            f"scale, inverse = {self.planes.prefix}_power(top.to(tl.float32, bitcast=True))",
            f"tl.store({at}, inverse, mask={self._inside(tile, self.row_of, once)})",
        ]

    def _split(self, tile: Tile) -> list[str]:
        """Lines that store `x` as planes, scaled where the scheme scales."""
        s = self.scheme
        lines = ["x = x * scale"] if s.scaled else []
        if s.rounds:
            lines.append(f"x = {self.planes.prefix}_round(x)")
        big = s.planes * self.planes.stride * self.wide >= 1 << 31
        row = f"(z * {self.high} + p)" if self.plan.batch else "p"
        row += ".to(tl.int64)" if big else ""
        lines.append(f"at = planes_ptr + {row} * {self.wide} + r")
        mask = " & ".join(m for m in self._ok(tile).values() if m)
        tail = f", mask={mask}" if mask else ""
        for plane in range(s.planes):
            shift = f" + {plane * self.planes.stride * self.wide}" if plane else ""
            rounded, *less = plane_of(s, self.planes.prefix, "x", "part", plane, plane + 1 == s.planes)
            lines += [rounded, f"tl.store(at{shift}, part{tail})", *less]
        return lines

    def _look(self) -> list[str]:
        """Lines that leave in `missed` and `lost` what the planes lose of `x` (see `guard`)."""
        axis = f"axis={self._axis}, keep_dims=True"
        inside = f"(p < {self.real_p}) & (r < {self.real_r})"
        lost = f"tl.where(tl.abs(x) < {REMOTE!r}, {EXTREME}, (size < {TINY!r}).to(tl.int32))"
        return [
            "size = tl.abs(x * scale)",
            f"missed = tl.sum(((size < {MISSED!r}) & {inside}).to(tl.int32), {axis})",
            f"lost = tl.max(tl.where(x != 0.0, {lost}, 0), {axis})",
        ]

    def _note(self, tile: Tile, whole: bool) -> list[str]:
        """Lines that store the loss of the rows.

        Args:
            tile: the tile.
            whole: whether a program has whole rows; else several of them add up what they see.
        """
        at, mask = f"loss_ptr + {self._row()}", self._inside(tile, self.row_of)
        lines = [
            "missed = tl.where(top > 0, missed, 0)",
            f"lost = tl.where({self.planes.prefix}_extreme(top), {EXTREME}, lost)",
        ]
        if whole:
            return [*lines, f"tl.store({at}, tl.where(lost < {EXTREME}, missed * 2 + lost, lost), mask={mask})"]
        return [
            *lines,
            f'tl.atomic_add({at}, missed * 2, mask={mask} & (missed > 0), sem="relaxed")',
            f'tl.atomic_or({at}, lost, mask={mask} & (lost > 0), sem="relaxed")',
        ]

    def _kernel(
        self, suffix: str, extra: list[str], doc: str, body: list[str], tile: Tile, arguments: list[str]
    ) -> tuple[str, str]:
        nest = self.plan.nest
        numbers = sources_of(self.side)
        parameters = [f"x{i}" if nest.sources[i].scalar else f"x{i}_ptr" for i in numbers] + extra
        passed = [f"float({self.planes.names[i]})" if nest.sources[i].scalar else self.planes.names[i] for i in numbers]
        p_blocks, r_blocks = self._blocks(tile)
        kernel = f"{self.name}{suffix}_kernel"
        text = KERNEL.format(
            name=kernel, parameters=", ".join(parameters), doc=doc, body="\n".join(f"    {b}" for b in body)
        )
        grid = p_blocks * r_blocks * self.batch
        sizes = f"PB={tile.pb}, RB={tile.rb}, num_warps={tile.warps}"
        return text, f"{kernel}[({grid},)]({', '.join([*passed, *arguments, sizes])})"

    def _text(self, doc: str, made: list[str], steps: list[tuple[str, str]], result: str) -> str:
        """`steps` and the host function that allocates `made`, launches them and returns `result`."""
        numbers = sources_of(self.side)
        names = [self.planes.names[i] for i in numbers]
        tensor = next(self.planes.names[i] for i in numbers if not self.plan.nest.sources[i].scalar)
        lines = [f"device = {tensor}.device", *made, *(line for _, line in steps), f"return {result}"]
        head = [f"def {self.name}({', '.join(names)}):", f'    """{doc}"""', *(f"    {line}" for line in lines)]
        return "".join(text for text, _ in steps) + "\n\n" + "\n".join(head) + "\n"


__all__ = ["KERNEL", "Parts", "Tile"]
