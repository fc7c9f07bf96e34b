"""The main loop of a matrix product: which blocks of which planes are multiplied in which order.

Tensor cores truncate their accumulator, so a bias grows with the depth; every `Schedule.promote` elements of it the
accumulator is added to another in fp32 and starts anew. Products of planes run smallest first, either several dots a
step or end to end (`Schedule.cat`: one dot a step, which Triton pipelines better). Deals in kernel text. Knows nothing
about launches.

A left operand that the loop computes on comes from registers. On Hopper, Triton lets the product of one step go on
while the next step's operand is made, and the assembler of CUDA before 13.3 gives both the same registers
(github.com/triton-lang/triton/issues/9433 and pull/11781; on an H200 under Triton 3.6, 8 x 128 results were wrong here
and there, others in each run). Where the right operand is not made in registers as well, which has every step wait
anyhow, such a step ends with a `tl.where` that changes nothing: reading the accumulator waits for the tensor cores. It
costs at most 5 % with tiles of 128 x 128 and up to 45 % with 128 x 256, where packing the operand is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.coder.template.gemm_operand import Inline, Operand
from qimeng.coder.template.gemm_plan import GemmPlan
from qimeng.coder.template.gemm_scheme import Scheme, is_turned, scheme_of, through_registers
from qimeng.program.schedule import Schedule


def main_loop(
    plan: GemmPlan, schedule: Schedule, operands: tuple[Operand, Operand], steps: int, splits: int
) -> list[str]:
    """Lines that leave the product of the tile at `row0`, `col0` in `acc`.

    Args:
        plan: the plan.
        schedule: promotion and the order of products.
        operands: both operands.
        steps: blocks along the whole depth.
        splits: programs that share it; each does the blocks of its `part`.
    """
    scheme, turned = scheme_of(plan, schedule), is_turned(plan, schedule)
    made = [through_registers(plan, schedule, side) for side in (plan.a, plan.b)]
    loop = _Loop(scheme, operands, turned, waits=len(scheme.products) == 1 and made == [not turned, turned])
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
    lines.append(f"acc = {loop.zeros}")
    end = ["acc = acc.T"] if loop.turned else []
    promote = -(-schedule.promote // schedule.block_k)
    promote = 0 if promote >= per else promote
    cat = schedule.cat and len(loop.scheme.products) > 1 and not any(isinstance(o, Inline) for o in operands)
    run = loop.end_to_end if cat else loop.together
    if not promote:
        return [*lines, *run("acc", low, high), *end]
    if promote == 1 and not cat:
        step = [f"fresh = {loop.zeros}", *loop.step("fresh"), "acc += fresh"]
        return [*lines, f"for i in range({low}, {high}):", *indent(step), *end]
    inner = [f"stop = tl.minimum(start + {promote}, {high})", f"fresh = {loop.zeros}", *run("fresh", "start", "stop")]
    return [*lines, f"for start in range({low}, {high}, {promote}):", *indent([*inner, "acc += fresh"]), *end]


class _Loop:
    def __init__(self, scheme: Scheme, operands: tuple[Operand, Operand], turned: bool, waits: bool):
        self.scheme, self.operands = scheme, operands
        self.turned, self.waits = turned, waits
        self.zeros = f"tl.zeros([{'BN, BM' if turned else 'BM, BN'}], tl.float32)"

    def together(self, acc: str, low: str, high: str) -> list[str]:
        """Lines that add steps `low` to `high` to `acc`, all products in each step."""
        return [f"for i in range({low}, {high}):", *indent(self.step(acc))]

    def end_to_end(self, acc: str, low: str, high: str) -> list[str]:
        """Lines that add steps `low` to `high` to `acc`, one product after the other."""
        pairs = self.scheme.products
        count = high if low == "0" else f"({high} - {low})"
        at = f"i - pair * {count}" if low == "0" else f"{low} + i - pair * {count}"
        step = [f"pair = i // {count}", f"k = ({at}) * BK"]
        for i, o in enumerate(self.operands):
            plane = f"{o.side.name}_plane"
            step.append(f"{plane} = {_lookup([p[i] for p in pairs])} * {o.stride}")
            step += o.fetch(f"{o.side.name}0", "k", plane)
        return [f"for i in range(0, {len(pairs)} * {count}):", *indent([*step, self._dot(acc, "a0", "b0")])]

    def step(self, acc: str) -> list[str]:
        """Lines that add the products of step `i` to `acc`."""
        lines = ["k = i * BK"]
        for i, o in enumerate(self.operands):
            lines += o.blocks("k", sorted({p[i] for p in self.scheme.products}))
        lines += [self._dot(acc, f"a{p}", f"b{q}") for p, q in self.scheme.products]
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
