"""Pieces of kernels that walk rows and columns: variables, running values, kernels and launches.

Deals in lines of kernel text. Knows nothing about the forms that are made of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

from qimeng.coder.template.nest.contracted import is_product
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.ir import is_wide
from qimeng.coder.template.nest.rows import Group, RowPlan
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.accumulate import Accumulator
from qimeng.coder.template.triton.emitter import Emitter, Walk, without_unused
from qimeng.coder.template.triton.row_edges import edges_of
from qimeng.family import Unsupported


class Cut(Protocol):
    """What a schedule says about rows and columns; each family says more about its own."""

    @property
    def form(self) -> str:
        """Who walks a row."""

    @property
    def block_p(self) -> int:
        """Rows a program."""

    @property
    def block_r(self) -> int:
        """Columns a step."""

    @property
    def splits(self) -> int:
        """Programs that share a row."""

    @property
    def warps(self) -> int:
        """Warps a program."""

    @property
    def stages(self) -> int:
        """Depth of software pipelining."""

    @property
    def fast(self) -> bool:
        """Special functions in few instructions."""


@dataclass
class Pieces:
    """What the forms are printed from: rows and columns as variables, running values, kernels with their launches.

    Attributes:
        plan: the region as rows and columns.
        schedule: form and block sizes.
        prefix: beginning of every top-level name.
        helpers: functions that the kernels or the entry function call.
        kernels: source of each kernel.
        launches: lines of the entry function after its outputs are allocated; ``DEVICE`` stands for the device.
        backwards: columns are numbered from the last one; they must be one group.
    """

    plan: RowPlan
    schedule: Cut
    prefix: str
    helpers: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    backwards: bool = False

    def __post_init__(self) -> None:
        s, self.nest, self.loads = self.schedule, self.plan.nest, self.plan.loads
        self.PB, self.RB = s.block_p, s.block_r
        self.row_outer, self.row_inner = _cut(self.plan.rows, self.PB)
        self.col_outer, self.col_inner = _cut(self.plan.columns, self.RB)
        if s.form == "resident":
            self.col_outer, self.col_inner = (), self.plan.columns
            if self.plan.column_count > self.RB:
                raise Unsupported(f"a resident row needs block_r >= {self.plan.column_count}, got {self.RB}")
        self.row_blocks = -(-extent_of(self.row_inner) // self.PB)
        self.col_blocks = -(-extent_of(self.col_inner) // self.RB)
        self.programs = self.row_blocks * extent_of(self.row_outer)
        self.steps = self.col_blocks * extent_of(self.col_outer)
        self.edges = edges_of(self.plan) if s.form in ("wave", "cooperative") and self.PB == 1 else None
        self.wide = is_wide(self.nest, [s for s, _ in self.nest.accesses()])
        self.row_outputs = [i for i, (e, *_) in enumerate(self.nest.outputs) if not self._changes_along_columns(e)]
        self.full_outputs = [i for i in range(len(self.nest.outputs)) if i not in self.row_outputs]

    def _changes_along_columns(self, e: Expr) -> bool:
        inside = {a for g, _ in self.plan.columns for a in g}
        return bool({a for d in e.dims for a in d} & inside)

    def parameters(self, extra: list[str]) -> tuple[list[str], list[str]]:
        """Kernel parameters and call arguments for every tensor."""
        used = {e.param for e in self.nest.exprs if e.op == "load"}
        params, args = [], []
        for s in self.nest.sources:
            if s.number in used:
                name = self.loads.names[s.number]
                params.append(f"x{s.number}" if s.scalar else f"x{s.number}_ptr")
                args.append(f"float({name})" if s.scalar else name)
        for i in range(len(self.nest.outputs)):
            params.append(f"y{i}_ptr")
            args.append(f"y{i}")
        return params + extra, args + extra

    def kernel(self, name: str, body: list[str], extra: list[str], grid: str, more: str = "") -> None:
        """Add a kernel and its launch, with the parameters that it uses; `more` are launch options."""
        lines = without_unused(body)
        words = set(re.findall(r"\w+", "\n".join(lines)))
        params, args = zip(
            *[pair for pair in zip(*self.parameters(extra), strict=True) if pair[0] in words], strict=True
        )
        head = f"@triton.jit\ndef {self.prefix}_{name}({', '.join(params)}, PB: tl.constexpr, RB: tl.constexpr):\n"
        self.kernels.append(head + "\n".join(f"    {line}" for line in lines) + "\n")
        options = f"PB={self.PB}, RB={self.RB}, num_warps={self.schedule.warps}{more}"
        self.launches.append(f"{self.prefix}_{name}[({grid},)]({', '.join(args)}, {options})")

    def rows(self, block: str) -> tuple[list[str], list[Walk]]:
        """Lines that set the row variables from the row-block number, and their walks."""
        lines = [f"block = tl.cast({block}, tl.int64)" if self.wide else f"block = {block}"]
        walks = _decompose(lines, self.row_outer, f"block // {self.row_blocks}", "a", "")
        start = f"(block % {self.row_blocks}) * PB" if self.row_outer else "block * PB"
        lines += [
            f"p_base = {start}",
            "p_lane = tl.arange(0, PB)[:, None]",
            "p = p_base + p_lane",
            "p_zero = p_lane * 0",
        ]
        if extent_of(self.row_inner) % self.PB:
            lines.append(f"p_mask = p < {extent_of(self.row_inner)}")
        walks += _decompose(lines, self.row_inner, "p", "p", "p")
        return lines + (self.edges.rows(walks) if self.edges else []), walks

    def columns(self, step: str) -> tuple[list[str], list[Walk]]:
        """Lines that set the column variables from the step number, and their walks."""
        if self.backwards:
            return self._columns_backwards(step)
        lines: list[str] = []
        walks = _decompose(lines, self.col_outer, f"({step}) // {self.col_blocks}", "b", "")
        number = f"({step}) % {self.col_blocks}" if self.col_outer else step
        start = f"(block * 0 + {number}) * RB" if self.wide else f"({number}) * RB"
        lines += [
            f"r_base = {start}" + (" + head" if self.edges else ""),
            "r_lane = tl.arange(0, RB)[None, :]",
            "r = r_base + r_lane",
            "r_zero = r_lane * 0",
        ]
        if self.edges:
            lines.append(f"r_mask = ({number}) * RB + r_lane < main")
        elif extent_of(self.col_inner) % self.RB:
            lines.append(f"r_mask = r < {extent_of(self.col_inner)}")
        walks += _decompose(lines, self.col_inner, "r", "r", "r")
        return lines, [replace(w, column=True) for w in walks]

    def _columns_backwards(self, step: str) -> tuple[list[str], list[Walk]]:
        lines = [
            f"r_base = {extent_of(self.col_inner) - 1} - ({'block * 0 + ' if self.wide else ''}{step}) * RB",
            "r_lane = 0 - tl.arange(0, RB)[None, :]",
            "r = r_base + r_lane",
            "r_zero = r_lane * 0",
        ]
        if extent_of(self.col_inner) % self.RB:
            lines.append("r_mask = r >= 0")
        walks = _decompose(lines, self.col_inner, "r", "r", "r")
        return lines, [replace(w, column=True) for w in walks]

    def emitter(self, walks: list[Walk]) -> Emitter:
        """An emitter with the masks that overhanging blocks need."""
        masks = {}
        if extent_of(self.row_inner) % self.PB:
            masks["p"] = "p_mask"
        if self.edges or extent_of(self.col_inner) % self.RB:
            masks["r"] = "r_mask"
        aligned = self.edges.vector if self.edges else 0
        return Emitter(self.nest, walks, self.wide, masks, fast=self._fast(), aligned=aligned)

    def _fast(self) -> str:
        """How special functions are computed: half types show less, where nothing else is read or written."""
        return self.nest.finest if self.schedule.fast else ""

    def accumulators(self, level: int, letter: str = "s") -> list[tuple[Expr, Accumulator]]:
        """The reductions of pass `level` with their running values, whose names begin with `letter`."""
        found = []
        for i, e in enumerate(self.nest.reductions(level)):
            dtype = compute_dtype(e.args[0].dtype if e.param not in ("sum", "prod") else e.dtype)
            dtype = "int32" if dtype == "bool" else dtype
            name, single, lone = f"{letter}{level}_{i}", self.PB == 1, self.PB > 1 == self.RB
            product = e.param == "sumexp" and is_product(e.args[0])
            held = ops.TRITON_DTYPE[dtype]
            found.append((e, Accumulator(e.param, name, held, is_float(dtype), single, lone, product)))
        return found

    def define(self, em: Emitter, e: Expr, acc: Accumulator) -> None:
        """Make the results of a finished reduction known to the emitter."""
        em.define(e, acc.result)
        for part in self.nest.exprs:
            if part.op == "part" and part.args[0] is e:
                em.define(part, f"{acc.name}_{part.param}")

    def index(self, em: Emitter, e: Expr) -> str:
        """Position along the reduced axes, as argmax and argmin count it."""
        if e.param not in ("argmax", "argmin"):
            return "r"
        steps, size = {}, 1
        for atom in reversed(e.reduced):
            steps[atom] = size
            size *= self.nest.axes.size(atom)
        return f"({em.offset(steps)})"

    def row_number(self) -> str:
        """The number of each of the block's rows among all rows, as text."""
        inner = extent_of(self.row_inner)
        return f"(block // {self.row_blocks}) * {inner} + p" if self.row_outer else "p"

    def flush(self, em: Emitter) -> list[str]:
        """The lines printed so far, taken from the emitter."""
        lines, em.lines = em.lines, []
        return lines

    def inside(self, split: str) -> str:
        """How many columns of step `split` exist."""
        if self.edges:
            return f"tl.maximum(tl.minimum(main - ({split}) * RB, RB), 0)"
        return f"tl.minimum({extent_of(self.col_inner)} - ({split} % {self.col_blocks}) * RB, RB)"


def _cut(groups: tuple[Group, ...], block: int) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Outer groups (scalars) and the inner ones that a vector of `block` walks."""
    cut = len(groups)
    extent = 1
    while cut and (cut == len(groups) or extent < block):
        cut -= 1
        extent *= groups[cut][1]
    return groups[:cut], groups[cut:]


def extent_of(groups: tuple[Group, ...]) -> int:
    """Number of positions that `groups` walk."""
    return prod(e for _, e in groups)


def _decompose(lines: list[str], groups: tuple[Group, ...], number: str, letter: str, side: str) -> list[Walk]:
    """Variables for `groups` taken from their flat number."""
    if len(groups) == 1 and side:
        return [Walk(letter, groups[0][0], groups[0][1], side, base=f"{letter}_base", lane=f"{letter}_lane")]
    walks, below = [], 1
    for i, (atoms, extent) in reversed(list(enumerate(groups))):
        name = f"{letter}{i}"
        text = f"({number})" if below == 1 else f"({number}) // {below}"
        lines.append(f"{name} = {text}" + (f" % {extent}" if i else ""))
        walks.append(Walk(name, atoms, extent, side))
        below *= extent
    return walks


__all__ = ["Cut", "Pieces", "extent_of"]
