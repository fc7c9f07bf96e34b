"""A function of kernels that rounds as tensor cores should see it; they cut numbers off.

Deals in text. Knows nothing about who calls it.
"""

from __future__ import annotations

ROUND = '''
@triton.jit
def {prefix}_round(x):
    """fp32 rounded to TF32's significand, which tensor cores would truncate to; a number never to infinity."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(x) < 3.4e38, bits + 4096, bits) & -8192
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
'''

__all__ = ["ROUND"]
