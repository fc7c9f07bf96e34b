"""Main loops over the single elements that are kept of a weight, on a left operand that is read along its rows.

Each element is met with a run of rows of the left operand. Either a tile takes several columns of the result and walks
a few elements of each a step; or each program of a kernel before the product takes the same number of elements,
whatever columns they belong to, and leaves a sum for each column that it meets. A column's sums are then added in the
order of the elements, so that results are the same in each run. Deals in kernel text. Knows nothing about how the left
operand is made.

Sums find their places without a table: program p leaves that of column c in row c + p. From one sum to the next c or p
grows, or both, so that each has a row of its own, below the number of columns and programs together (a merge path:
Merrill and Garland, "Merge-based parallel sparse matrix-vector multiplication", SC 2016).
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.nest.sizes import round_up
from qimeng.vocabulary.sparse.kept import Kept
from qimeng.vocabulary.sparse.turned import INSIDE, WIDE, Turned

FIRST, AT, VALUES = "b_first", "b_at", "b_values"
"""Variables of the entry function."""

SUMS = "b_sums"
"""The sums that the kernel before the product leaves."""


def by_columns(left: Turned, columns: int, width: int) -> list[str]:
    """Lines that leave a tile in `acc`: BK elements of each of its BN columns a step.

    Args:
        left: the left operand.
        columns: of the result.
        width: columns of a tile.
    """
    mask = f", mask=b_column < {columns}, other=0" if columns % width else ""
    return [
        "b_lane = tl.arange(0, BN * BK)[None, :]",
        "b_column = col0 + b_lane // BK",
        f"b_i = tl.load({FIRST}_ptr + b_column{mask}) + b_lane % BK",
        f"b_end = tl.load({FIRST}_ptr + b_column + 1{mask})",
        "sums = tl.zeros([BM, BN * BK], tl.float32)",
        f"{INSIDE} = b_i < b_end",
        f"b_k = tl.load({AT}_ptr + b_i, mask={INSIDE}, other=0)",
        "for i in range(0, tl.max(b_end - b_i), BK):",
        *indent(
            [
                *_multiply(left),
                "b_i += BK",
                f"{INSIDE} = b_i < b_end",
                f"b_k = tl.load({AT}_ptr + b_i, mask={INSIDE}, other=0)",
            ]
        ),
        "acc = tl.sum(tl.reshape(sums, [BM, BN, BK]), axis=2)",
    ]


def _multiply(left: Turned) -> list[str]:
    """Lines that add the products with the elements `b_i`, which are at the depths `b_k`."""
    return [
        *left.fetch("a0", "b_k"),
        f"b0 = tl.load({VALUES}_ptr + b_i, mask={INSIDE}, other=0.0)",
        "sums += a0.to(tl.float32) * b0.to(tl.float32)",
    ]


class Shares:
    """The kernel that gives each program the same number of elements, and how its sums are added.

    Attributes:
        programs: shares of the elements.
        high: rows of sums.
        wide: elements of one.
    """

    def __init__(self, kept: Kept, left: Turned, share: int, prefix: str):
        self.kept, self.left, self.share, self.prefix = kept, left, share, prefix
        self.rows, self.block = left.plan.shape[1], left.schedule.block_m
        self.programs = -(-kept.count // share)
        self.high, self.wide = kept.shape[0] + self.programs, round_up(self.rows, self.block)
        self.big = ".to(tl.int64)" if self.high * self.wide >= WIDE else ""

    def kernel(self) -> str:
        """Its text."""
        columns, left = self.kept.shape[0], self.left
        halves = [1 << n for n in reversed(range((columns - 1).bit_length()))]
        seek = [
            line
            for half in halves
            for line in (
                f"begins = tl.load({FIRST}_ptr + column + {half}, mask=column + {half} < {columns}, other=high)",
                f"column = tl.where(begins <= i, column + {half}, column)",
            )
        ]
        step = [
            "b_i = j + tl.arange(0, BK)[None, :]",
            f"{INSIDE} = b_i < end",
            f"b_k = tl.load({AT}_ptr + b_i, mask={INSIDE}, other=0)",
            *_multiply(left),
        ]
        body = [
            "t = tl.program_id(0)",
            f"share = t % {self.programs}",
            f"row0 = t // {self.programs} * BM",
            "rm = row0 + tl.arange(0, BM)[:, None]",
            *([f"m_ok = rm < {self.rows}"] if left.overhangs else []),
            f"i = share * {self.share}",
            f"high = tl.minimum(i + {self.share}, {self.kept.count})",
            "column = share * 0",
            *seek,
            "while i < high:",
            *indent(
                [
                    f"end = tl.minimum(tl.load({FIRST}_ptr + column + 1), high)",
                    "sums = tl.zeros([BM, BK], tl.float32)",
                    "for j in range(i, end, BK):",
                    *indent(step),
                    f"at = (column + share){self.big} * {self.wide} + rm",
                    f"tl.store({SUMS}_ptr + at, tl.sum(sums, axis=1, keep_dims=True))",
                    "i = end",
                    "column += 1",
                ]
            ),
        ]
        parameters = [f"{name}_ptr" for name in (FIRST, AT, VALUES, SUMS)]
        head = ", ".join([*left.parameters, *parameters, "BM: tl.constexpr", "BK: tl.constexpr"])
        doc = f'    """{self.share} elements of the weight a program; a sum for each column among them."""'
        return "\n".join(["@triton.jit", f"def {self.prefix}_shares({head}):", doc, *indent(body)]) + "\n"

    def launch(self) -> list[str]:
        """Lines of the entry function."""
        s, tiles = self.left.schedule, self.programs * self.wide // self.block
        given = ", ".join([*self.left.arguments, FIRST, AT, VALUES, SUMS])
        sizes = f"BM={s.block_m}, BK={s.block_k}, num_warps={s.warps}, num_stages={s.stages}"
        return [
            f"{SUMS} = torch.empty(({self.high}, {self.wide}), dtype=torch.float32, device=device)",
            f"{self.prefix}_shares[({tiles},)]({given}, {sizes})",
        ]

    def add(self, width: int) -> list[str]:
        """Lines that leave a tile of `width` columns in `acc`, each column's sums added in order."""
        mask = ", mask=n_ok, other=0" if self.kept.shape[0] % width else ""
        inside = "(b_row <= b_last)" + (" & m_ok" if self.rows % self.block else "")
        return [
            f"b_low = tl.load({FIRST}_ptr + rn{mask})",
            f"b_high = tl.load({FIRST}_ptr + rn + 1{mask})",
            f"b_row = rn + b_low // {self.share}",
            f"b_last = tl.where(b_low < b_high, rn + (b_high - 1) // {self.share}, -1)",
            "acc = tl.zeros([BM, BN], tl.float32)",
            "for i in range(0, tl.max(b_last - b_row) + 1):",
            f"    acc += tl.load({SUMS}_ptr + b_row{self.big} * {self.wide} + rm, mask={inside}, other=0.0)",
            "    b_row += 1",
        ]


__all__ = ["AT", "FIRST", "SUMS", "VALUES", "Shares", "by_columns"]
