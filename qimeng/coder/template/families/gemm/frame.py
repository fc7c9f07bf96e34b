"""What the kernels of a product have in common: parameters, the epilogue as a function, their text.

Deals in kernel text and launch lines. Knows nothing about the loop or about which kernels there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.descriptors import results_of
from qimeng.coder.template.families.gemm.epilogue import Epilogue
from qimeng.coder.template.families.gemm.exact import exact_schedules
from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.operands import operand
from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import round_up

COLLECT = (32, 128)
"""Largest tile of the kernel that sums the parts of a split depth."""

COLLECTORS = 256
"""Programs of that kernel below which it takes smaller tiles and sums several parts at once: a few programs that add
one part after the other wait for memory as often as there are parts."""


WAIT = "tl.extra.cuda.gdc_wait()"
"""First line of a kernel that is launched while the one before it ends: from there on that one's results are read.

PTX ISA, griddepcontrol.wait: it ends when the kernels before have completed and their writes can be seen. Where no
kernel is left to wait for, it does nothing."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's text and the line that launches it."""

    text: str
    launch: str


class Frame:
    """What all kernels of one plan under one schedule have in common: parameters, the epilogue, their text.

    Attributes:
        splits: programs that share the depth of a tile (no more than have something to do).
        epilogue: the epilogue for the tiles that go through it.
        results: descriptors of the outputs that leave through one, by number.
        skips: tiles whose depth is not walked; None where all are.
    """

    def __init__(
        self,
        plan: GemmPlan,
        schedule: GemmSchedule,
        operands: tuple[Operand, Operand],
        names: dict[int, str],
        prefix: str,
        follows: bool = False,
    ):
        """Lay the kernels out.

        Args:
            plan: the product.
            schedule: its blocks and forms.
            operands: the left and the right one.
            names: variable of each source.
            prefix: beginning of every top-level name.
            follows: whether the entry function launches a kernel before the product, as packing does.
        """
        self.follows = follows
        self.plan, self.schedule, self.operands, self.names, self.prefix = plan, schedule, operands, names, prefix
        steps = steps_of(plan, schedule)
        per = -(-steps // min(schedule.splits, steps))
        self.splits = -(-steps // per)
        self.pieces = schedule.pieces
        self.exact = exact_schedules(plan, schedule)
        self.skips = plan.skips(schedule) if plan.skips is not None else None
        width = schedule.block_n // self.pieces
        apart = self.splits > 1 or self.exact  # tiles of another size hand over results too, or other kernels do
        self.results = {} if apart else results_of(plan, schedule, width)
        if self.splits > 1:
            self.epilogue = Epilogue(plan, *_collect_tile(plan), fast=schedule.fast)
        else:
            tiled = tuple(self.results)
            self.epilogue = Epilogue(plan, schedule.block_m, width, self.pieces, schedule.fast, tiled)
        a, b = plan.original.sides
        self.exact_operands = [(self._read_by(s, a), self._read_by(s, b)) for s in self.exact]

    def _read_by(self, schedule: GemmSchedule, side: Side) -> Operand:
        return operand(self.plan.original, schedule, side, self.prefix, self.names)

    def epilogue_function(self) -> str:
        """Its text."""
        head = ["acc", *self._z(), "row0", "col0", *self.epilogue_parameters()]
        return self._text("epilogue", "Take a tile of the product to memory.", head, "BM BN", self.epilogue.tile())

    def epilogue_parameters(self) -> list[str]:
        """What the epilogue reads and writes, as parameters of any kernel that runs it."""
        results = self.epilogue.results() + (["work_ptr"] if self.plan.reductions else [])
        return [*self.tensors(self.epilogue.sources()), *results]

    def epilogue_call(self, acc: str, column: str, width: str) -> str:
        """The call that takes the columns from `column` on of the tile `acc` to memory."""
        arguments = [acc, *self._z(), "row0", column, *self.epilogue_parameters(), "BM", width]
        return f"{self.prefix}_epilogue({', '.join(arguments)})"

    def finish_tile(self, pieces: int) -> list[str]:
        """Lines that run the epilogue on `acc`, in narrower pieces where it is large, to keep registers free."""
        if pieces == 1:
            return [self.epilogue_call("acc", "col0", "BN")]
        return [
            "left, right = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))",
            self.epilogue_call("left", "col0", "BN // 2"),
            self.epilogue_call("right", "col0 + BN // 2", "BN // 2"),
        ]

    def _z(self) -> list[str]:
        return ["z"] if self.plan.batch else []

    def mask(self, tiles: Epilogue) -> str:
        """The mask of an access to a tile, as an argument text; empty where none overhangs."""
        return f", mask={' & '.join(tiles.masks().values())}" if tiles.masks() else ""

    def tensors(self, numbers: Sequence[int]) -> list[str]:
        """Kernel parameters for sources."""
        return [f"x{i}" if self.plan.nest.sources[i].scalar else f"x{i}_ptr" for i in numbers]

    def _argument(self, parameter: str) -> str:
        """What the entry function passes for a kernel parameter."""
        name = parameter.removesuffix("_ptr")
        if name[0] == "x" and name[1:].isdigit():
            source = self.plan.nest.sources[int(name[1:])]
            return f"float({self.names[source.number]})" if source.scalar else self.names[source.number]
        for o in (*self.operands, *(o for pair in self.exact_operands for o in pair)):
            if parameter in o.parameters:
                return o.arguments[o.parameters.index(parameter)]
        return name

    def kernel(
        self,
        name: str,
        doc: str,
        parameters: Sequence[str],
        sizes: Mapping[str, int | str],
        body: list[str],
        grid: str,
        options: str,
    ) -> Kernel:
        """A kernel with its launch; `parameters` may name one several times."""
        parameters = list(dict.fromkeys(parameters))
        if self.schedule.dependent and (self.follows or name != "product"):
            body, options = [WAIT, *body], f"{options}, launch_pdl=True"
        passed = [*map(self._argument, parameters), *(f"{k}={v}" for k, v in sizes.items()), options]
        text = self._text(name, doc, parameters, " ".join(sizes), body)
        return Kernel(text, f"{self.prefix}_{name}[({grid},)]({', '.join(passed)})")

    def _text(self, name: str, doc: str, parameters: Sequence[str], sizes: str, body: Sequence[str]) -> str:
        head = ", ".join([*parameters, *(f"{s}: tl.constexpr" for s in sizes.split())])
        return (
            "\n".join(["@triton.jit", f"def {self.prefix}_{name}({head}):", f'    """{doc}"""', *indent(body)]) + "\n"
        )


def steps_of(plan: GemmPlan, schedule: GemmSchedule) -> int:
    """Steps of the main loop over the whole depth."""
    return round_up(plan.shape[3], schedule.block_k) // schedule.block_k


def _collect_tile(plan: GemmPlan) -> tuple[int, int]:
    """The largest tile up to `COLLECT` that leaves `COLLECTORS` programs, at least one row of 32."""
    batch, m, n, _ = plan.shape
    rows, columns = COLLECT
    while rows * columns > 32 and batch * -(-m // rows) * -(-n // columns) < COLLECTORS:
        rows, columns = (rows // 2, columns) if rows > 1 else (rows, columns // 2)
    return rows, columns


__all__ = ["COLLECT", "WAIT", "Frame", "Kernel", "steps_of"]
