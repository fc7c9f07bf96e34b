"""An operand that is written as padded planes before the product.

Deals in how planes lie in memory and how one is rounded. Knows nothing about the kernel that packs them.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.scheme import Scheme, scheme_of
from qimeng.coder.template.nest.sizes import round_up
from qimeng.coder.template.triton.ops import TRITON_DTYPE


class Planes(Operand):
    """Zero-padded planes, stacked as the rows of one matrix, so that the loop needs no masks."""

    def _arrange(self) -> None:
        scheme, (batch, m, n, k) = scheme_of(self.plan, self.schedule), self.plan.shape
        name, s = self.side.name, self.schedule
        self.padded = round_up(m if self.is_a else n, s.block_m if self.is_a else s.block_n)
        self.deep = round_up(k, s.block_k)
        self.high, self.wide = (self.padded, self.deep) if self.k_major else (self.deep, self.padded)
        self.stride = batch * self.high
        if s.descriptors:
            box = (self.rows_of_block, s.block_k) if self.k_major else (s.block_k, self.rows_of_block)
            shape = f"[{scheme.planes * self.stride}, {self.wide}], [{self.wide}, 1], [{box[0]}, {box[1]}]"
            self._describe(f"{name}_planes", shape)
        else:
            self.parameters, self.arguments = [f"{name}_ptr"], [f"{name}_planes"]
            self.big = scheme.planes * self.stride * self.wide >= 1 << 31
        if scheme.scaled:
            self.scale = f"{name}_inverse_ptr"
            self.parameters += [self.scale, self.loss_pointer]
            self.arguments += [f"{name}_inverse", f"{name}_loss"]

    @property
    def made(self) -> tuple[str, ...]:
        """The planes, the inverses of their scales, and what they lose."""
        name = self.side.name
        return (f"{name}_planes", f"{name}_inverse", f"{name}_loss") if self.scale else (f"{name}_planes",)

    @property
    def k_major(self) -> bool:
        """Whether a plane runs along the depth; TF32 wants that, 16-bit planes stay as the tensor lies."""
        return self.side.k_major or scheme_of(self.plan, self.schedule).dtype == "float32"

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block of a plane in `target`."""
        name = self.side.name
        base = [] if plane == "0" else [plane]
        base += [f"z * {self.high}"] if self.plan.batch else []
        if self.schedule.descriptors:
            row, column = (self.start, k) if self.k_major else (k, self.start)
            turned = self.k_major != self.is_a
            return [f"{target} = {name}.load([{' + '.join([*base, row])}, {column}]){'.T' if turned else ''}"]
        deep = f"({self.depths(k)})"
        row, column = (self.rows, deep) if self.k_major else (deep, self.rows)
        row = f"({' + '.join([*base, row])})" + (".to(tl.int64)" if self.big else "")
        return [f"{target} = tl.load({name}_ptr + {row} * {self.wide} + {column})"]


def plane_of(scheme: Scheme, prefix: str, rest: str, name: str, plane: int, last: bool) -> list[str]:
    """Lines that round `rest` to a plane and, where more planes follow, leave in it what that plane lacks."""
    may_overflow = scheme.dtype == "bfloat16" and plane == 0
    kept = f"{prefix}_short({rest})" if scheme.bits and plane < scheme.planes - 1 else rest
    rounded = f"{prefix}_bfloat16({rest})" if may_overflow else f"{kept}.to({TRITON_DTYPE[scheme.dtype]})"
    lines = [f"{name} = {rounded}"]
    if not last:
        less = f"{rest} - {name}.to(tl.float32)"
        lines.append(f"{rest} = ({less}) * {2.0**scheme.shift!r}" if scheme.shift else f"{rest} = {less}")
    return lines


__all__ = ["Planes", "plane_of"]
