"""A weight that the main loop reads as it is stored, and widens in registers.

Deals in masks, loads and conversions of one block. Knows nothing about the loop around them.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.triton.ops import TRITON_DTYPE
from qimeng.vocabulary.lowprecision.stored import Stored

CODES, SCALE = "b_codes", "b_scale"
"""Variables of the entry function."""


class Codes(Operand):
    """Blocks of codes along the depth, which is how they lie in memory."""

    stored: Stored
    """Set by the subclass that `reader_of` makes."""

    def _arrange(self) -> None:
        self.parameters, self.arguments = [f"{CODES}_ptr", f"{SCALE}_ptr"], [CODES, SCALE]
        self.given = (CODES, SCALE)
        self.n, self.bytes_of_row = self.plan.shape[2], self.stored.depth * self.stored.bits // 8
        self.dtype = TRITON_DTYPE[self.plan.dtype]
        self.wide = ".to(tl.int64)" if self.n * self.bytes_of_row >= 1 << 31 else ""
        if not self.stored.group:
            self.scale = f"{SCALE}_ptr"

    def inverse(self) -> str:
        """The scales of the tile's columns, where a row of codes has one."""
        mask = ", mask=n_ok, other=0.0" if self.n % self.schedule.block_n else ""
        return f"tl.load({self.scale} + rn{mask})"

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block, of BK rows and BN columns, in `target`."""
        return self._pairs(target, k) if self.stored.bits == 4 else self._bytes(target, k)

    def _bytes(self, target: str, k: str) -> list[str]:
        masks = ["n_ok"] if self.n % self.schedule.block_n else []
        masks += [f"(b_k < {self.stored.depth})"] if self.stored.depth % self.schedule.block_k else []
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        return [
            f"b_k = {k} + tl.arange(0, BK)[:, None]",
            f"{target} = tl.load({CODES}_ptr + rn{self.wide} * {self.bytes_of_row} + b_k{mask}).to({self.dtype})",
        ]

    def _pairs(self, target: str, k: str) -> list[str]:
        """Two codes to a byte: the halves side by side along the depth, then each group times its scale."""
        s, group = self.schedule, self.stored.group
        groups, per_step = self.stored.depth // group, max(s.block_k // group, 1)
        columns = f"(b_n < {self.n})" if self.n % s.block_n else ""
        deep = f"(b_pair < {self.bytes_of_row})" if self.stored.depth % s.block_k else ""
        inside = " & ".join(filter(None, (columns, deep)))
        lines = [
            "b_n = col0 + tl.arange(0, BN)[:, None]",
            f"b_pair = {k} // 2 + tl.arange(0, BK // 2)[None, :]",
            f"b_two = tl.load({CODES}_ptr + b_n{self.wide} * {self.bytes_of_row} + b_pair{_masked(inside, '0')})",
            "b_both = tl.join((b_two << 4) >> 4, b_two >> 4)",
        ]
        at, past = f"{k} // {group}", ""
        if per_step > 1:
            lines.append(f"b_group = {at} + tl.arange(0, {per_step})[None, :]")
            at, past = "b_group", f"(b_group < {groups})" if self.stored.depth % s.block_k else ""
        inside = " & ".join(filter(None, (columns, past)))
        shape = f"[BN, {per_step}, BK // {per_step}]"
        return [
            *lines,
            f"b_size = tl.load({SCALE}_ptr + b_n * {groups} + {at}{_masked(inside, '0.0')})",
            f"b_wide = tl.reshape(b_both, {shape}).to(tl.float32) * tl.reshape(b_size, [BN, {per_step}, 1])",
            f"{target} = tl.reshape(b_wide.to({self.dtype}), [BN, BK]).T",
        ]


def _masked(inside: str, other: str) -> str:
    return f", mask={inside}, other={other}" if inside else ""


def reader_of(stored: Stored) -> type[Codes]:
    """The operand's class for one stored weight."""
    return type("StoredCodes", (Codes,), {"stored": stored})


__all__ = ["CODES", "SCALE", "Codes", "reader_of"]
