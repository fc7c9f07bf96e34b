"""The tile family as Triton source: pointwise, reductions, softmax-like programs and normalizations.

A program owns a block of rows ([PB, 1]) and walks their columns in steps ([1, RB]). Forms (see `Schedule.form`):
``resident`` keeps a whole row in registers; ``loop`` passes over it once a level of reductions and once more for the
outputs; ``split`` (`qimeng.coder.template.tile_split`) does the same with several programs a row and one launch a pass;
``wave`` and ``cooperative`` (`qimeng.coder.template.tile_shared`) share a row in one launch. Deals in kernel text.
Knows nothing about which schedule is good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import prod

from qimeng.coder.template import ops
from qimeng.coder.template.accumulate import Accumulator
from qimeng.coder.template.axes import Unsupported
from qimeng.coder.template.emitter import Emitter, Walk, without_unused
from qimeng.coder.template.ir import Expr, Nest, is_wide
from qimeng.coder.template.sources import Loads
from qimeng.coder.template.tile_edges import edges_of
from qimeng.coder.template.tile_plan import Group, TilePlan, power_of_two
from qimeng.coder.template.tile_shared import print_shared_row
from qimeng.coder.template.tile_split import print_split_row
from qimeng.program.program import Implementation
from qimeng.program.schedule import Schedule

PRODUCT = """
@triton.jit
def _product(a, b):
    return a * b
"""


def print_tile(
    nest: Nest, loads: Loads, plan: TilePlan, schedule: Schedule, prefix: str, inputs: int
) -> Implementation:
    """The implementation of `nest` under `schedule`.

    Args:
        nest: the loop nest, with its plan.
        loads: how inputs reach the kernels.
        plan: rows and columns.
        schedule: form and block sizes.
        prefix: beginning of every top-level name.
        inputs: number of the region's inputs.
    """
    printer = Printer(nest, loads, plan, schedule, prefix)
    source = printer.print(inputs)
    return Implementation("triton", source, f"{prefix}_run", schedule=schedule)


@dataclass
class Printer:
    """Prints one nest under one schedule: kernels, and the entry function that launches them.

    Attributes:
        nest, loads, plan, schedule, prefix: as `print_tile` takes them.
        helpers: functions that the kernels or the entry function call.
        kernels: source of each kernel.
        launches: lines of the entry function after its outputs are allocated; ``DEVICE`` stands for the device.
    """

    nest: Nest
    loads: Loads
    plan: TilePlan
    schedule: Schedule
    prefix: str
    helpers: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.schedule
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
        self.edges = edges_of(self.nest, self.plan) if s.form in ("wave", "cooperative") and self.PB == 1 else None
        self.wide = is_wide(self.nest, [s for s, _ in self.nest.accesses()])
        self.row_outputs = [i for i, (e, *_) in enumerate(self.nest.outputs) if not self._changes_along_columns(e)]
        self.full_outputs = [i for i in range(len(self.nest.outputs)) if i not in self.row_outputs]

    def _changes_along_columns(self, e: Expr) -> bool:
        inside = {a for g, _ in self.plan.columns for a in g}
        return bool({a for d in e.dims for a in d} & inside)

    # -- the whole file

    def print(self, inputs: int) -> str:
        """The source: helpers, kernels, entry function."""
        form = self.schedule.form
        if form in ("resident", "loop"):
            self._single()
        elif self.plan.passes == 0:
            self._pointwise()
        elif form in ("wave", "cooperative"):
            print_shared_row(self)
        else:
            print_split_row(self)
        if any(e.param == "prod" for e in self.nest.reductions()):
            self.helpers.append(PRODUCT)
        return "".join(self.helpers) + "\n".join(self.kernels) + "\n" + self._run(inputs)

    def _run(self, inputs: int) -> str:
        first = next((f"x{i}" for i, _ in enumerate(range(inputs))), None)
        lines = [f"def {self.prefix}_run({', '.join(f'x{i}' for i in range(inputs))}):"]
        lines += [f"    {line}" for line in self.loads.prelude]
        tensors = [self.loads.names[s.number] for s in self.nest.sources if not s.scalar]
        device = f"{tensors[0]}.device" if tensors else f"{first}.device"
        for i, (_, shape, stride, dtype) in enumerate(self.nest.outputs):
            lines.append(f"    y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device={device})")
        lines += [f"    {line.replace('DEVICE', device)}" for line in self.launches]
        return "\n".join([*lines, f"    return ({', '.join(f'y{i}' for i in range(len(self.nest.outputs)))},)"]) + "\n"

    # -- pieces shared by the forms

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
            dtype = ops.compute_dtype(e.args[0].dtype if e.param not in ("sum", "prod") else e.dtype)
            dtype = "int32" if dtype == "bool" else dtype
            name, single = f"{letter}{level}_{i}", self.PB == 1
            found.append((e, Accumulator(e.param, name, ops.TRITON_DTYPE[dtype], ops.is_float(dtype), single)))
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

    def flush(self, em: Emitter) -> list[str]:
        """The lines printed so far, taken from the emitter."""
        lines, em.lines = em.lines, []
        return lines

    def _hoist(self, em: Emitter, e: Expr) -> bool:
        """Print the parts of `e` that do not change along the columns and are known; False where one is not yet."""
        if id(e) in em.names:
            return True
        known = all([self._hoist(em, a) for a in e.operands()])
        if not known or e.op in ("reduce", "part", "dot"):
            return False
        if "r" not in em.side(e) and not self._walks_columns(em, e):
            em.value(e)
        return True

    def _walks_columns(self, em: Emitter, e: Expr) -> bool:
        """True where `e` depends on a column axis that a scalar of the loop walks."""
        scalars = {a for w in em.walks if w.side == "" and w.column for a in w.atoms}
        return bool(e.depends & scalars)

    def _loop(self, em: Emitter, columns: list[str], body: list[str], low: str, high: str) -> list[str]:
        stages = f", num_stages={self.schedule.stages}" if self.schedule.stages > 1 else ""
        return [f"for t in tl.range({low}, {high}{stages}):", *[f"    {line}" for line in [*columns, *body]]]

    def reduce_pass(self, em: Emitter, level: int, columns: list[str], low: str, high: str) -> list[str]:
        """One pass over the columns that finishes the reductions of `level`."""
        accs = self.accumulators(level)
        for e, _ in accs:
            self._hoist(em, e.args[0])
        lines = self.flush(em)
        outside = dict(em.names)
        for _, acc in accs:
            lines += acc.start()
        for e, acc in accs:
            x = em.value(e.args[0])
            em.lines += acc.take(x, em.masks.get("r", ""), self.index(em, e))
        lines += self._loop(em, columns, self.flush(em), low, high)
        em.names = outside
        for e, acc in accs:
            lines += acc.collapse()
            self.define(em, e, acc)
        return lines

    def store_rows(self, em: Emitter) -> list[str]:
        """Store the outputs that do not change along the columns."""
        for i in self.row_outputs:
            em.store(i, sides="p")
        return self.flush(em)

    # -- the forms

    def _single(self) -> None:
        """`resident` and `loop`: one program does all of its rows."""
        rows, row_walks = self.rows("tl.program_id(0)")
        resident = self.schedule.form == "resident"
        columns, col_walks = self.columns("0" if resident else "t")
        em = self.emitter(row_walks + col_walks)
        body = list(rows)
        if resident:
            body += columns
            for level in range(1, self.plan.passes + 1):
                for e, acc in self.accumulators(level):
                    x = em.value(e.args[0])
                    em.lines += acc.whole(x, em.masks.get("r", ""), str(self.plan.column_count), self.index(em, e))
                    self.define(em, e, acc)
            for i in self.row_outputs:
                em.store(i, sides="p")
            for i in self.full_outputs:
                em.store(i)
            body += self.flush(em)
        else:
            for level in range(1, self.plan.passes + 1):
                body += self.reduce_pass(em, level, columns, "0", str(self.steps))
            body += self.store_rows(em)
            columns, _ = self.columns(f"{self.steps - 1} - t")  # backwards: what was read last is still in the cache
            body += self.output_pass(em, columns, "0", str(self.steps))
        self.kernel("rows", body, [], str(self.programs))

    def output_pass(self, em: Emitter, columns: list[str], low: str, high: str) -> list[str]:
        """One pass over the columns that stores the outputs which change along them."""
        if not self.full_outputs:
            return []
        for i in self.full_outputs:
            self._hoist(em, self.nest.outputs[i][0])
        lines = self.flush(em)
        for i in self.full_outputs:
            em.store(i)
        return lines + self._loop(em, columns, self.flush(em), low, high)

    def _pointwise(self) -> None:
        """No reductions: a program a tile."""
        rows, row_walks = self.rows(f"pid // {self.steps}" if self.programs > 1 else "0")
        columns, col_walks = self.columns(f"pid % {self.steps}" if self.programs > 1 else "pid")
        em = self.emitter(row_walks + col_walks)
        for i in range(len(self.nest.outputs)):
            em.store(i)
        body = ["pid = tl.program_id(0)", *rows, *columns, *self.flush(em)]
        self.kernel("tiles", body, [], str(self.programs * self.steps))

    def partial_stores(
        self, accs: list[tuple[Expr, Accumulator]], level: int, splits: int, split: str = "split", space: str = "w"
    ) -> list[str]:
        """Store each partial result at [component, row, split] of a workspace."""
        lines = [f"row = {self._row_number()}"]
        total = self.plan.row_count
        mask = ", mask=p_mask" if extent_of(self.row_inner) % self.PB else ""
        for kind, name in self._components(accs):
            place = f"{space}{level}{kind}_ptr + ({self._slot(accs, name)} * {total} + row) * {splits} + {split}"
            lines.append(f"tl.store({place}, {name}{mask})")
        return lines

    def _components(self, accs: list[tuple[Expr, Accumulator]]) -> list[tuple[str, str]]:
        """(workspace, variable) of every partial result: float ones in ``f``, integer ones in ``i``."""
        found = []
        for _, acc in accs:
            for part in acc.parts:
                integer = not acc.floating or part.endswith("_at")
                found.append(("i" if integer else "f", part))
        return found

    def _slot(self, accs: list[tuple[Expr, Accumulator]], name: str) -> int:
        kinds = self._components(accs)
        kind = next(k for k, n in kinds if n == name)
        return [n for k, n in kinds if k == kind].index(name)

    def _row_number(self) -> str:
        inner = extent_of(self.row_inner)
        return f"(block // {self.row_blocks}) * {inner} + p" if self.row_outer else "p"

    def partial_loads(self, em: Emitter, level: int, splits: int, space: str = "w") -> list[str]:
        """Combine the partial results of `level` and make them known."""
        accs = self.accumulators(level)
        wide = power_of_two(splits)
        total = self.plan.row_count
        lines = [f"row = {self._row_number()}", f"slots = tl.arange(0, {wide})[None, :]"]
        mask = f"(slots < {splits})" if wide != splits else "(slots >= 0)"
        guard = f"{mask} & p_mask" if extent_of(self.row_inner) % self.PB else mask
        for e, acc in accs:
            names = []
            for kind, name in self._components([(e, acc)]):
                slot = self._slot(accs, name)
                names.append(f"{name}_parts")
                place = f"{space}{level}{kind}_ptr + ({slot} * {total} + row) * {splits} + slots"
                lines.append(f"{name}_parts = tl.load({place}, mask={guard}, other=0)")
            lines += acc.merge(names, mask)
            self.define(em, e, acc)
        return lines

    def inside(self, split: str) -> str:
        """How many columns of step `split` exist."""
        if self.edges:
            return f"tl.maximum(tl.minimum(main - ({split}) * RB, RB), 0)"
        return f"tl.minimum({extent_of(self.col_inner)} - ({split} % {self.col_blocks}) * RB, RB)"

    def workspaces(self, splits: int, space: str = "w") -> list[str]:
        """Allocate workspaces in the entry function; returns their parameter names."""
        names = []
        for level in range(1, self.plan.passes + 1):
            accs = self.accumulators(level)
            kinds = [k for k, _ in self._components(accs)]
            for kind, dtype in (("f", self._float_dtype(accs)), ("i", "int64")):
                if kind in kinds:
                    size = kinds.count(kind) * self.plan.row_count * splits
                    self.launches.append(
                        f"{space}{level}{kind}_ptr = torch.empty({size}, dtype=torch.{dtype}, device=DEVICE)"
                    )
                    names.append(f"{space}{level}{kind}_ptr")
        return names

    def _float_dtype(self, accs: list[tuple[Expr, Accumulator]]) -> str:
        return "float64" if any(a.dtype == "tl.float64" for _, a in accs) else "float32"


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
