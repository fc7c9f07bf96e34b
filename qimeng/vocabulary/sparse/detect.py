"""Which declaration suits the zeros that a module's weights have.

Deals in modules and in counts of blocks. Nothing is declared here: the text is for the caller to give to a spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import torch

from qimeng.errors import SpecError
from qimeng.library.structured import SIDE
from qimeng.vocabulary.sparse.forms import BLOCKS, Sparse, grid
from qimeng.vocabulary.sparse.pairs import Pairs, paired
from qimeng.vocabulary.sparse.sparsify import SHARE

HALF = (torch.float16, torch.bfloat16)
"""Dtypes of weights that sparse tensor cores take here."""

INDEX_BYTES = 4
"""Of a block's column."""


def detected(module: torch.nn.Module) -> str:
    """The declaration of fewest bytes under which every `torch.nn.Linear` of `module` keeps all that it holds.

    Raises:
        SpecError: there is no such layer, or no form is small enough to be worth it; the message has the numbers.

    >>> layer = torch.nn.Linear(64, 64)
    >>> _ = layer.weight.detach()[:, 16:].zero_()
    >>> detected(layer)
    'bsr:16:25'
    """
    if not isinstance(module, torch.nn.Module):
        raise SpecError(f"expected a torch.nn.Module, got {type(module).__name__}")
    weights = [m.weight.detach() for m in module.modules() if type(m) is torch.nn.Linear]
    if not weights:
        raise SpecError(f"{type(module).__name__} has no torch.nn.Linear")
    whole = sum(w.nbytes for w in weights)
    forms = [_form(weights, block) for block in (*reversed(BLOCKS), 1)]
    found = [(_bytes(weights, form), form.text) for form in forms]
    if all(w.dtype in HALF and not any(s % SIDE for s in w.shape) and torch.equal(paired(w), w) for w in weights):
        found.append((whole * 9 // 16, Pairs.text))  # half of the numbers, and two bits for the place of each
    size, text = min(found, key=lambda pair: pair[0])
    if size > SHARE * whole:
        raise SpecError(
            f"too few zeros: the smallest form that keeps all of them, {text!r}, takes {size} B, and more than "
            f"{SHARE:.0%} of the {whole} B of the weights is not worth it"
        )
    return text


def _form(weights: Sequence[torch.Tensor], block: int) -> Sparse:
    """The form that keeps all of each weight."""
    share = max(Fraction(_held(w, block), math.prod(grid(tuple(w.shape), block))) for w in weights)
    return Sparse(block, max(Decimal(math.ceil(share * 10_000)), Decimal(1)) / 100)


def _held(weight: torch.Tensor, block: int) -> int:
    """Blocks that are not zero."""
    rows, columns = grid(tuple(weight.shape), block)
    places = weight.nonzero() // block
    return int((places[:, 0] * columns + places[:, 1]).unique().numel()) if rows else 0


def _bytes(weights: Sequence[torch.Tensor], form: Sparse) -> int:
    """Bytes of the kept blocks and their indices."""
    rows = sum(grid(tuple(w.shape), form.block)[0] + 1 for w in weights)
    blocks = sum(form.count(tuple(w.shape)) * (form.block**2 * w.itemsize + INDEX_BYTES) for w in weights)
    return blocks + rows * INDEX_BYTES


__all__ = ["detected"]
