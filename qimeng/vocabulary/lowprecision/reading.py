"""A weight that the main loop reads as it is stored, and widens in registers.

Deals in masks, loads and conversions of one block. Knows nothing about the loop around them.
"""

from __future__ import annotations

import itertools

from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.triton.ops import TRITON_DTYPE
from qimeng.family import Unsupported
from qimeng.vocabulary.lowprecision.direct import direct_loop
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
        elif getattr(self.schedule, "sums", False) and self.schedule.block_k <= self.stored.group:
            self.per_step = "b_size"
        elif self.stored.bits == 8:
            raise Unsupported(f"steps of {self.schedule.block_k}, of codes of which {self.stored.group} share a scale")

    def loop(self, left: Operand) -> list[str]:
        """The loop without tensor cores, where the schedule asks for it."""
        if not getattr(self.schedule, "direct", False):
            return []
        s, group, deep = self.schedule, self.stored.group, self.stored.depth
        per_step = max(s.block_k // group, 1)
        at = f"k // {group} + tl.arange(0, {per_step})[None, :]"
        columns = f"(b_n < {self.n})" if self.n % s.block_n else ""
        past = f"({at} < {deep // group})" if deep % s.block_k else ""
        scales = f"tl.load({SCALE}_ptr + b_n * {deep // group} + {at}{_masked(columns, past, other='0.0')})"
        return direct_loop(left, self._codes("k"), scales, group)

    def inverse(self) -> str:
        """The scales of the tile's columns, where a row of codes has one."""
        mask = ", mask=n_ok, other=0.0" if self.n % self.schedule.block_n else ""
        return f"tl.load({self.scale} + rn{mask})"

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block, of BK rows and BN columns, in `target`."""
        return self._pairs(target, k) if self.stored.bits == 4 else self._bytes(target, k)

    def _bytes(self, target: str, k: str) -> list[str]:
        columns = "n_ok" if self.n % self.schedule.block_n else ""
        past = f"(b_k < {self.stored.depth})" if self.stored.depth % self.schedule.block_k else ""
        mask = _masked(columns, past, other="0.0" if self.stored.floating else "0")
        size = []
        if self.per_step:
            row = f"rn // {self.stored.tall}" if self.stored.tall > 1 else "rn"
            at = f"{row} * {self.stored.depth // self.stored.group} + {k} // {self.stored.group}"
            size = [f"{self.per_step} = tl.load({SCALE}_ptr + {at}{_masked(columns, other='0.0')})"]
        return [
            *size,
            f"b_k = {k} + tl.arange(0, BK)[:, None]",
            f"{target} = tl.load({CODES}_ptr + rn{self.wide} * {self.bytes_of_row} + b_k{mask}).to({self.dtype})",
        ]

    def _codes(self, k: str) -> list[str]:
        """Lines that leave both codes of each byte of one block in `b_both`, side by side."""
        columns = f"(b_n < {self.n})" if self.n % self.schedule.block_n else ""
        past = f"(b_pair < {self.bytes_of_row})" if self.stored.depth % self.schedule.block_k else ""
        inside = _masked(columns, past, other="0")
        quick = getattr(self.schedule, "quick", False)
        return [
            f"b_pair = {k} // 2 + tl.arange(0, BK // 2)[None, :]",
            f"b_two = tl.load({CODES}_ptr + b_n{self.wide} * {self.bytes_of_row} + b_pair{inside})",
            f"b_low, b_high = {f'{self.prefix}_halves(b_two)' if quick else '(b_two << 4) >> 4, b_two >> 4'}",
            "b_both = tl.join(b_low, b_high)",
        ]

    def _pairs(self, target: str, k: str) -> list[str]:
        """Two codes to a byte, side by side along the depth; each group times its scale, or each step's products."""
        s, group, deep = self.schedule, self.stored.group, self.stored.depth
        columns = f"(b_n < {self.n})" if self.n % s.block_n else ""
        lines = ["b_n = col0 + tl.arange(0, BN)[:, None]", *self._codes(k)]
        groups, at = deep // group, f"{k} // {group}"
        if self.per_step:
            mask = _masked("n_ok" if columns else "", other="0.0")
            size = f"{self.per_step} = tl.load({SCALE}_ptr + rn * {groups} + {at}{mask})"
            return [*lines, size, f"{target} = tl.reshape(b_both, [BN, BK]).to({self.dtype}).T"]
        past, per_step = "", max(s.block_k // group, 1)
        if per_step > 1:
            lines.append(f"b_group = {at} + tl.arange(0, {per_step})[None, :]")
            at, past = "b_group", f"(b_group < {groups})" if deep % s.block_k else ""
        return [
            *lines,
            f"b_size = tl.load({SCALE}_ptr + b_n * {groups} + {at}{_masked(columns, past, other='0.0')})",
            f"b_groups = tl.reshape(b_both, [BN, {per_step}, BK // {per_step}]).to(tl.float32)",
            f"b_wide = b_groups * tl.reshape(b_size, [BN, {per_step}, 1])",
            f"{target} = tl.reshape(b_wide.to({self.dtype}), [BN, BK]).T",
        ]


def _masked(*inside: str, other: str) -> str:
    """The mask of a load as arguments, of the conditions that are not empty."""
    found = " & ".join(filter(None, inside))
    return f", mask={found}, other={other}" if found else ""


HALVES = {
    "bfloat16": ("bf16", 0x4343, 0x3F80, 0xC308),
    "float16": ("f16", 0x6464, 0x3C00, 0xE408),
}
"""Of a half type: its name in PTX, twice the upper byte of 2^p, where a number's last place is 1; 1; -(2^p + 8)."""


def halves(prefix: str, dtype: str) -> str:
    """The text of the function that makes numbers of the codes in each byte, four bytes at a time.

    A code plus 8 is put into the last places of 2^p, from which 2^p + 8 is subtracted: exact. `prmt` picks bytes.
    """
    name, upper, one, less = HALVES[dtype]
    lines = [
        f"// nibbles of {name}",
        "{.reg .b32 l, h, m, o, s;",
        "lop3.b32 l, $4, 0x0F0F0F0F, 0x08080808, 0x6A;",
        "shr.u32 h, $4, 4;",
        "lop3.b32 h, h, 0x0F0F0F0F, 0x08080808, 0x6A;",
        f"mov.b32 m, 0x{upper:04X}{upper:04X}; mov.b32 o, 0x{one:04X}{one:04X}; mov.b32 s, 0x{less:04X}{less:04X};",
    ]
    for number, (source, selector) in enumerate(itertools.product("lh", ("0x5140", "0x5342"))):
        lines += [
            f"prmt.b32 ${number}, {source}, m, {selector};",
            f"fma.rn.{name}x2 ${number}, ${number}, o, s;",
        ]
    asm = "\\n".join([*lines, "}"])
    result = f"({TRITON_DTYPE[dtype]}, {TRITON_DTYPE[dtype]})"
    return (
        f'@triton.jit\ndef {prefix}_halves(pairs):\n    """Both codes of each byte as {dtype}."""\n'
        f'    asm: tl.constexpr = "{asm}"\n'
        f'    return tl.inline_asm_elementwise(asm, "=r,=r,=r,=r,r", [pairs], dtype={result}, is_pure=True, pack=4)\n'
    )


def reader_of(stored: Stored) -> type[Codes]:
    """The operand's class for one stored weight."""
    return type("StoredCodes", (Codes,), {"stored": stored})


__all__ = ["CODES", "SCALE", "Codes", "halves", "reader_of"]
