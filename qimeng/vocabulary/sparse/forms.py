"""How weights with zeros are stored as blocks, and read again.

Deals in tensors: the blocks that are kept, their columns, and where each row of blocks begins. Blocks of one element
are CSR. Weights must be finite. Knows nothing about graphs or kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import torch

from qimeng.errors import SpecError
from qimeng.spec.declared import WeightForm

BLOCKS = (16, 32, 64, 128)
"""Sides that a block may have; tensor cores take no less than 16."""

HUNDRED = Decimal(100)


@dataclass(frozen=True)
class Blocks:
    """Kept blocks of a matrix of `rows` times `columns` blocks, each `block` elements high and wide.

    Attributes:
        first: int32 [rows + 1]; the number of the first block of each row, and of all.
        at: int32 [count]; the column of each block, ascending in a row.
        values: [count, block, block]; the blocks. What overhangs the matrix is zero.
    """

    first: torch.Tensor
    at: torch.Tensor
    values: torch.Tensor


def grid(shape: tuple[int, ...], block: int) -> tuple[int, int]:
    """Rows and columns of blocks that cover a matrix."""
    high, wide = shape
    return -(-high // block), -(-wide // block)


def stored(weight: torch.Tensor, block: int, count: int) -> Blocks:
    """The `count` blocks of `weight` whose largest magnitudes are largest, of equals the first ones."""
    (high, wide), (rows, columns) = weight.shape, grid(weight.shape, block)
    filled = torch.nn.functional.pad(weight, (0, columns * block - wide, 0, rows * block - high))
    blocks = filled.view(rows, block, columns, block).transpose(1, 2).reshape(-1, block, block)
    sizes = blocks.to(torch.float32).abs()
    largest = sizes.amax((1, 2)) if block > 1 else sizes.view(-1)
    order = largest.sort(descending=True, stable=True).indices
    places = order[:count].sort().values
    marks = torch.zeros_like(order).index_put((places,), torch.ones_like(places))
    ends = marks.view(rows, columns).sum(1).cumsum(0)
    first = torch.cat([torch.zeros_like(ends[:1]), ends]).to(torch.int32)
    return Blocks(first, (places % columns).to(torch.int32), blocks[places])


def dense(kept: Blocks, shape: tuple[int, ...]) -> torch.Tensor:
    """The matrix of that shape, zero where no block is kept."""
    (high, wide), block = shape, kept.values.shape[-1]
    rows, columns = grid(shape, block)
    numbers = torch.ones_like(kept.at).cumsum(0) - 1
    row = torch.searchsorted(kept.first[1:].long(), numbers, right=True)
    nothing = torch.zeros_like(kept.values[:1]).repeat(rows * columns, 1, 1)
    blocks = nothing.index_put((row * columns + kept.at,), kept.values)
    whole = blocks.view(rows, columns, block, block).transpose(1, 2).reshape(rows * block, columns * block)
    return whole[:high, :wide].contiguous()


class Sparse(WeightForm):
    """A share of the blocks of a weight, the others zero.

    Attributes:
        block: side of a block; 1 for single elements.
        percent: of the blocks that are kept at most; one is in any case.
    """

    prunes = True

    def __init__(self, block: int, percent: Decimal):
        self.block, self.percent = block, percent
        share = f"{percent.normalize():f}"
        self.text = f"csr:{share}" if block == 1 else f"bsr:{block}:{share}"

    def count(self, shape: tuple[int, ...]) -> int:
        """Blocks of a weight that are kept."""
        return max(1, math.floor(math.prod(grid(shape, self.block)) * self.percent / HUNDRED))

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight itself where no more blocks hold anything; else without those of the least magnitudes."""
        return dense(stored(weight, self.block, self.count(weight.shape)), tuple(weight.shape))


def bsr(rest: str) -> Sparse:
    """The form of ``weights="bsr:32:10"``: blocks of 32 x 32, at most 10 % of them not zero.

    Raises:
        SpecError: the side is not one of `BLOCKS`, or the percentage none above 0 and up to 100.
    """
    side, _, share = rest.partition(":")
    if not (side.isdecimal() and int(side) in BLOCKS):
        sides = ", ".join(map(str, BLOCKS))
        raise SpecError(f"weights='bsr:{rest}': a block's side must be one of {sides}, as in 'bsr:32:10'")
    return Sparse(int(side), _percent(f"bsr:{rest}", share))


def csr(rest: str) -> Sparse:
    """The form of ``weights="csr:5"``: at most 5 % of the weights not zero, wherever they are.

    Raises:
        SpecError: it is no percentage above 0 and up to 100.
    """
    return Sparse(1, _percent(f"csr:{rest}", rest))


def _percent(text: str, share: str) -> Decimal:
    if not share:
        raise SpecError(f"weights={text.rstrip(':')!r}: say how many percent are kept, as in '{text.rstrip(':')}:5'")
    try:
        found = Decimal(share)
    except InvalidOperation:
        found = Decimal(0)
    if found.is_nan() or not 0 < found <= HUNDRED:
        raise SpecError(f"weights={text!r}: the percentage that is kept must be above 0 and up to 100, not {share!r}")
    return found


__all__ = ["BLOCKS", "Blocks", "Sparse", "bsr", "csr", "dense", "grid", "stored"]
