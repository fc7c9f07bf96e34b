"""The tile family as CUDA C++: pointwise operators, reductions, softmax-like programs and normalizations.

The threads of a block share its rows: where rows are contiguous in memory, neighbours along x walk one row; else each
has a row of its own, and threads along y share that. Forms: ``resident`` keeps a whole row in registers; ``loop``
passes over it once a level of reductions and once more for the outputs; ``split`` does the same with several blocks a
row and one launch a pass. Where memory can be read several elements at a time, a text has two versions of its kernels:
that one, and one for tensors that do not begin at multiples of 16 bytes. Knows nothing about which schedule is good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod

from qimeng.coder.template.cuda.emitter import Emitter, check_printable, decomposed, positions
from qimeng.coder.template.cuda.ops import C_TYPE, compute_dtype, compute_type, is_float, needs_extremes
from qimeng.coder.template.cuda.prelude import RESULTS, STATE_NAMES, prelude
from qimeng.coder.template.families.tile.cuda_accesses import packed_sources, widest
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.contracted import beside_extreme
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.ir import is_wide
from qimeng.family import Unsupported
from qimeng.program.program import Implementation

UNROLLED = 4
"""Accesses that a thread makes before it waits for the first of them."""

MOST_HELD = 64
"""Elements of a row that a thread keeps in registers, at most."""

BLOCK_REGISTERS, OTHER_REGISTERS = 65536, 32
"""32-bit registers that a block may have on every GPU since compute capability 3.7, and those that a thread needs for
other things than its part of a row."""

GRID_BLOCKS = 32
"""Blocks of a pointwise kernel for each multiprocessor of the largest GPUs (`MULTIPROCESSORS`); beyond, blocks loop."""

MULTIPROCESSORS = 160

FAR = (1 << 31) - (1 << 25)
"""Positions from here on are counted in 64 bits; the rest is what a last stride of the grid may add."""


def print_rows_cuda(plan: TilePlan, schedule: TileSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as rows and columns.
        schedule: form, rows a block, blocks a row, warps.
        prefix: beginning of every top-level name.

    Raises:
        Unsupported: CUDA C++ is not printed for an operator, or the schedule does not fit.
    """
    check_printable(plan.nest)
    source = _Printer(plan, schedule, prefix).print(len(plan.region.inputs))
    return Implementation("cuda", source, f"{prefix}_run", schedule=schedule)


@dataclass
class _Version:
    """The kernels of one width of access.

    Attributes:
        vector: elements an access.
        kernels: (name, body) of each, in the order of their launches.
        launches: lines of the entry function.
    """

    vector: int
    kernels: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)


class _Printer:
    """Prints one nest under one schedule."""

    def __init__(self, plan: TilePlan, schedule: TileSchedule, prefix: str):
        nest = plan.nest
        self.nest, self.loads, self.plan, self.schedule, self.prefix = nest, plan.loads, plan, schedule, prefix
        self.wide = is_wide(nest, [s for s, _ in nest.accesses()]) or plan.row_count * plan.column_count >= FAR
        self.index = "long long" if self.wide else "int"
        self.along_row = plan.contiguous == "r"
        threads = schedule.warps * 32
        if threads > 1024:
            raise Unsupported(f"{schedule.warps} warps are {threads} threads, a block has at most 1024")
        self.most_held = min(MOST_HELD, BLOCK_REGISTERS // threads - OTHER_REGISTERS)
        if not plan.passes:
            self.share, self.block_rows = threads, 1
        elif self.along_row:
            self.block_rows = max(1, min(schedule.block_p, schedule.warps))
            self.share = threads // self.block_rows
        else:
            self.block_rows = 32
            self.share = threads // 32
        self.blocks = -(-plan.row_count // self.block_rows)
        self.splits = schedule.splits if schedule.form == "split" and plan.passes else 1
        inside = {a for g, _ in plan.columns for a in g}
        self.full_outputs = [i for i, (e, *_) in enumerate(nest.outputs) if {a for d in e.dims for a in d} & inside]
        self.row_outputs = [i for i in range(len(nest.outputs)) if i not in self.full_outputs]

    # -- the whole text

    def print(self, inputs: int) -> str:
        """The CUDA text as a constant, its kernels, and the entry function."""
        width = widest(self.plan)
        versions = [self._version(v) for v in ((width, 1) if width > 1 else (1,))]
        kinds = [e.param for e in self.nest.reductions()]
        dtypes = [s.dtype for s in self.nest.sources] + [d for *_, d in self.nest.outputs]
        dtypes += [e.dtype for e in self.nest.exprs if e.op == "round"]
        extremes = any(needs_extremes(e.op) for e in self.nest.exprs)
        differences = any(beside_extreme(e) is not None for e in self.nest.exprs)
        text = prelude(dtypes, kinds, self.along_row, extremes, self.splits > 1, differences)
        text += "".join(kernel for version in versions for kernel in version.kernels)
        names = re.findall(r"__global__ void __launch_bounds__\(\d+\) (\w+)\(", text)
        lines = [f'{self.prefix}_TEXT = r"""\n{text.strip()}\n"""\n']
        lines += [f'{name} = cuda_kernel({self.prefix}_TEXT, "{name}")\n' for name in names]
        return "".join(lines) + "\n\n" + self._run(inputs, versions)

    def _run(self, inputs: int, versions: list[_Version]) -> str:
        lines = [f"def {self.prefix}_run({', '.join(f'x{i}' for i in range(inputs))}):"]
        lines += [f"    {line}" for line in self.loads.prelude]
        tensors = [self.loads.names[s.number] for s in self.nest.sources if not s.scalar]
        device = f"{tensors[0]}.device" if tensors else "x0.device"
        for i, (_, shape, stride, dtype) in enumerate(self.nest.outputs):
            lines.append(f"    y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device={device})")
        if len(versions) == 1:
            lines += [f"    {line.replace('DEVICE', device)}" for line in versions[0].launches]
        else:
            packed = [self.loads.names[n] for n in sorted(packed_sources(self.plan))]
            wide, narrow = versions
            lines.append(f"    if cuda_aligned({', '.join(packed)}):")
            lines += [f"        {line.replace('DEVICE', device)}" for line in wide.launches]
            lines.append("    else:")
            lines += [f"        {line.replace('DEVICE', device)}" for line in narrow.launches]
        returned = ", ".join(f"y{i}" for i in range(len(self.nest.outputs)))
        return "\n".join([*lines, f"    return ({returned},)"]) + "\n"

    # -- one width of access

    def _version(self, vector: int) -> _Version:
        version = _Version(vector)
        if not self.plan.passes:
            self._pointwise(version)
        elif self.schedule.form == "resident":
            self._single(version, self._held_steps(vector))
        elif self.splits == 1:
            self._single(version, 0)
        else:
            self._split(version)
        return version

    def _held_steps(self, vector: int) -> int:
        """Steps in which a thread reads its part of a row."""
        steps = -(-(self.plan.column_count // vector) // self.share)
        if steps * vector > self.most_held:
            raise Unsupported(
                f"a row of {self.plan.column_count} elements is {steps * vector} for each of {self.share} threads; "
                f"at most {self.most_held} stay in registers"
            )
        return steps

    def _emitter(self, vector: int) -> Emitter:
        rows, columns = positions(self.plan.rows, "p"), positions(self.plan.columns, "r")
        return Emitter(self.nest, rows, columns, vector, self.wide)

    def _kernel(self, version: _Version, name: str, body: list[str], grid: str, block: str, extra: list[str]) -> None:
        """Add a kernel with the parameters that its body names, and its launch."""
        text = "\n".join(body)
        words = set(re.findall(r"\w+", text))
        params, args = [], []
        for s in self.nest.sources:
            if f"x{s.number}" in words:
                called = self.loads.names[s.number]
                kind = "float " if s.scalar else f"const {C_TYPE[s.dtype]}* __restrict__ "
                params.append(f"{kind}x{s.number}")
                args.append(f"float({called})" if s.scalar else called)
        for i, (*_, dtype) in enumerate(self.nest.outputs):
            if f"y{i}" in words:
                params.append(f"{C_TYPE[dtype]}* __restrict__ y{i}")
                args.append(f"y{i}")
        for space in extra:
            if space in words:
                params.append(f"unsigned char* __restrict__ {space}")
                args.append(space)
        full = f"{self.prefix}_{name}{'' if version.vector > 1 or widest(self.plan) == 1 else '_narrow'}"
        threads = self.schedule.warps * 32
        version.kernels.append(
            f'\nextern "C" __global__ void __launch_bounds__({threads}) {full}({", ".join(params)}) {{\n'
            + "\n".join(f"    {line}" for line in body)
            + "\n}\n"
        )
        version.launches.append(f"{full}[{grid}, {block}]({', '.join(args)})")

    def _store(self, em: Emitter, numbers: list[int]) -> tuple[list[str], list[str], list[str]]:
        """Statements before, in and after the loop over the elements at hand that store outputs along the columns."""
        before, inner, after = [], [], []
        for i in numbers:
            expr, _, _, dtype = self.nest.outputs[i]
            strides = self.nest.output_strides(i)
            kind = C_TYPE[dtype]
            value = f"static_cast<{kind}>({em.value(expr)})"
            guard = self._once(em, expr)
            if em.vector > 1 and em.step(strides) == 1:
                before.append(f"Pack<{kind}, {em.vector}> o{i};")
                inner.append(f"o{i}.v[v] = {value};")
                place = f"*reinterpret_cast<Pack<{kind}, {em.vector}>*>(y{i} + {em.offset(strides)})"
                after.append(f"{guard}{place} = o{i};")
            else:
                inner.append(f"{guard}y{i}[{em.element(strides)}] = {value};")
        return before, inner, after

    def _once(self, em: Emitter, expr: Expr, columns: bool = True) -> str:
        """``if (…) `` where an output lacks axes that the kernel walks: their first position writes it."""
        held = {a for d in expr.dims for a in d}
        walked = (*em.rows, *(em.columns if columns else ()))
        missing = [p.name for p in walked if p.atoms and not set(p.atoms) & held and p.extent > 1]
        return f"if ({' && '.join(f'{name} == 0' for name in missing)}) " if missing else ""

    def _elements(self, em: Emitter, before: list[str], inner: list[str], after: list[str]) -> list[str]:
        """The statements for the elements at hand, in their order."""
        if em.vector == 1:
            lines = [line.replace(".v[v]", ".v[0]") for line in (*em.loads, *em.lines, *inner)]
            return [*before, *lines, *after]
        loop = ["#pragma unroll", f"for (int v = 0; v < {em.vector}; v++) {{"]
        return [*em.loads, *before, *loop, *[f"    {x}" for x in (*em.lines, *inner)], "}", *after]

    # -- the forms

    def _pointwise(self, version: _Version) -> None:
        """No reductions: threads walk all elements in strides of the grid."""
        vector = version.vector
        groups = (*self.plan.rows, *self.plan.columns)
        em = Emitter(self.nest, [], positions(groups, "r"), vector, self.wide)
        total = prod(e for _, e in groups) // vector
        threads = self.schedule.warps * 32
        blocks = min(-(-total // threads), GRID_BLOCKS * MULTIPROCESSORS)
        body = self._elements(em, *self._store(em, list(range(len(self.nest.outputs)))))
        place = decomposed(em.columns, f"i * {vector}" if vector > 1 else "i", self.index)
        start = f"blockIdx.x * ({self.index})blockDim.x + threadIdx.x"
        lines = [
            *em.row_lines,
            f"for ({self.index} i = {start}; i < {total}; i += ({self.index})blockDim.x * gridDim.x) {{",
            *[f"    {x}" for x in (*place, *body)],
            "}",
        ]
        self._kernel(version, "tiles", lines, str(blocks), str(threads), [])

    def _rows(self, em: Emitter, block: str) -> list[str]:
        """Statements that say which row the thread is at; those past the last one stand at it and write nothing."""
        along, lane = ("y", "x") if self.along_row else ("x", "y")
        last = self.plan.row_count - 1
        lines = [
            f"const int lane = threadIdx.{lane};",
            f"const {self.index} asked = ({block}) * ({self.index}){self.block_rows} + threadIdx.{along};",
            f"const bool inside = asked <= {last};",
            f"const {self.index} row = inside ? asked : {last};",
            f"__shared__ __align__(16) char space[{self._space_bytes()}];",
        ]
        return lines + decomposed(em.rows, "row", self.index)

    def _space_bytes(self) -> int:
        """Bytes of shared memory for the largest running value of each warp, or of each thread along y."""
        largest = max(_state_bytes(e) for e in self.nest.reductions())
        return largest * (self.schedule.warps if self.along_row else self.schedule.warps * 32)

    def _pass(self, em: Emitter, level: int, steps: int, low: str, high: str) -> list[str]:
        """One pass over the columns that finishes the reductions of `level` in each thread."""
        em.begin_pass()
        found = list(enumerate(self.nest.reductions(level)))
        inner, start = [], []
        for i, e in found:
            start.append(f"{_state(e)} a{level}_{i};")
            index = em.index(e) if e.param in ("argmax", "argmin") else "0"
            inner.append(f"a{level}_{i}.take({em.value(e.args[0])}, {index});")
        body = self._elements(em, [], inner, [])
        return [*em.row_lines, *start, *self._walk(em, body, steps, low, high)]

    def _finish(self, em: Emitter, level: int, parts: bool = False) -> list[str]:
        """Combine the threads' running values of `level`, and make the results known."""
        lines = []
        for i, e in enumerate(self.nest.reductions(level)):
            name, share = f"a{level}_{i}", self.share
            if parts:
                place = f"reinterpret_cast<const {_state(e)}*>(w{level}_{i}) + row * {self.splits}"
                lines.append(f"{_state(e)} {name} = merged<{share}>({place}, {self.splits}, lane, space);")
            else:
                lines.append(f"{name} = combined<{share}>({name}, space);")
            self._define(em, e, name)
        return lines

    def _define(self, em: Emitter, e: Expr, name: str) -> None:
        em.define(e, f"{name}.{RESULTS.get(e.param, 'value')}")
        for part in self.nest.exprs:
            if part.op == "part" and part.args[0] is e:
                em.define(part, f"{name}.{part.param}")

    def _walk(self, em: Emitter, body: list[str], steps: int, low: str, high: str) -> list[str]:
        """The loop over the columns of a row; `steps` is how many a thread holds in registers, 0 for none."""
        vector = em.vector
        place = decomposed(em.columns, f"t * {vector}" if vector > 1 else "t", self.index)
        inner = [f"    {x}" for x in (*place, *body)]
        if steps:
            head = [
                "#pragma unroll",
                f"for (int k = 0; k < {steps}; k++) {{",
                f"    const {self.index} t = lane + k * {self.share};",
            ]
            if self.plan.column_count // vector == steps * self.share:
                return [*head, *inner, "}"]
            return [*head, f"    if (t < {high}) {{", *[f"    {x}" for x in inner], "    }", "}"]
        return [
            f"#pragma unroll {UNROLLED}",
            f"for ({self.index} t = {low}; t < {high}; t += {self.share}) {{",
            *inner,
            "}",
        ]

    def _outputs(self, em: Emitter, steps: int, low: str, high: str) -> list[str]:
        """The pass that stores the outputs which change along the columns."""
        if not self.full_outputs:
            return []
        em.begin_pass()
        before, inner, after = self._store(em, self.full_outputs)
        body = self._elements(em, before, inner, after)
        walk = self._walk(em, body, steps, low, high)
        return [*em.row_lines, "if (inside) {", *[f"    {x}" for x in walk], "}"]

    def _row_stores(self, em: Emitter, first: str) -> list[str]:
        """Store the outputs that do not change along the columns."""
        em.begin_pass()
        stores = []
        for i in self.row_outputs:
            expr, _, _, dtype = self.nest.outputs[i]
            place = em.offset(self.nest.output_strides(i), columns=False)
            value = f"static_cast<{C_TYPE[dtype]}>({em.value(expr)})"
            stores.append(f"    {self._once(em, expr, columns=False)}y{i}[{place}] = {value};")
        return [*em.row_lines, f"if ({first}) {{", *stores, "}"] if stores else []

    def _block(self) -> str:
        return f"({self.share}, {self.block_rows})" if self.along_row else f"({self.block_rows}, {self.share})"

    def _single(self, version: _Version, steps: int) -> None:
        """One launch: the threads of a row pass over it, or keep it in registers for `steps` steps."""
        em = self._emitter(version.vector)
        columns = self.plan.column_count // version.vector
        lines = self._rows(em, "blockIdx.x")
        if steps:
            lines += self._hold(em, steps, columns)
        for level in range(1, self.plan.passes + 1):
            lines += self._pass(em, level, steps, "lane", str(columns))
            lines += self._finish(em, level)
        lines += self._row_stores(em, "inside && lane == 0")
        lines += self._outputs(em, steps, "lane", str(columns))
        self._kernel(version, "rows", lines, str(self.blocks), self._block(), [])

    def _hold(self, em: Emitter, steps: int, columns: int) -> list[str]:
        """Read what several passes need of the row's elements into registers."""
        held: dict[int, str] = {}
        reads: list[str] = []
        names: list[str] = []
        for e in self._read_again(em):
            source = self.nest.sources[e.param]
            strides = self.nest.load_strides(e)
            name, kind = f"h{len(names)}", C_TYPE[e.dtype]
            names.append(f"Pack<{kind}, {em.vector}> {name}[{steps}];")
            if em.vector > 1 and em.step(strides) == 1:
                reads.append(f"{name}[k] = {em.vector_load(e)};")
            elif em.vector > 1:
                reads.append(
                    f"for (int v = 0; v < {em.vector}; v++) {name}[k].v[v] = x{source.number}[{em.element(strides)}];"
                )
            else:
                reads.append(f"{name}[k].v[0] = x{source.number}[{em.element(strides)}];")
            held[id(e)] = f"{name}[k]"
        if len(names) * steps * em.vector > self.most_held:
            each = f"{len(names)} tensors of {steps * em.vector} elements a thread"
            raise Unsupported(f"{each}; at most {self.most_held} stay in registers")
        em.held = held
        return [*names, *self._walk(em, reads, steps, "lane", str(columns))] if names else []

    def _read_again(self, em: Emitter) -> list[Expr]:
        """The loads along the columns that more than one pass needs."""
        roots = [[e.args[0] for e in self.nest.reductions(n)] for n in range(1, self.plan.passes + 1)]
        roots.append([self.nest.outputs[i][0] for i in self.full_outputs])
        times: dict[int, int] = {}
        for found in roots:
            seen: set[int] = set()
            waiting = list(found)
            while waiting:
                e = waiting.pop()
                if id(e) not in seen and e.op not in ("reduce", "part"):
                    seen.add(id(e))
                    waiting += e.operands()
            for known in seen:
                times[known] = times.get(known, 0) + 1
        loads = [e for e in self.nest.exprs if e.op == "load" and em.moves(e) and times.get(id(e), 0) > 1]
        return [e for e in loads if not self.nest.sources[e.param].scalar]

    def _split(self, version: _Version) -> None:
        """One launch a pass: blocks that share a row leave running values in a workspace."""
        columns = self.plan.column_count // version.vector
        chunk = -(-columns // self.splits)
        grid, block = str(self.blocks * self.splits), self._block()
        spaces = [
            f"w{level}_{i}"
            for level in range(1, self.plan.passes + 1)
            for i, _ in enumerate(self.nest.reductions(level))
        ]
        for level in range(1, self.plan.passes + 1):
            for i, e in enumerate(self.nest.reductions(level)):
                size = _state_bytes(e) * self.plan.row_count * self.splits
                version.launches.append(f"w{level}_{i} = torch.empty({size}, dtype=torch.uint8, device=DEVICE)")

        def begin(done: int) -> tuple[Emitter, list[str]]:
            em = self._emitter(version.vector)
            lines = [f"const int split = blockIdx.x % {self.splits};", *self._rows(em, f"blockIdx.x / {self.splits}")]
            for level in range(1, done + 1):
                lines += self._finish(em, level, parts=True)
            return em, lines

        low, high = f"split * {chunk} + lane", f"min(split * {chunk} + {chunk}, {columns})"
        for level in range(1, self.plan.passes + 1):
            em, lines = begin(level - 1)
            lines += self._pass(em, level, 0, low, high) + self._finish(em, level)
            for i, e in enumerate(self.nest.reductions(level)):
                place = f"reinterpret_cast<{_state(e)}*>(w{level}_{i})[row * {self.splits} + split]"
                lines.append(f"if (inside && lane == 0) {place} = a{level}_{i};")
            self._kernel(version, f"pass{level}", lines, grid, block, spaces)
        em, lines = begin(self.plan.passes)
        lines += self._row_stores(em, "inside && lane == 0 && split == 0")
        if self.full_outputs:
            lines += self._outputs(em, 0, low, high)
        self._kernel(version, "output", lines, grid, block, spaces)


def _state(e: Expr) -> str:
    """The type of a reduction's running value."""
    return f"{STATE_NAMES[e.param]}<{_state_type(e)}>"


def _state_type(e: Expr) -> str:
    dtype = compute_dtype(e.args[0].dtype if e.param not in ("sum", "prod") else e.dtype)
    if e.param in ("sumexp", "welford") and not is_float(dtype):
        raise Unsupported(f"CUDA C++ is not printed for {e.param} of {dtype}")
    return compute_type("int32" if dtype == "bool" else dtype)


def _state_bytes(e: Expr) -> int:
    """Bytes of a running value, as C++ lays it out."""
    size = {"double": 8, "long long": 8}.get(_state_type(e), 4)
    members = {"sum": 1, "prod": 1, "max": 2, "min": 2, "sumexp": 2, "welford": 7}
    return 16 if e.param in ("argmax", "argmin") else size * members[e.param]


__all__ = ["MOST_HELD", "UNROLLED", "print_rows_cuda"]
