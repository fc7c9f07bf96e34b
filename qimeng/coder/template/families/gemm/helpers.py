"""Functions that the kernels of a product and its entry function may call.

Deals in texts. Knows nothing about which are needed.
"""

from __future__ import annotations

POWER = '''
@triton.jit
def {prefix}_power(top):
    """Power of two that brings `top` to [2^14, 2^15), and its inverse."""
    e = tl.minimum(tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 255, 15), 254)
    return ((268 - e) << 23).to(tl.float32, bitcast=True), ((e - 14) << 23).to(tl.float32, bitcast=True)
'''

BFLOAT16 = '''
@triton.jit
def {prefix}_bfloat16(x):
    """fp32 rounded to bf16; a number never to infinity."""
    cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) > 3.38e38, cut, x).to(tl.bfloat16)
'''

SHORT = '''
@triton.jit
def {prefix}_short(x):
    """fp32 rounded to {bits} significant bits; neither infinite nor no number."""
    return ((x.to(tl.int32, bitcast=True) + {half}) & {mask}).to(tl.float32, bitcast=True)
'''

PROGRAMS = '''
def {prefix}_programs(device):
    """Programs of a persistent launch: one for each SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
'''

__all__ = ["BFLOAT16", "POWER", "PROGRAMS", "SHORT"]
