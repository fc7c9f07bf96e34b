"""Which tiles of a product the scaled planes are exact enough for: found on the device from the values at hand.

Two planes of fp16 keep 22 bits of an element down to 2^-28 of its row's largest (one keeps 11). A smaller one may be
all that counts where the other operand is zero wherever this row is large, so a kernel that packs a row also notes its
*loss*:

- whether an element that is not zero is *tiny* (it keeps fewer bits than the scheme's others), and
- how many elements are *missed*: under 2^-10 of the row's largest, zeros among them.

A tile is at level 0, and computed from planes, where no row and no column has a tiny element; and where, of a depth of
K, the most that any row misses and the most that any column misses leave K / 64: then every sum has K / 64 terms of at
least 2^-22 of (the row's largest times the column's largest), and what all tiny elements lose together is at most 2^-22
of those. (One plane: K / 16 and 2^-12, where TF32 loses 2^-11 of every element.) The copy of a convolution's input has
one scale for each image and losses for parts of it (see `losses`); there all elements count as missed. Level 1 is all
else that keeps fp32's bits as three planes of bf16. Level 2 has rows with an infinity, a NaN, an element under 2^-110
(bf16 drops its last bits) or a largest magnitude outside 2^-60 to 2^60 (products of two such scales may leave fp32).
Tiles above level 0 are computed by the scheme's exact forms, in a kernel of their own; the host is never asked. The
idea is that of A. Schwarz et al., Guaranteed DGEMM Accuracy While Using Reduced Precision Tensor Cores Through
Extensions of the Ozaki Scheme, 2025.

Deals in bits and kernel text. Knows nothing about blocks or the host.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.scheme import Scheme

BITS = "(x.to(tl.int32, bitcast=True) & 2147483647)"
"""The magnitude of `x` as bits, which order like the magnitudes; NaN is above all."""

EXTREME = (1 << 29) + 1
"""The loss of a row of level 2: tiny, and more missed than any depth has."""

MISSED = 16.0
"""Scaled magnitude (the largest of a row is in [2^14, 2^15)) below which an element counts as missed."""

TINY = 2.0**-14
"""Scaled magnitude below which an element loses more than others: a plane is good to half of 2^-24, before its own
scale. Two planes keep 22 bits of what is above, one keeps 11 as TF32 does."""

REMOTE = 2.0**-110
"""Magnitude below which three planes of bf16 lack bits of an element."""

EXTREMES = '''
@triton.jit
def {prefix}_extreme(top):
    """Whether a row's largest magnitude, as bits, is infinite, no number, or so far from 1 that scales may overflow."""
    return (top != 0) & ((top < 562036736) | (top > 1568669696))  # 2^-60, 2^60
'''

SPAN = '''
@triton.jit
def {prefix}_span(top, under):
    """The loss of rows of which only the largest and (2^31 - 1 minus) the least magnitude are known, as bits."""
    e = tl.minimum(tl.maximum((top >> 23) & 255, 15), 254)
    scale = ((268 - e) << 23).to(tl.float32, bitcast=True)
    least = (2147483647 - under).to(tl.float32, bitcast=True)
    loss = tl.where((top != 0) & (least * scale < {tiny}), {depth} * 2 + 1, {depth} * 2)
    return tl.where({prefix}_extreme(top) | (top != 0) & (least < {remote}), {extreme}, loss)
'''

LEVEL = '''
@triton.jit
def {prefix}_level(a_loss, b_loss):
    """0 where planes hold a tile's rows and columns, 1 where more planes do, 2 where none do."""
    tiny = tl.max(a_loss & 1, axis=0) + tl.max(b_loss & 1, axis=0) > 0
    missed = tl.max(a_loss >> 1, axis=0) + tl.max(b_loss >> 1, axis=0)
    return tl.where(missed >= {most_of_all}, 2, tl.where(tiny & (missed > {most}), 1, 0))
'''


def helpers(prefix: str, scheme: Scheme, depth: int) -> dict[str, str]:
    """Name to the text of each helper that kernels may call; `depth` is K."""
    numbers = {
        "prefix": prefix,
        "tiny": repr(TINY),
        "depth": depth,
        "most": depth - -(-depth // (64 if scheme.planes > 1 else 16)),
    }
    numbers |= {"extreme": EXTREME, "most_of_all": EXTREME >> 1, "remote": repr(REMOTE)}
    named = {"extreme": EXTREMES, "span": SPAN, "level": LEVEL}
    return {name: text.format(**numbers) for name, text in named.items()}


__all__ = ["BITS", "EXTREME", "MISSED", "REMOTE", "TINY", "helpers"]
