"""The recurrent family as Triton source.

One launch walks all steps. A program owns some sequences ([PB, 1]) and some units ([1, RB]) of every state; its states
stay in registers from step to step. States that products read are exchanged through memory, in two buffers that take
turns. Where several programs share a sequence they wait for each other after each step; all of them run at the same
time, which CUDA guarantees (or refuses) for a cooperative launch (Diamos et al., "Persistent RNNs", 2016, keep weights
in registers the same way). Triton's interpreter runs programs one by one, so there each step is a launch of its own.
Products are sums of plain multiply-adds, in fp32 for half types. Where states are exchanged the loop is not pipelined,
as none may be read before the others have written it; what the next step reads of the inputs is loaded, and what this
one returns is stored, between the signal to the others and the wait for them. Groups have programs of their own.

Triton gives the lanes of a warp what lies side by side in memory: terms of a product. Where each lane is to have a
result of its own (`RecurrentSchedule.by_result`), addresses contain a zero that the compiler does not know, so that
nothing seems to lie side by side, and the states are read for each result. Deals in kernel text. Knows nothing about
which schedule is good.
"""

from __future__ import annotations

import re

from qimeng.coder.template.families.recurrent.plan import Part, Product, RecurrentPlan, Term, accumulated
from qimeng.coder.template.families.recurrent.schedule import LEAST, MOST_PRODUCTS, RecurrentSchedule
from qimeng.coder.template.nest.axes import strides_of
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.emitter import Emitter, Walk, without_unused
from qimeng.coder.template.triton.rounding import ROUND
from qimeng.coder.template.triton.row_pieces import Pieces
from qimeng.family import Unsupported
from qimeng.graph.opgraph import row_major
from qimeng.program.program import Implementation

HALVES = '''
@triton.jit
def {prefix}_power(x):
    """The power of two below a magnitude, between 2^-100 and 2^100."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power, 7.888609052210118e-31), 1.2676506002282294e30)


@triton.jit
def {prefix}_halves(x):
    """fp32 of magnitudes below 2 as two fp16, the lower one times 2048; that of an infinity is zero."""
    high = x.to(tl.float16)
    low = tl.where(tl.abs(x) < float("inf"), (x - high.to(tl.float32)) * 2048, 0.0)
    return high, low.to(tl.float16)
'''


def print_recurrent(plan: RecurrentPlan, schedule: RecurrentSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as a loop.
        schedule: block sizes.
        prefix: beginning of every top-level name.
    """
    return Implementation("triton", _Printer(plan, schedule, prefix).source(), f"{prefix}_run", schedule=schedule)


class _Printer:
    def __init__(self, plan: RecurrentPlan, schedule: RecurrentSchedule, prefix: str):
        self.plan, self.schedule, self.prefix = plan, schedule, prefix
        self.pieces = Pieces(plan, schedule, prefix)
        self.shares, self.groups = self.pieces.steps, plan.group_count
        self.type = ops.TRITON_DTYPE[accumulated(plan)]
        self.stored = ops.TRITON_DTYPE[plan.metas[int(plan.loop.starts[0][1:])].dtype]
        self.sequences, self.units = plan.row_count, plan.column_count
        depth = {plan.metas[p.weight].shape[1] // len(p.terms) for p in plan.products} or {0}
        if depth not in ({0}, {self.units}):
            raise Unsupported(f"weights of depth {max(depth)} for states of {self.units} units")
        self.depth = max(depth)
        self.whole = schedule.block_k >= self.depth
        if schedule.dot and (why := _no_tensor_cores(plan, schedule)):
            raise Unsupported(f"products on tensor cores: {why}")
        self.held = schedule.holds(plan.tiles, self.depth)
        self.scheme = schedule.precision if self.stored == "tl.float32" else ""  # on tensor cores
        self.together = self.shares * (self.groups if plan.coupled else 1)  # programs that wait for each other

    # -- the kernel

    def _body(self) -> list[str]:
        plan = self.plan
        lines, em = self._places()
        self.guard = self._masked(em.mask("pr")).removesuffix(", other=0.0")
        expr, shape, *_ = plan.nest.outputs[0]
        self.place = em.offset(strides_of(plan.nest.axes, expr.dims, row_major(shape)), "pr")
        for i, source in enumerate(plan.states):
            begin = f"s{i}_ptr + (first % 2) * {self._state_size()} + {self.place}"
            lines.append(f"h{i} = tl.load({begin}{self._masked(em.mask('pr'))}).to({self.type})")
            self._define(em, source, f"h{i}")
        lines += self._matrices() if self.schedule.dot else []
        for number, product in enumerate(plan.products):
            lines += self._before(number, product, em)
            self._define(em, product.source, f"d{number}")
        lines += [f"x{part.source}_ptr = a{part.input}_ptr" for part in plan.parts if part.place is None]
        moving = [part for part in plan.parts if part.place is not None]
        if plan.exchanged:
            lines += self._alike(em)
            fetched = self._fetched(moving, em)
            lines += ["at = first", *fetched] if fetched else []
            step = self._products(em) + self._results(em, fetched)
        else:
            step = [self._pointer(part, "t") for part in moving] + self._products(em) + self._results(em, [])
        stages = 1 if plan.exchanged else self.schedule.stages
        lines += [f"for t in tl.range(first, last, num_stages={stages}):", *[f"    {line}" for line in step]]
        for i in range(len(plan.states)):
            if i not in plan.exchanged:
                end = f"s{i}_ptr + (last % 2) * {self._state_size()} + {self.place}"
                lines.append(f"tl.store({end}, h{i}.to({self.stored}){self.guard})")
        return lines

    def _places(self) -> tuple[list[str], Emitter]:
        """Lines that set which units and sequences of which group a program has, and an emitter that knows them."""
        p, plan = self.pieces, self.plan
        rows, row_walks = p.rows(f"pid // {self.shares * self.groups}")
        columns, column_walks = p.columns(f"pid % {self.shares}")
        lines = ["pid = tl.program_id(0)", *rows, *columns]
        if plan.groups:
            lines.append(f"group = (pid // {self.shares}) % {self.groups}")
            row_walks = [Walk("group", *plan.groups), *row_walks]
        return lines, p.emitter(row_walks + column_walks)

    def _define(self, em: Emitter, source: int, name: str) -> None:
        for e in self.plan.nest.exprs:
            if e.op == "load" and e.param == source:
                em.define(e, name)

    def _state_size(self) -> int:
        return self.groups * self.sequences * self.units

    def _masked(self, mask: str) -> str:
        return f", mask={mask}, other=0.0" if mask else ""

    def _alike(self, em: Emitter) -> list[str]:
        """Lines that load what every step reads alike."""
        plan = self.plan
        sources = {part.source for part in plan.parts if part.place is None}
        for e in plan.nest.exprs:
            if e.op == "load" and e.param in sources:
                em.value(e)
        return self.pieces.flush(em)

    def _fetched(self, moving: list[Part], em: Emitter) -> list[str]:
        """Lines that load what step `at` reads of the inputs into variables that the step takes them from."""
        sources, lines = {part.source for part in moving}, [self._pointer(part, "at") for part in moving]
        loads = [e for e in self.plan.nest.exprs if e.op == "load" and e.param in sources]
        names = {f"q{i}": em.value(e) for i, e in enumerate(loads)}
        lines += [*self.pieces.flush(em), *(f"{name} = {text}" for name, text in names.items())]
        for e, name in zip(loads, names, strict=True):
            em.define(e, name)
        return lines if loads else []

    def _pointer(self, part: Part, step: str) -> str:
        """The line that makes the pointer to what a step, the number in the variable `step`, reads of an input."""
        assert part.place is not None
        number, meta = re.sub(r"\bt\b", step, part.place.text()), self.plan.metas[part.input]
        far = (max(n for n in meta.shape) * part.stride).bit_length() > 31
        walked = f"tl.cast({number}, tl.int64)" if far else f"({number})"
        return f"x{part.source}_ptr = a{part.input}_ptr + {walked} * {part.stride}"

    def _lanes(self, begin: str = "") -> str:
        along = f"{begin}tl.arange(0, KB)[None, None, :]"
        return f"({along}) ^ zero" if self.schedule.by_result else along

    def _weight(self, product: Product, term: int) -> str:
        """The tile [1, RB, KB] of the weights of a term as a load."""
        group, along, unit = self._strides(product)
        masks = ["k < " + str(self.depth)] if self.depth % self.schedule.block_k else []
        masks += ["r_mask[:, :, None]"] if self.units % self.schedule.block_r else []
        guard = f", mask={' & '.join(f'({m})' for m in masks)}, other=0.0" if masks else ""
        place = f"a{product.weight}_ptr" + (f" + group * {group}" if group else "")
        place += f" + {term * self.depth * along}" if term else ""
        return f"tl.load({place} + r[:, :, None] * {unit} + k * {along}{guard}).to({self.type})"

    def _strides(self, product: Product) -> tuple[int, int, int]:
        """Of a weight: from group to group, along its depth, from unit to unit."""
        stride = self.plan.metas[product.weight].stride
        return (stride[0], stride[1], stride[2]) if self.plan.groups else (0, stride[1], stride[0])

    def _before(self, number: int, product: Product, em: Emitter) -> list[str]:
        """What a product reads once for all steps: its bias, and its weights where they fit."""
        lines = ["zero = first >> 30"] if number == 0 and self.schedule.by_result else []
        lines += [f"k = {self._lanes()}"] if number == 0 and self.whole and not self.schedule.dot else []
        if product.bias is not None:
            (stride,) = self.plan.metas[product.bias].stride
            guard = self._masked(em.mask("r"))
            lines.append(f"b{number} = tl.load(a{product.bias}_ptr + r * {stride}{guard}).to({self.type})")
        held = range(len(product.terms)) if self.held and not self.schedule.dot else ()
        return [*lines, *(f"m{number}_{j} = {self._weight(product, j)}" for j in held)]

    def _read(self, term: Term, em: Emitter) -> str:
        """The line that loads the rows of a state that products read."""
        own = " + r[:, :, None] * zero" if self.schedule.by_result else ""
        masks = [f"k < {self.depth}"] if self.depth % self.schedule.block_k else []
        masks += ["p_mask[:, :, None]"] if em.mask("p") else []
        masks += [f"(group >= {term.behind}) & (k >= 0)"] if term.behind else []
        guard = f", mask={' & '.join(f'({m})' for m in masks)}, other=0.0" if masks else ""
        row = f"({self.pieces.row_number()})[:, :, None] * {self.units}"
        place = f"s{term.state}_ptr + (t % 2) * {self._state_size()}"
        if self.plan.groups:
            place += f" + (group - {term.behind}) * {self.sequences * self.units}"
        return f'{_rows_of(term)} = tl.load({place} + {row} + k{own}{guard}, cache_modifier=".cg").to({self.type})'

    def _products(self, em: Emitter) -> list[str]:
        """The products of a step."""
        plan = self.plan
        if not plan.products:
            return []
        if self.schedule.dot:
            return self._dots(em)
        inside = [self._read(term, em) for term in plan.terms]
        sign = "=" if self.whole else "+="
        for n, product in enumerate(plan.products):
            weights = [f"m{n}_{j}" if self.held else self._weight(product, j) for j in range(len(product.terms))]
            terms = [f"{_rows_of(t)} * {w}" for t, w in zip(product.terms, weights, strict=True)]
            inside.append(f"d{n} {sign} tl.sum({' + '.join(terms)}, axis=2)")
        if not self.whole:
            starts = [f"d{n} = tl.zeros((PB, RB), {self.type})" for n in range(len(plan.products))]
            inside = [f"k = {self._lanes('step + ')}", *inside]
            inside = [
                *starts,
                f"for step in tl.range(0, {self.depth}, KB, num_stages=1):",
                *[f"    {line}" for line in inside],
            ]
        return inside + self._biases()

    def _biases(self) -> list[str]:
        return [f"d{n} = d{n} + b{n}" for n, product in enumerate(self.plan.products) if product.bias is not None]

    # -- products on tensor cores: the weights of all products side by side, units first

    def _matrices(self) -> list[str]:
        """For each term a matrix [KB, RB * products]; zeros where a product does not read it."""
        plan, columns = self.plan, power_of_two(len(self.plan.products))
        lines = [
            "k = tl.arange(0, KB)[None, :]",
            "row = tl.arange(0, KB)[:, None]",
            f"column = tl.arange(0, RB * {columns})[None, :]",
            f"unit, product = (pid % {self.shares}) * RB + column // {columns}, column % {columns}",
        ]
        for i, term in enumerate(plan.terms):
            loads = []
            for n, product in enumerate(plan.products):
                for j in [j for j, t in enumerate(product.terms) if t == term]:
                    group, along, unit = self._strides(product)
                    place = f"a{product.weight}_ptr" + (f" + group * {group}" if group else "")
                    place += f" + {j * self.depth * along}" if j else ""
                    mask = f"(product == {n}) & (row < {self.depth}) & (unit < {self.units})"
                    loads.append(f"tl.load({place} + unit * {unit} + row * {along}, mask={mask}, other=0.0)")
            lines += [f"w{i} = {loads[0]}", *(f"w{i} += {load}" for load in loads[1:]), *self._weights(i)]
        return lines

    def _weights(self, number: int) -> list[str]:
        """Lines that make of a matrix what tensor cores take."""
        w = f"w{number}"
        if self.scheme == "fp16x3":
            return [
                f"t{number} = {self.prefix}_power(tl.max(tl.abs({w}), 1))[:, None]",
                f"u{number} = {self.prefix}_power(tl.max(tl.abs({w} / t{number}), 0))[None, :]",
                f"{w}, {w}_low = {self.prefix}_halves({w} / t{number} / u{number})",
                f"t{number} = tl.reshape(t{number}, (1, KB))",
            ]
        return [f"{w} = {self.prefix}_round({w})"] if self.scheme == "tf32" else []

    def _dots(self, em: Emitter) -> list[str]:
        """The products of a step, each a matrix [PB, RB]."""
        plan, count = self.plan, power_of_two(len(self.plan.products))
        lines = list[str]()
        for term in plan.terms:
            masks = [f"k < {self.depth}"] if self.depth % self.schedule.block_k else []
            masks += ["p_mask"] if em.mask("p") else []
            masks += [f"(group >= {term.behind}) & (k >= 0)"] if term.behind else []
            guard = f", mask={' & '.join(f'({m})' for m in masks)}, other=0.0" if masks else ""
            place = f"s{term.state}_ptr + (t % 2) * {self._state_size()}"
            place += f" + (group - {term.behind}) * {self.sequences * self.units}" if plan.groups else ""
            place += f" + ({self.pieces.row_number()}) * {self.units} + k"
            lines.append(f'{_rows_of(term)} = tl.load({place}{guard}, cache_modifier=".cg")')
        for i, term in enumerate(plan.terms):
            lines += self._dot(i, _rows_of(term), f"total{i}")
            reads = " | ".join(f"(product == {n})" for n, p in enumerate(plan.products) if term in p.terms)
            if any(term not in p.terms for p in plan.products):  # zeros times an infinity are no zeros
                lines.append(f"total{i} = tl.where({reads}, total{i}, 0.0)")
        lines.append(f"total = {' + '.join(f'total{i}' for i in range(len(plan.terms)))}")
        lines += ["d0 = total"] if count == 1 else []
        lines += ["d0, d1 = tl.split(tl.reshape(total, (PB, RB, 2)))"] if count == 2 else []
        if count == 4:
            lines.append("even, odd = tl.split(tl.reshape(total, (PB, RB, 2, 2)))")
            lines += ["d0, d2 = tl.split(even)", "d1, d3 = tl.split(odd)"]
        return lines + self._biases()

    def _dot(self, number: int, rows: str, total: str) -> list[str]:
        """The product of a state's rows with matrix `number`."""
        w = f"w{number}"
        if self.scheme == "tf32":  # tensor cores cut fp32 off after TF32's significand
            return [f'{total} = tl.dot({self.prefix}_round({rows}), {w}, input_precision="tf32")']
        if not self.scheme:
            return [f"{total} = tl.dot({rows}, {w})"]
        return [
            f"{rows} = {rows} * t{number}",
            f"size = tl.max(tl.where(tl.abs({rows}) < float('inf'), tl.abs({rows}), 0.0), 1)[:, None]",
            f"size = {self.prefix}_power(size)",
            f"high, low = {self.prefix}_halves({rows} * (1.0 / size))",
            "finite = tl.where(tl.abs(high.to(tl.float32)) < float('inf'), high, 0.0)",
            f"small = tl.dot(low, {w}) + tl.dot(finite, {w}_low)",
            f"{total} = (tl.dot(high, {w}) + small * {1 / 2048}) * size * u{number}",
        ]

    def _results(self, em: Emitter, fetched: list[str]) -> list[str]:
        """Exchange states, store what a step returns, let states follow; `fetched` loads what the next step reads."""
        plan, p = self.plan, self.pieces
        outputs = [plan.nest.outputs[i][0] for i in plan.results]
        texts = [em.value(e) for e in outputs]
        lines, count = p.flush(em), len(plan.states)
        for i, text in enumerate(texts[:count]):
            rounded = "" if self.stored == self.type else f".to({self.stored}).to({self.type})"
            wide = text if em.side(outputs[i]) == "pr" else f"tl.broadcast_to({text}, (PB, RB))"
            lines.append(f"n{i} = {wide}{rounded}" if wide.isidentifier() else f"n{i} = ({wide}){rounded}")
        for i in plan.exchanged:
            place = f"s{i}_ptr + ((t + 1) % 2) * {self._state_size()} + {self.place}"
            lines.append(f"tl.store({place}, n{i}.to({self.stored}){self.guard})")
        lines += self._signal() if plan.exchanged else []
        for k, text in enumerate(texts[count:]):
            _, back = plan.loop.stacked[k]
            dtype = ops.TRITON_DTYPE[plan.nest.outputs[plan.results[count + k]][3]]
            far = plan.loop.count * self._state_size() >= 1 << 31
            number = f"{plan.loop.count - 1} - t" if back else "t"
            walked = f"tl.cast({number}, tl.int64)" if far else f"({number})"
            wide = text if em.side(outputs[count + k]) == "pr" else f"tl.broadcast_to({text}, (PB, RB))"
            place = f"z{k}_ptr + {walked} * {self._state_size()} + {self.place}"
            lines.append(f"tl.store({place}, ({wide}).to({dtype}){self.guard})")
        lines += [f"h{i} = n{i}" for i in range(count)]
        lines += ["at = tl.minimum(t + 1, last - 1)", *fetched] if fetched else []
        return lines + self._wait() if plan.exchanged else lines

    def _signal(self) -> list[str]:
        """Say that the states of this step are where the next one reads them."""
        if self.together == 1:
            return ["tl.debug_barrier()"]
        add = f'tl.atomic_add(flags_ptr + pid // {self.together}, 1, sem="release")'
        return ["if t + 1 < last:", "    tl.debug_barrier()", f"    {add}"]

    def _wait(self) -> list[str]:
        """Go on when the others have said so."""
        if self.together == 1:
            return []
        flag = f"flags_ptr + pid // {self.together}"
        return [
            "if t + 1 < last:",
            f"    done = tl.load({flag}, volatile=True)",
            f"    while done < (t + 1 - first) * {self.together}:",
            f"        done = tl.load({flag}, volatile=True)",
            f'    tl.atomic_add({flag}, 0, sem="acquire")  # what the others wrote before is seen from here on',
            "    tl.debug_barrier()",
        ]

    # -- the source around it

    def source(self) -> str:
        """The kernel and the entry function."""
        plan, loop = self.plan, self.plan.loop
        lines = without_unused(self._body())
        words = set(re.findall(r"\w+", "\n".join(lines)))
        texts = [plan.loads.names[plan.loads.values[v].number] for v in plan.node.args]
        table = {f"a{i}_ptr": text for i, text in enumerate(texts)}
        table |= {f"s{i}_ptr": f"s{i}" for i in range(len(plan.states))}
        table |= {f"z{k}_ptr": f"z{k}" for k in range(len(loop.stacked))}
        table |= {name: name for name in ("flags_ptr", "first", "last")}
        params = [name for name in table if name in words]
        kernel = f"@triton.jit\ndef {self.prefix}_steps({', '.join(params)}, "
        kernel += "PB: tl.constexpr, RB: tl.constexpr, KB: tl.constexpr):\n"
        kernel += "".join(f"    {line}\n" for line in lines)
        more = [text for name, text in (("round", ROUND), ("halves", HALVES)) if f"{self.prefix}_{name}" in kernel]
        helpers = [*self.pieces.helpers, *(text.format(prefix=self.prefix) for text in more)]
        return "\n".join([*helpers, kernel, self._entry(texts, [table[name] for name in params])])

    def _entry(self, texts: list[str], arguments: list[str]) -> str:
        """The entry function: views, states, outputs, the launch."""
        plan, s = self.plan, self.schedule
        lines = list(plan.loads.prelude)
        device = f"{texts[0]}.device"
        for i, start in enumerate(plan.loop.starts):
            meta = plan.metas[int(start[1:])]
            lines.append(f"s{i} = torch.empty({(2, *meta.shape)}, dtype=torch.{meta.dtype}, device={device})")
            lines.append(f"s{i}[0].copy_({texts[int(start[1:])]})")
        for k in range(len(plan.loop.stacked)):
            _, shape, _, dtype = plan.nest.outputs[plan.results[len(plan.states) + k]]
            lines.append(f"z{k} = torch.empty({(plan.loop.count, *shape)}, dtype=torch.{dtype}, device={device})")
        waits = self.together > 1 and bool(plan.exchanged)
        programs = self.pieces.programs * self.groups * self.shares
        if waits:
            count = programs // self.together
            lines.append(f"flags_ptr = torch.zeros({count}, dtype=torch.int32, device={device})")
        count = plan.loop.count
        together = ", launch_cooperative_grid=True" if waits else ""
        options = f"PB={s.block_p}, RB={s.block_r}, KB={s.block_k}, num_warps={s.warps}{together}"
        launch = f"{self.prefix}_steps[({programs},)]({', '.join(arguments)}, {options})"
        lines += [
            f'span = 1 if {device}.type == "cpu" else {count}',
            f"for first in range(0, {count}, span):",
            "    last = first + span",
            f"    {launch}",
        ]
        results = [f"z{k}" for k in range(len(plan.loop.stacked))]
        results += [f"s{i}[{count % 2}]" for i in range(len(plan.states))]
        views, outputs = plan.after
        lines += [f"found = ({''.join(f'{r}, ' for r in results)})", *views]
        head = f"def {self.prefix}_run({', '.join(f'x{i}' for i in range(len(plan.region.inputs)))}):"
        return "\n".join([head, *[f"    {line}" for line in lines], f"    return ({', '.join(outputs)},)"]) + "\n"


def _no_tensor_cores(plan: RecurrentPlan, s: RecurrentSchedule) -> str:
    """Why tensor cores cannot compute the products under `s`; empty where they can."""
    if plan.metas[int(plan.loop.starts[0][1:])].dtype == "float64" or not 1 <= len(plan.products) <= MOST_PRODUCTS:
        return f"{len(plan.products)} products of {plan.metas[int(plan.loop.starts[0][1:])].dtype}"
    few = min(s.block_p, s.block_k, s.block_r * power_of_two(len(plan.products)))
    if few < LEAST or s.block_k < plan.column_count:
        return f"blocks of {s.block_p} sequences, {s.block_r} units and {s.block_k} terms"
    return ""


def _rows_of(term: Term) -> str:
    """The variable with the rows of a state that products read."""
    return f"g{term.state}" + (f"_{term.behind}" if term.behind else "")


__all__ = ["print_recurrent"]
