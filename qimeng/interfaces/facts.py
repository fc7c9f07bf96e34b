"""What legality and planning may know about the loop nest of a region.

Deals in numbers. Knows nothing about kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What legality and planning may know about a region's loop nest, without knowing its kernels.

    Attributes:
        family: ``"tile"`` (pointwise, reductions, normalizations) or ``"gemm"``.
        dtype: dtype of the arithmetic's operands.
        rows: kept positions (tile family).
        columns: positions reduced together, or the innermost axis where nothing is reduced (tile family).
        passes: passes over the columns before the outputs can be written (tile family); 0 is pointwise.
        full_outputs: outputs that change along the columns (tile family).
        contiguous: ``"r"`` where columns are contiguous in memory, ``"p"`` where rows are.
        m: rows of the product (gemm family).
        n: columns of the product.
        k: depth of the product.
        batch: number of products.
        packable: operands that are worth a packed copy, of ``""``, ``"a"``, ``"b"``, ``"ab"``: parameters, once, and
            those whose rows do not begin at multiples of 16 bytes, at every call.
        special: special functions (``"log"``, ``"tanh"`` …) of every element that approximate units may compute
            (tile family).
    """

    family: str
    dtype: str
    rows: int = 1
    columns: int = 1
    passes: int = 0
    full_outputs: int = 0
    contiguous: str = "r"
    m: int = 1
    n: int = 1
    k: int = 1
    batch: int = 1
    packable: str = ""
    special: tuple[str, ...] = ()


__all__ = ["Facts"]
