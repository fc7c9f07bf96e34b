"""The main loop of a matrix product: which blocks of which planes are multiplied in which order.

Tensor cores truncate their accumulator, so a bias grows with the depth; every `GemmSchedule.promote` elements of it the
accumulator of the main product is added to another in fp32 and starts anew. The small products of planes are summed
apart: before the main one, several dots a step or end to end (`GemmSchedule.cat`: one dot a step, which Triton
pipelines better), or beside it in an accumulator of their own where registers hold both. Deals in kernel text. Knows
nothing about launches.

A left operand that the loop computes on comes from registers. On Hopper, Triton lets the product of one step go on
while the next step's operand is made, and the assembler of CUDA before 13.3 gives both the same registers
(github.com/triton-lang/triton/issues/9433 and pull/11781; on an H200 under Triton 3.6, 8 x 128 results were wrong here
and there, others in each run). Where the right operand is not made in registers as well, which has every step wait
anyhow, such a step ends with a `tl.where` that changes nothing: reading the accumulator waits for the tensor cores. It
costs at most 5 % with tiles of 128 x 128 and up to 45 % with 128 x 256, where packing the operand is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qimeng.coder.template.families.gemm.inline import Inline
from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.positions import shortened
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import Scheme, is_turned, scheme_of, through_registers


def main_loop(
    plan: GemmPlan,
    schedule: GemmSchedule,
    operands: tuple[Operand, Operand],
    steps: int,
    splits: int,
    skipped: str = "",
) -> list[str]:
    """Lines that leave the product of the tile at `row0`, `col0` in `acc`.

    Args:
        plan: the plan.
        schedule: promotion and the order of products.
        operands: both operands.
        steps: blocks along the whole depth.
        splits: programs that share it; each does the blocks of its `part`.
        skipped: a scalar of the kernel that is true where nothing is to be done.
    """
    own = operands[1].loop(operands[0])
    if own:
        return own
    scheme, turned = scheme_of(plan, schedule), is_turned(plan, schedule)
    made = [through_registers(plan, schedule, side) for side in (plan.a, plan.b)]
    waits = len(scheme.products) == 1 and made == [not turned, turned]
    low, high, lines = "0", str(steps), []
    per = -(-steps // splits)
    if splits > 1:
        lines = [f"low = part * {per}", f"high = tl.minimum(low + {per}, {steps})"]
        low, high = "low", "high"
    elif plan.triangle is not None:
        if plan.triangle.kind == "lower":
            outside = f"col0 - row0 - {schedule.block_m - 1} > {plan.triangle.offset}"
        else:
            outside = f"col0 + {schedule.block_n - 1} - row0 < {plan.triangle.offset}"
        lines, high = [f"high = tl.where({outside}, 0, {steps})"], "high"
    if short := shortened(plan):
        lines, high = [*lines, *short, f"high = tl.minimum({high}, most)"], "high"
    if skipped:
        lines, high = [*lines, f"high = tl.where({skipped}, {low}, {high})"], "high"
    promote = -(-schedule.promote // schedule.block_k)
    loop = _Loop(scheme, operands, turned, waits, low, high, 0 if promote >= per else promote)
    apart = schedule.block_m * schedule.block_n > HELD_TWICE * 32 * schedule.warps
    body = loop.in_turn(schedule.cat) if loop.scheme.small and (schedule.cat or apart) else loop.together()
    return [*lines, *body, *(["acc = acc.T"] if turned else [])]


HELD_TWICE = 64
"""Elements of a tile a thread up to which registers hold a second accumulator for the small products."""


class _Loop:
    """The loop's text.

    Attributes:
        scheme: planes and products.
        operands: both operands.
        turned: whether the transposed product is computed.
        waits: whether a step ends by reading the accumulator.
        low: first step.
        high: the step after the last.
        promote: steps after which the accumulator of the main product is added to another; 0 is never.
    """

    def __init__(
        self,
        scheme: Scheme,
        operands: tuple[Operand, Operand],
        turned: bool,
        waits: bool,
        low: str,
        high: str,
        promote: int,
    ):
        self.scheme, self.operands = scheme, operands
        self.turned, self.waits = turned, waits
        self.low, self.high, self.promote = low, high, promote
        self.zeros = f"tl.zeros([{'BN, BM' if turned else 'BM, BN'}], tl.float32)"

    def together(self) -> list[str]:
        """One loop that reads each block once; the small products, where there are any, have their own accumulator."""
        small = bool(self.scheme.small)
        lines = [f"acc = {self.zeros}", *([f"low_acc = {self.zeros}"] if small else [])]
        lines += self._promoted(lambda acc: self._step(self.scheme.products, acc, "low_acc" if small else ""))
        return [*lines, *self._settle("low_acc"), "acc += low_acc"] if small else lines

    def in_turn(self, cat: bool) -> list[str]:
        """One loop for the small products, then one for the main one.

        Args:
            cat: the small products run end to end, one a step.
        """
        small = self.scheme.small
        lines = [f"acc = {self.zeros}"]
        if cat and not any(isinstance(o, Inline) for o in self.operands):
            lines += self._end_to_end("acc")
        else:
            lines += [f"for i in range({self.low}, {self.high}):", *indent(self._step(small, "", "acc"))]
        return [*lines, *self._settle("acc"), *self._promoted(lambda acc: self._step((self.scheme.main,), acc, ""))]

    def _settle(self, acc: str) -> list[str]:
        """Lines that scale the sum of the small products to the main one's.

        An infinity's further planes are no numbers, and the main product alone says what the sum is then.
        """
        scale = f" * {2.0**-self.scheme.shift!r}" if self.scheme.shift else ""
        return [f"{acc} = tl.where(tl.abs({acc}) < float('inf'), {acc}{scale}, 0.0)"]

    def _promoted(self, step: Callable[[str], list[str]]) -> list[str]:
        """A loop over all steps that adds to `acc`, by way of a fresh accumulator where one is promoted or scaled."""
        scales = [o.per_step for o in self.operands if o.per_step]
        if scales:
            body = [f"fresh = {self.zeros}", *step("fresh"), f"acc += fresh * {' * '.join(scales)}"]
            return [f"for i in range({self.low}, {self.high}):", *indent(body)]
        if not self.promote:
            return [f"for i in range({self.low}, {self.high}):", *indent(step("acc"))]
        if self.promote == 1:
            body = [f"fresh = {self.zeros}", *step("fresh"), "acc += fresh"]
            return [f"for i in range({self.low}, {self.high}):", *indent(body)]
        inner = [
            f"stop = tl.minimum(start + {self.promote}, {self.high})",
            f"fresh = {self.zeros}",
            "for i in range(start, stop):",
            *indent(step("fresh")),
            "acc += fresh",
        ]
        return [f"for start in range({self.low}, {self.high}, {self.promote}):", *indent(inner)]

    def _end_to_end(self, acc: str) -> list[str]:
        """Lines that add the small products to `acc`, one after the other."""
        pairs = self.scheme.small
        count = self.high if self.low == "0" else f"({self.high} - {self.low})"
        at = f"i - pair * {count}" if self.low == "0" else f"{self.low} + i - pair * {count}"
        pair = f"tl.where(i < {count}, 0, 1)" if len(pairs) == 2 else f"i // {count}"
        step = [f"pair = {pair}", f"k = ({at}) * BK"]
        for i, o in enumerate(self.operands):
            plane = f"{o.side.name}_plane"
            step.append(f"{plane} = {_lookup([p[i] for p in pairs])} * {o.stride}")
            step += o.fetch(f"{o.side.name}0", "k", plane)
        return [f"for i in range(0, {len(pairs)} * {count}):", *indent([*step, self._dot(acc, "a0", "b0")])]

    def _step(self, products: Sequence[tuple[int, int]], acc: str, low: str) -> list[str]:
        """Lines that add the products of step `i` to `low`, the main one to `acc`."""
        lines = ["k = i * BK"]
        for i, o in enumerate(self.operands):
            lines += o.blocks("k", sorted({p[i] for p in products}))
        for p, q in products:
            lines.append(self._dot(acc if (p, q) == self.scheme.main else low, f"a{p}", f"b{q}"))
        left = "b0" if self.turned else "a0"
        waits = f"{acc} = tl.where(i >= 0, {acc}, 0.0)  # until the product is done: {left} is in registers"
        return [*lines, waits] if self.waits else lines

    def _dot(self, acc: str, a: str, b: str) -> str:
        precision = f', input_precision="{self.scheme.dot}"' if self.scheme.dot else ""
        left, right = (f"{b}.T", f"{a}.T") if self.turned else (a, b)
        return f"{acc} = tl.dot({left}, {right}, {acc}{precision})"


def indent(lines: Sequence[str]) -> list[str]:
    """`lines` one level deeper."""
    return [f"    {line}" for line in lines]


def _lookup(numbers: Sequence[int]) -> str:
    """An expression of `pair` that gives `numbers[pair]` (each below 4)."""
    table = sum(n << (2 * i) for i, n in enumerate(numbers))
    return f"({table} >> (2 * pair) & 3)"


__all__ = ["indent", "main_loop"]
