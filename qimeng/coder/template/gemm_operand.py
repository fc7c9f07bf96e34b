"""How an operand of a matrix product reaches the main loop: as packed planes, or read there and split where need be.

What is read there comes through a descriptor of the tensor's own, or by pointers.

Deals in kernel parameters, the lines of the entry function that make them, and the lines that load one block. Knows
nothing about the loop around them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from qimeng.coder.template.emitter import Emitter, Walk
from qimeng.coder.template.gemm_plan import Atoms, GemmPlan, Side, reach
from qimeng.coder.template.gemm_scheme import Scheme, is_inline, is_packed, scheme_of, through_registers
from qimeng.coder.template.ir import Nest, coalesce, is_wide
from qimeng.coder.template.ops import TRITON_DTYPE
from qimeng.graph.opgraph import itemsize
from qimeng.program.schedule import Schedule

Tables = Sequence[dict[int, int]]


def round_up(x: int, m: int) -> int:
    """`x` rounded up to a multiple of `m`."""
    return -(-x // m) * m


def spread(
    nest: Nest, atoms: Atoms, tables: Tables, index: str, side: str = "", stem: str = ""
) -> tuple[list[str], list[Walk]]:
    """Variables that walk `atoms`, from one flat index over all of them.

    Args:
        nest: the nest.
        atoms: axes, outermost first.
        tables: strides of the accesses that will use the variables.
        index: the flat index.
        side: the tile's side it lies along; empty for a scalar.
        stem: beginning of the names of new variables, by default the index itself.

    Returns:
        Lines that define the variables, and the walks.
    """
    groups = coalesce(nest, atoms, tables)
    stem, suffix = stem or index, ".to(tl.int64)" if is_wide(nest, tables) else ""
    lines, walks = [], []
    inner = 1
    for i, group in reversed(list(enumerate(groups))):
        extent = nest.axes.extent(group)
        text = index if inner == 1 else f"{index} // {inner}"
        text = f"{text} % {extent}" if i else text
        text = f"({text}){suffix}" if suffix else text
        name = index if text == index else f"{stem}_{i}"
        if name != text:
            lines.append(f"{name} = {text}")
        walks.append(Walk(name, tuple(group), extent, side))
        inner *= extent
    return lines, walks[::-1]


@dataclass
class Operand(ABC):
    """One operand, ready to be printed.

    Attributes:
        side: what it is.
        parameters: the kernel's parameters for it.
        arguments: what the entry function passes for them.
        host: lines of the entry function before the launch.
        setup: lines of the kernel before the loop.
        prefix: beginning of the file's top-level names.
        names: number of a source to its variable in the entry function.
        sources: numbers of the sources that the main kernel itself reads for it.
        scale: name of the pointer to what tells the scales of its rows; empty without.
        stride: rows of the block matrix between two planes.
        padded: rows (of A) or columns (of B) rounded up to the block.
    """

    side: Side
    plan: GemmPlan
    schedule: Schedule
    prefix: str = ""
    names: dict[int, str] = field(default_factory=dict)
    sources: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    host: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    scale: str = ""
    stride: int = 0
    padded: int = 0

    def __post_init__(self) -> None:
        self._arrange()

    @abstractmethod
    def _arrange(self) -> None:
        """Fill in parameters, arguments, host and setup lines."""

    @abstractmethod
    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave the block at depth `k` (of the plane that starts `plane` rows down) in `target`."""

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

    @property
    def at_rows(self) -> str:
        """The places of the tile's rows among their scales."""
        return f"z * {self.padded} + {self.rows}" if self.plan.batch else self.rows

    def inverse(self) -> str:
        """The inverse scales of the tile's rows."""
        return f"tl.load({self.scale} + {self.at_rows})"

    def loss(self, rows: str) -> list[str]:
        """Lines that leave in `<name>_loss` what the planes of the flat `rows` lose (`gemm_guard`)."""
        name = self.side.name
        at = f"z * {self.padded} + {rows}" if self.plan.batch else rows
        return [f"{name}_loss = tl.load({name}_loss_ptr + {at})"]

    @property
    def loss_pointer(self) -> str:
        """The kernel parameter that `loss` reads."""
        return f"{self.side.name}_loss_ptr"

    @property
    def uses_positions(self) -> bool:
        """Whether `fetch` reads the vectors of rows or columns, which otherwise wait until after the loop."""
        return not any("TensorDescriptor" in line for line in self.host)

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

    @property
    def depth(self) -> str:
        """The depths of a block as a vector along the operand's own side."""
        return "tl.arange(0, BK)[None, :]" if self.is_a else "tl.arange(0, BK)[:, None]"


class Planes(Operand):
    """Zero-padded planes, stacked as the rows of one matrix, so that the loop needs no masks."""

    def _arrange(self) -> None:
        scheme, (batch, m, n, k) = scheme_of(self.plan, self.schedule), self.plan.shape
        name, s = self.side.name, self.schedule
        self.padded = round_up(m if self.is_a else n, s.block_m if self.is_a else s.block_n)
        self.deep = round_up(k, s.block_k)
        self.high, self.wide = (self.padded, self.deep) if self.k_major else (self.deep, self.padded)
        self.stride = batch * self.high
        if s.descriptors:
            box = (self.rows_of_block, s.block_k) if self.k_major else (s.block_k, self.rows_of_block)
            self.parameters, self.arguments = [name], [name]
            shape = f"[{scheme.planes * self.stride}, {self.wide}], [{self.wide}, 1], [{box[0]}, {box[1]}]"
            self.host = [f"{name} = TensorDescriptor({name}_planes, {shape})"]
        else:
            self.parameters, self.arguments = [f"{name}_ptr"], [f"{name}_planes"]
            self.big = scheme.planes * self.stride * self.wide >= 1 << 31
        if scheme.scaled:
            self.scale = f"{name}_inverse_ptr"
            self.parameters += [self.scale, self.loss_pointer]
            self.arguments += [f"{name}_inverse", f"{name}_loss"]

    @property
    def made(self) -> tuple[str, ...]:
        """The planes, the inverses of their scales, and what they lose."""
        name = self.side.name
        return (f"{name}_planes", f"{name}_inverse", f"{name}_loss") if self.scale else (f"{name}_planes",)

    @property
    def k_major(self) -> bool:
        """Whether a plane runs along the depth; TF32 wants that, 16-bit planes stay as the tensor lies."""
        return self.side.k_major or scheme_of(self.plan, self.schedule).dtype == "float32"

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block of a plane in `target`."""
        name = self.side.name
        base = [] if plane == "0" else [plane]
        base += [f"z * {self.high}"] if self.plan.batch else []
        if self.schedule.descriptors:
            row, column = (self.start, k) if self.k_major else (k, self.start)
            turned = self.k_major != self.is_a
            return [f"{target} = {name}.load([{' + '.join([*base, row])}, {column}]){'.T' if turned else ''}"]
        deep = f"({k} + {self.depth})"
        row, column = (self.rows, deep) if self.k_major else (deep, self.rows)
        row = f"({' + '.join([*base, row])})" + (".to(tl.int64)" if self.big else "")
        return [f"{target} = tl.load({name}_ptr + {row} * {self.wide} + {column})"]


class Tensor(Operand):
    """A tensor read through a descriptor of its own, which fills what overhangs with zeros."""

    def _arrange(self) -> None:
        name, s = self.side.name, self.schedule
        assert self.side.plain is not None
        number = self.side.plain.param
        strides_found = strides_of_tensor(self.plan, self.side)
        assert strides_found is not None
        z, row, k = strides_found
        batch, m, n, depth = self.plan.shape
        rows, block = (m, s.block_m) if self.is_a else (n, s.block_n)
        self.k_major = k == 1
        shape, strides, box = [rows, depth], [row, 1], [block, s.block_k]
        if not self.k_major:
            shape, strides, box = [depth, rows], [k, 1], [s.block_k, block]
        if self.plan.batch:
            shape, strides, box = [batch, *shape], [z, *strides], [1, *box]
        self.parameters, self.arguments = [name], [name]
        self.host = [
            f"{name} = TensorDescriptor({self.prefix}_aligned({self.names[number]}), {shape}, {strides}, {box})"
        ]

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block in `target`."""
        name, first, second = self.side.name, *((self.start, k) if self.k_major else (k, self.start))
        turn = ".T" if self.k_major != self.is_a else ""
        if self.plan.batch:
            shape = f"({self.block}, BK)" if self.k_major else f"(BK, {self.block})"
            return [f"{target} = {name}.load([z, {first}, {second}]).reshape{shape}{turn}"]
        return [f"{target} = {name}.load([{first}, {second}]){turn}"]


class Pointers(Operand):
    """Any expression of tensors with any strides, computed in the loop from masked loads."""

    def _arrange(self) -> None:
        plan, s, nest = self.plan, self.schedule, self.plan.nest
        batch, m, n, k = plan.shape
        tables = [nest.load_strides(e) for e in self.side.loads]
        name, me = self.side.name, "p" if self.is_a else "r"
        zs, self.z_walks = spread(nest, plan.batch, tables, "z", stem=f"{name}_z")
        rows, self.row_walks = spread(nest, self.side.rows, tables, self.rows, me, f"{name}_row")
        self.setup = zs + rows
        self.deep_lines, self.depth_walks = spread(nest, plan.k, tables, f"{name}_k", "r" if me == "p" else "p")
        extent, block = (m, s.block_m) if self.is_a else (n, s.block_n)
        self.masks = {me: f"{'m' if self.is_a else 'n'}_ok"} if extent % block else {}
        if k % s.block_k:
            self.masks["r" if me == "p" else "p"] = f"{name}_k < {k}"
        self.sources = sources_of(self.side)

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block in `target`."""
        name, nest = self.side.name, self.plan.nest
        lines = [f"{name}_k = {k} + {self.depth}", *self.deep_lines]
        masks = {s: f"({m})" for s, m in self.masks.items()}
        em = Emitter(nest, [*self.z_walks, *self.row_walks, *self.depth_walks], masks=masks)
        mask = em.mask("pr")
        shape = "[BM, BK]" if self.is_a else "[BK, BN]"
        if self.side.plain is not None:
            strides = nest.load_strides(self.side.plain)
            inside = em.mask(em.side_of(strides))
            other = f", mask={inside}, other=0.0" if inside else ""
            lines.append(f"{target} = tl.load(x{self.side.plain.param}_ptr + {em.offset(strides)}{other})")
            if em.side_of(strides) != "pr":
                lines.append(f"{target} = tl.broadcast_to({target}, {shape})")
        else:
            value = em.value(self.side.expr)
            lines += em.lines
            full = value if em.side(self.side.expr) == "pr" else f"{value} + tl.zeros({shape}, tl.float32)"
            lines.append(f"{target} = tl.where({mask}, {full}, 0.0)" if mask else f"{target} = {full}")
            if self.plan.half:
                lines.append(f"{target} = {target}.to({TRITON_DTYPE[self.plan.dtype]})")
        return lines


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


def plane_of(scheme: Scheme, prefix: str, rest: str, name: str, plane: int, last: bool) -> list[str]:
    """Lines that round `rest` to a plane and, where more planes follow, leave in it what that plane lacks."""
    may_overflow = scheme.dtype == "bfloat16" and plane == 0
    rounded = f"{prefix}_bfloat16({rest})" if may_overflow else f"{rest}.to({TRITON_DTYPE[scheme.dtype]})"
    lines = [f"{name} = {rounded}"]
    if not last:
        less = f"{rest} - {name}.to(tl.float32)"
        lines.append(f"{rest} = ({less}) * {2.0**scheme.shift!r}" if scheme.shift else f"{rest} = {less}")
    return lines


def strides_of_tensor(plan: GemmPlan, side: Side) -> tuple[int, int, int] | None:
    """Strides along batch, rows and depth where each is one walk and a descriptor can take them; else None."""
    nest = plan.nest
    if side.plain is None:
        return None
    source, strides = nest.sources[side.plain.param], nest.load_strides(side.plain)
    found = []
    for atoms in (plan.batch, side.rows, plan.k):
        if atoms and len(coalesce(nest, atoms, [strides])) > 1:
            return None
        found.append(strides.get(atoms[-1], 0) if atoms else 16)
    size = itemsize(source.dtype)
    z, row, k = found
    steps = [s for s in (z, row, k) if s != 1]
    if 1 not in (row, k) or len(steps) > 2 or any(s <= 0 or s * size % 16 for s in steps):
        return None
    return z, row, k


def sources_of(side: Side) -> list[int]:
    """Numbers of the sources below an operand."""
    return sorted({e.param for e in reach([side.expr]) if e.op == "load"})


def operand(plan: GemmPlan, schedule: Schedule, side: Side, prefix: str, names: dict[int, str]) -> Operand:
    """The operand in the way the schedule asks for, or by pointers where that cannot be.

    Beside an operand that goes through registers, one that goes straight to the tensor cores is not read through a
    descriptor: Triton 3.6 then refills its stages too early. Measured on H200: TF32, 8 warps, 3 or 4 stages, one
    operand packed: errors of 0.4 to 1.7 where TF32's own are 1e-3, gone without descriptors or with both packed.
    """
    through = {s.name for s in plan.sides if through_registers(plan, schedule, s)}
    if through and side.name not in through:
        schedule = schedule.but(descriptors=False)
    if is_packed(plan, schedule, side):
        return Planes(side, plan, schedule, prefix, names)
    if is_inline(plan, schedule, side):
        return Inline(side, plan, schedule, prefix, names)
    if schedule.descriptors and plan.half and strides_of_tensor(plan, side) is not None:
        return Tensor(side, plan, schedule, prefix, names)
    return Pointers(side, plan, schedule, prefix, names)


__all__ = [
    "Inline",
    "Operand",
    "Planes",
    "Pointers",
    "Tensor",
    "operand",
    "plane_of",
    "round_up",
    "sources_of",
    "spread",
    "strides_of_tensor",
]
