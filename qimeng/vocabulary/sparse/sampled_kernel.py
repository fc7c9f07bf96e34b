"""The kernel that finds once which tiles of a product nobody needs, and the one that looks for infinities at each call.

The product is the gemm family's, which leaves those tiles out. Where the mask is a factor, PyTorch makes NaN of an
infinity times zero: a tile whose operands are not all finite is computed. Deals in kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qimeng.coder.template.families.gemm.epilogue import Epilogue
from qimeng.coder.template.families.gemm.host import print_gemm
from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.plan import Side, Skips
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.triton.emitter import Emitter, without_unused
from qimeng.coder.template.triton.walks import spread
from qimeng.family import family_field
from qimeng.program.program import Implementation
from qimeng.vocabulary.sparse.preparing import made_of
from qimeng.vocabulary.sparse.sampled import FACTOR, SEEN, Gate, SampledPlan

EMPTY, WILD = "empty", "wild"
"""Variables of the entry function: 1 for each tile that nobody needs; 1 for each strip of rows of the left operand,
then of columns of the right one, that is not finite."""

DEPTH, WARPS = 64, 4
"""Depths that a step of the second kernel reads; warps of both."""


@dataclass(frozen=True)
class SampledSchedule(GemmSchedule):
    """As of a product; `block_m` and `block_n` are the sides of a block of the mask as well."""

    family: str = family_field("sampled")


def print_sampled(plan: SampledPlan, schedule: SampledSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`."""
    gemm, printer = plan.gemm, _Printer(plan, schedule, prefix)
    made = print_gemm(replace(gemm, skips=printer.skips), schedule, prefix)
    text, given = printer.prepare(made)
    return replace(
        made,
        source="\n\n".join([made.source, *printer.kernels(), text]),
        prepare=f"{prefix}_empty_prepare",
        prepare_inputs=given,
    )


class _Printer:
    def __init__(self, plan: SampledPlan, schedule: GemmSchedule, prefix: str):
        self.plan, self.gemm, self.schedule, self.prefix = plan, plan.gemm, schedule, prefix
        self.down, self.across = Epilogue(plan.gemm, schedule.block_m, schedule.block_n).grid

    # -- in each call
    def skips(self, schedule: GemmSchedule) -> Skips:
        """The tiles that the product leaves out."""
        test = f"tl.load({EMPTY}_ptr + row0 // BM * {self.across} + col0 // BN) > 0"
        if not self.plan.multiplies:
            return Skips((EMPTY,), (), (EMPTY,), test)
        made = [f"{WILD} = torch.empty(({self.down + self.across},), dtype=torch.int32, device=device)"]
        for side, strips, block in self._sides():
            read = [*(self.gemm.loads.names[i] for i in _numbers(side)), WILD]
            made.append(f"{self.prefix}_wild_{side.name}[({strips},)]({', '.join(read)}, B={block}, num_warps={WARPS})")
        finite = f"tl.load({WILD}_ptr + row0 // BM) + tl.load({WILD}_ptr + {self.down} + col0 // BN) == 0"
        return Skips((EMPTY,), tuple(made), (EMPTY, WILD), f"({test}) & ({finite})")

    def _sides(self) -> list[tuple[Side, int, int]]:
        """Each operand, the number of its strips, and what one is high."""
        s = self.schedule
        return [(self.gemm.a, self.down, s.block_m), (self.gemm.b, self.across, s.block_n)]

    def kernels(self) -> list[str]:
        """What is launched beside the product."""
        finite = [self._finite(side) for side, *_ in self._sides()] if self.plan.multiplies else []
        return [*finite, self._list()]

    def _finite(self, side: Side) -> str:
        """The kernel that marks strips of an operand with an infinity or NaN."""
        gemm, nest = self.gemm, self.gemm.nest
        tables = [nest.load_strides(e) for e in side.loads]
        count, depth = gemm.extent(side.rows), gemm.shape[3]
        down, rows = spread(nest, side.rows, tables, "rm", "p", "row", gemm.used(side))
        across, steps = spread(nest, gemm.k, tables, "rk", "r", "depth", gemm.used(side))
        em = Emitter(nest, rows + steps, masks={"p": f"(rm < {count})", "r": f"(rk < {depth})"})
        value = em.value(side.expr)
        inside = [
            f"rk = k + tl.arange(0, {DEPTH})[None, :]",
            *across,
            *em.lines,
            f"odd = tl.where((tl.abs({value}) < float('inf')) | (rm >= {count}) | (rk >= {depth}), 0, 1)",
            "found = tl.maximum(found, odd)",
        ]
        first = "" if side.name == "a" else f" + {self.down}"
        body = [
            "rm = tl.program_id(0) * B + tl.arange(0, B)[:, None]",
            *down,
            f"found = tl.zeros([B, {DEPTH}], tl.int32)",
            f"for k in range(0, {depth}, {DEPTH}):",
            *indent(inside),
            f"tl.store({WILD}_ptr{first} + tl.program_id(0), tl.max(tl.max(found, axis=1), axis=0))",
        ]
        parameters = [f"x{i}_ptr" for i in _numbers(side)]
        return self._kernel(f"wild_{side.name}", [*parameters, f"{WILD}_ptr"], ["B"], body)

    # -- once
    def _list(self) -> str:
        """The kernel that marks tiles in which every gate is shut."""
        gemm, nest = self.gemm, self.gemm.nest
        loads = [e for e in _below(self.plan.gates) if e.op == "load"]
        tables = [nest.load_strides(e) for e in loads]
        used = gemm.epilogue_used()
        down, rows = spread(nest, gemm.m, tables, "rm", "p", "row", used)
        more, columns = spread(nest, gemm.n, tables, "rn", "r", "col", used)
        _, m, n, _ = gemm.shape
        masks = {"p": f"(rm < {m})", "r": f"(rn < {n})"}
        em = Emitter(nest, rows + columns, masks=masks)
        texts = [_open(em, gate) for gate in self.plan.gates]
        zeros = [
            f"{s}_zero = tl.zeros({shape}, tl.int32)"
            for s, shape in (("p", "[BM, 1]"), ("r", "[1, BN]"))
            if f"{s}_zero" in "\n".join(em.lines)
        ]
        body = [
            f"rm = tl.program_id(0) // {self.across} * BM + tl.arange(0, BM)[:, None]",
            f"rn = tl.program_id(0) % {self.across} * BN + tl.arange(0, BN)[None, :]",
            *down,
            *more,
            *zeros,
            *em.lines,
            f"seen = tl.where({' & '.join([*texts, *masks.values()])}, 1, 0) + tl.zeros([BM, BN], tl.int32)",
            f"tl.store({EMPTY}_ptr + tl.program_id(0), 1 - tl.max(tl.max(seen, axis=1), axis=0))",
        ]
        return self._kernel("empty", [*self._read(), f"{EMPTY}_ptr"], ["BM", "BN"], body)

    def _read(self) -> list[str]:
        """Parameters of what the gates read."""
        return [f"x{i}_ptr" for i in sorted({e.param for e in _below(self.plan.gates) if e.op == "load"})]

    def prepare(self, made: Implementation) -> tuple[str, tuple[int, ...]]:
        """The function that marks tiles, with what the product itself prepares, and the numbers of its inputs."""
        loads, s, tiles = self.gemm.loads, self.schedule, self.down * self.across
        names = {loads.names[int(p[1:-4])] for p in self._read()}
        given, views = made_of(names, loads.prelude)
        own = [f"x{i}" for i in made.prepare_inputs]
        inputs = sorted({*given, *made.prepare_inputs})
        arguments = ", ".join([*(loads.names[int(p[1:-4])] for p in self._read()), EMPTY])
        sizes = f"BM={s.block_m}, BN={s.block_n}, num_warps={WARPS}"
        packed = f"*{made.prepare}({', '.join(own)}), " if made.prepare else ""
        lines = [
            f'"""Tiles of {s.block_m} x {s.block_n} of which the mask wants nothing."""',
            *views,
            f"{EMPTY} = torch.empty(({tiles},), dtype=torch.int32, device=x{given[0]}.device)",
            f"{self.prefix}_empty[({tiles},)]({arguments}, {sizes})",
            f"return ({packed}{EMPTY},)",
        ]
        head = f"def {self.prefix}_empty_prepare({', '.join(f'x{i}' for i in inputs)}):"
        return "\n".join([head, *indent(lines)]) + "\n", tuple(inputs)

    def _kernel(self, name: str, parameters: Sequence[str], sizes: Sequence[str], body: Sequence[str]) -> str:
        lines = without_unused(list(body))
        head = ", ".join([*parameters, *(f"{size}: tl.constexpr" for size in sizes)])
        return "\n".join(["@triton.jit", f"def {self.prefix}_{name}({head}):", *indent(lines)]) + "\n"


def _open(em: Emitter, gate: Gate) -> str:
    """The text that is true where the product passes."""
    text = em.value(gate.value)
    return text if gate.kind == SEEN else f"({text} {'!=' if gate.kind == FACTOR else '=='} 0)"


def _below(gates: Sequence[Gate]) -> list[Expr]:
    return reach([g.value for g in gates], lambda e: False)


def _numbers(side: Side) -> list[int]:
    """Numbers of the tensors that an operand is made of."""
    return sorted({e.param for e in side.loads})


__all__ = ["SampledSchedule", "print_sampled"]
