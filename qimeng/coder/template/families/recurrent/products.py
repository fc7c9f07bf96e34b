"""The products of the recurrent family's steps: states with weights, as multiply-adds or on tensor cores.

Multiply-adds are in fp32 for half types. Triton gives the lanes of a warp what lies side by side in memory: terms of a
product. Where each lane is to have a result of its own (`RecurrentSchedule.by_result`), addresses contain a zero that
the compiler does not know, so that nothing seems to lie side by side, and the states are read for each result.

On tensor cores the weights of all products are one matrix for each state that they read, in shared memory, units first.
fp32 is given to them in three products of halves: rows, columns and depth are scaled by powers of two, so that fp16
has the range, and what fp16 rounds off is the second half (Ootomo and Yokota, "Recovering single precision accuracy
from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022). Deals in kernel text. Knows nothing
about steps, exchange and launches.
"""

from __future__ import annotations

from qimeng.coder.template.families.recurrent.defaults import keeps_states, no_tensor_cores
from qimeng.coder.template.families.recurrent.plan import Product, RecurrentPlan, Term, accumulated
from qimeng.coder.template.families.recurrent.schedule import RecurrentSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.rounding import ROUND
from qimeng.coder.template.triton.row_pieces import Pieces
from qimeng.family import Unsupported

HALVES = '''
@triton.jit
def {prefix}_power(x):
    """The power of two below a magnitude, between 2^-100 and 2^100."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power, 7.888609052210118e-31), 1.2676506002282294e30)


@triton.jit
def {prefix}_size(x, axis: tl.constexpr):
    """The power of two below the largest finite magnitude along an axis."""
    return {prefix}_power(tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), axis))


@triton.jit
def {prefix}_halves(x):
    """fp32 of magnitudes below 2 as two fp16, the lower one times 2048; that of an infinity is zero."""
    high = x.to(tl.float16)
    low = tl.where(tl.abs(x) < float("inf"), (x - high.to(tl.float32)) * 2048, 0.0)
    return high, low.to(tl.float16)
'''


ABSENT = {"float32": ("int32", 0x7FA5C3E1), "float16": ("int16", 0x7DA5), "bfloat16": ("int16", 0x7FA5)}
"""The integer as which a state is read, and the NaN of a state that is not there yet: what arithmetic makes of numbers
and of other NaN is another."""


class Products:
    """Prints the products of a loop's steps.

    Args:
        plan: the loop.
        schedule: how they are computed.
        prefix: beginning of every top-level name.
        pieces: rows and columns of a program.

    Raises:
        Unsupported: the schedule does not fit the loop; the message says why.
    """

    def __init__(self, plan: RecurrentPlan, schedule: RecurrentSchedule, prefix: str, pieces: Pieces):
        self.plan, self.schedule, self.prefix, self.pieces = plan, schedule, prefix, pieces
        self.type, self.stored = ops.TRITON_DTYPE[accumulated(plan)], ops.TRITON_DTYPE[plan.stored]
        self.units, self.shares = plan.column_count, pieces.steps
        depth = {plan.metas[p.weight].shape[1] // len(p.terms) for p in plan.products} or {0}
        if depth not in ({0}, {self.units}):
            raise Unsupported(f"weights of depth {max(depth)} for states of {self.units} units")
        self.depth = max(depth)
        self.whole = schedule.block_k >= self.depth
        if schedule.dot and (why := no_tensor_cores(plan, schedule)):
            raise Unsupported(f"products on tensor cores: {why}")
        if schedule.by_value and not keeps_states(plan):
            raise Unsupported(f"waiting for values of {plan.stored}, or of states that are not returned")
        self.held = schedule.holds(plan.tiles, self.depth)
        self.scheme = schedule.precision if self.stored == "tl.float32" else ""  # on tensor cores

    def before(self, em: Emitter) -> list[str]:
        """Lines that load once for all steps what products read alike: biases, and weights where they fit."""
        lines = self._matrices() if self.schedule.dot else []
        for number, product in enumerate(self.plan.products):
            lines += self._before(number, product, em)
        return lines

    def helpers(self, kernel: str) -> list[str]:
        """The functions that `kernel` calls."""
        more = [text for name, text in (("round", ROUND), ("halves", HALVES)) if f"{self.prefix}_{name}" in kernel]
        return [text.format(prefix=self.prefix) for text in more]

    # -- multiply-adds

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
            guard = masked(em.mask("r"))
            lines.append(f"b{number} = tl.load(a{product.bias}_ptr + r * {stride}{guard}).to({self.type})")
        held = range(len(product.terms)) if self.held and not self.schedule.dot else ()
        return [*lines, *(f"m{number}_{j} = {self._weight(product, j)}" for j in held)]

    def _read(self, term: Term, em: Emitter) -> str:
        """Where the rows of a state are that products read, with the mask of their load."""
        own = " + r[:, :, None] * zero" if self.schedule.by_result else ""
        masks = [f"k < {self.depth}"] if self.depth % self.schedule.block_k else []
        masks += ["p_mask[:, :, None]"] if em.mask("p") else []
        masks += [f"(group >= {term.behind}) & (k >= 0)"] if term.behind else []
        guard = f", mask={' & '.join(f'({m})' for m in masks)}, other=0.0" if masks else ""
        row = f"({self.pieces.row_number()})[:, :, None] * {self.units}"
        return f"{self._rows(term)} + {row} + k{own}{guard}"

    def _rows(self, term: Term) -> str:
        """Where the rows begin that a product reads in step `t`."""
        group = f" + (group - {term.behind}) * {self.plan.row_count * self.units}" if self.plan.groups else ""
        return f"{state_at(self.plan, self.schedule, term.state, 't')}{group}"

    def _loads(self, places: list[str]) -> list[str]:
        """Lines that load what products read, when it is there."""
        names = [_rows_of(term) for term in self.plan.terms]
        if not self.schedule.by_value:
            return [f'{name} = tl.load({at}, cache_modifier=".cg")' for name, at in zip(names, places, strict=True)]
        lines = [f"{name} = tl.load({at}, volatile=True)" for name, at in zip(names, places, strict=True)]
        integer, absent = ABSENT[self.plan.stored]
        for name, at in zip(names, places, strict=True):
            lines.append(f"while tl.max(({name}.to(tl.{integer}, bitcast=True) == {absent}).to(tl.int32)) > 0:")
            lines.append(f"    {name} = tl.load({at}, volatile=True)")
        return lines

    def step(self, em: Emitter) -> list[str]:
        """Lines that compute the products of step `t`, each a matrix [PB, RB] in the variable ``d`` and its number."""
        plan = self.plan
        if not plan.products:
            return []
        if self.schedule.dot:
            return self._dots(em)
        inside = self._loads([self._read(term, em) for term in plan.terms])
        inside += [f"{name} = {name}.to({self.type})" for name in map(_rows_of, plan.terms) if self.stored != self.type]
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
                f"t{number} = {self.prefix}_size({w}, 1)[:, None]",
                f"u{number} = {self.prefix}_size({w} / t{number}, 0)[None, :]",
                f"{w}, {w}_low = {self.prefix}_halves({w} / t{number} / u{number})",
                f"t{number} = tl.reshape(t{number}, (1, KB))",
            ]
        return [f"{w} = {self.prefix}_round({w})"] if self.scheme == "tf32" else []

    def _dots(self, em: Emitter) -> list[str]:
        """The products of a step, each a matrix [PB, RB]."""
        plan, count = self.plan, power_of_two(len(self.plan.products))
        places = list[str]()
        for term in plan.terms:
            masks = [f"k < {self.depth}"] if self.depth % self.schedule.block_k else []
            masks += ["p_mask"] if em.mask("p") else []
            masks += [f"(group >= {term.behind}) & (k >= 0)"] if term.behind else []
            guard = f", mask={' & '.join(f'({m})' for m in masks)}, other=0.0" if masks else ""
            places.append(f"{self._rows(term)} + ({self.pieces.row_number()}) * {self.units} + k{guard}")
        lines = self._loads(places)
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
            f"size = {self.prefix}_size({rows}, 1)[:, None]",
            f"high, low = {self.prefix}_halves({rows} * (1.0 / size))",
            "finite = tl.where(tl.abs(high.to(tl.float32)) < float('inf'), high, 0.0)",
            f"small = tl.dot(low, {w}) + tl.dot(finite, {w}_low)",
            f"{total} = (tl.dot(high, {w}) + small * {1 / 2048}) * size * u{number}",
        ]


def state_at(plan: RecurrentPlan, schedule: RecurrentSchedule, state: int, step: str) -> str:
    """Where a state is in memory before a step, as text."""
    size = plan.state_size
    if not schedule.by_value or state not in plan.returned:
        return f"s{state}_ptr + ({step} % 2) * {size}"
    far = (plan.loop.count + 1) * size >= 1 << 31
    return f"z{plan.returned[state]}_ptr + " + (f"tl.cast({step}, tl.int64)" if far else f"({step})") + f" * {size}"


def masked(mask: str) -> str:
    """The arguments of a load with a mask; none without one."""
    return f", mask={mask}, other=0.0" if mask else ""


def _rows_of(term: Term) -> str:
    """The variable with the rows of a state that products read."""
    return f"g{term.state}" + (f"_{term.behind}" if term.behind else "")


__all__ = ["ABSENT", "Products", "masked", "state_at"]
