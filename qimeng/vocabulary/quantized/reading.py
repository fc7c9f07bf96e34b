"""How the main loop reads codes on both sides, multiplies them on the tensor cores and sums.

Deals in loads and in the loop of one tile. Knows nothing about schedules or launches.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.frame import steps_of
from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.vocabulary.quantized.coded import Coded

Names = tuple[str, str]
"""Variables of the entry function: codes and scales."""

LEFT: Names = ("a_codes", "a_scale")
RIGHT: Names = ("b_codes", "b_scale")


class CodesOperand(Operand):
    """Codes of one side, row by row along the depth; they go to the tensor cores as they are."""

    coded: Coded
    """Set by the subclass that `readers_of` makes."""

    def _arrange(self) -> None:
        codes, scale = self.given = LEFT if self.is_a else RIGHT
        _, m, n, self.depth = self.plan.shape
        self.extent = m if self.is_a else n
        known = self.coded.left_scale if self.is_a else self.coded.right_scale
        pointer = f"{scale}_ptr" if known is not None else ""
        self.scale = "" if self.coded.group else pointer
        if self.schedule.descriptors and self.depth % 16 == 0:
            layout = (
                f"[{self.extent}, {self.depth}], [{self.depth}, 1], [{self.rows_of_block}, {self.schedule.block_k}]"
            )
            rows = "-1" if self.coded.group else self.extent
            rows = f"{self.prefix}_aligned({codes}).view({rows}, {self.depth})"
            self._describe(rows, layout)
        else:
            self.parameters, self.arguments = [f"{codes}_ptr"], [codes]
        if pointer:
            self.parameters, self.arguments = [*self.parameters, pointer], [*self.arguments, scale]

    @property
    def over(self) -> str:
        """The condition under which the tile's rows exist; empty where none overhangs."""
        return f"{self.side.name}_n < {self.extent}" if self.extent % self.rows_of_block else ""

    def inverse(self) -> str:
        """The scales of the tile's rows, or the one of all."""
        if self.coded.whole if self.is_a else self.coded.right_whole:
            return f"tl.load({self.scale})"
        inside = ("m_ok" if self.is_a else "n_ok") if self.over else ""
        return f"tl.load({self.scale} + {self.rows}{f', mask={inside}, other=0.0' if inside else ''})"

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block, its rows first and then the depth, in `target`."""
        name = self.side.name
        if self.described:
            return [f"{target} = {name}.load([{self.start}, {k}])"]
        wide = ".to(tl.int64)" if self.extent * self.depth >= 1 << 31 else ""
        past = f"{name}_k < {self.depth}" if self.depth % self.schedule.block_k else ""
        inside = " & ".join(f"({c})" for c in (self.over, past) if c)
        zero = "0.0" if self.coded.floating else "0"
        mask = f", mask={inside}, other={zero}" if inside else ""
        return [
            f"{name}_n = {self.start} + tl.arange(0, {self.block})[:, None]",
            f"{name}_k = {k} + tl.arange(0, BK)[None, :]",
            f"{target} = tl.load({self.given[0]}_ptr + {name}_n{wide} * {self.depth} + {name}_k{mask})",
        ]

    def sizes(self, turned: bool) -> list[str]:
        """Lines that load the scales of one step's codes, along the tile's rows or columns, as ``a_size`` or so."""
        coded, name = self.coded, self.side.name
        along = "[:, None]" if self.is_a != turned else "[None, :]"
        of = f"{name}_at // {coded.tall}" if not self.is_a and coded.tall > 1 else f"{name}_at"
        inside = f", mask={name}_at < {self.extent}, other=0.0" if self.extent % self.rows_of_block else ""
        each = f"{self.depth // coded.group} + k // {coded.group}"
        return [
            f"{name}_at = ({self.start} + tl.arange(0, {self.block})){along}",
            f"{name}_size = tl.load({name}_scale_ptr + {of} * {each}{inside})",
        ]

    def loop(self, left: Operand) -> list[str]:
        """The whole depth, or the program's part of it; the sum of some steps apart where that is asked for."""
        s, turned = self.schedule, bool(getattr(self.schedule, "turned", False))
        steps = steps_of(self.plan, s)
        per = -(-steps // min(s.splits, steps))
        low, high, lines = "0", str(steps), []
        if per < steps:
            lines = [f"low = part * {per}", f"high = tl.minimum(low + {per}, {steps})"]
            low, high = "low", "high"
        zeros = f"tl.zeros([{'BN, BM' if turned else 'BM, BN'}], tl.{'float32' if self.coded.floating else 'int32'})"
        product = "b0, a0.T" if turned else "a0, b0.T"
        fetch = ["k = i * BK", *left.fetch("a0", "k"), *self.fetch("b0", "k")]
        apart = -(-s.promote // s.block_k) if self.coded.floating else 0
        if self.coded.group:
            assert isinstance(left, CodesOperand)
            step = [*fetch, *left.sizes(turned), *self.sizes(turned)]
            step.append(f"acc += tl.dot({product}) * (a_size * b_size)")
            lines += [f"acc = {zeros}", f"for i in range({low}, {high}):", *indent(step)]
        elif not apart or apart >= per:
            step = [*fetch, f"acc = tl.dot({product}, acc, out_dtype=acc.dtype)"]
            lines += [f"acc = {zeros}", f"for i in range({low}, {high}):", *indent(step)]
        elif apart == 1:
            step = [*fetch, f"acc += tl.dot({product})"]
            lines += [f"acc = {zeros}", f"for i in range({low}, {high}):", *indent(step)]
        else:
            step = [*fetch, f"fresh = tl.dot({product}, fresh)"]
            part = [f"fresh = {zeros}", f"for i in range(start, tl.minimum(start + {apart}, {high})):", *indent(step)]
            lines += [
                f"acc = {zeros}",
                f"for start in range({low}, {high}, {apart}):",
                *indent([*part, "acc += fresh"]),
            ]
        lines += [] if self.coded.floating else ["acc = acc.to(tl.float32)"]
        return [*lines, *(["acc = acc.T"] if turned else [])]


def readers_of(coded: Coded) -> type[CodesOperand]:
    """The class of both operands of one product."""
    return type("CodedOperand", (CodesOperand,), {"coded": coded})


__all__ = ["LEFT", "RIGHT", "CodesOperand", "readers_of"]
