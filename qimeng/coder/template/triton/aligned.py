"""A helper of entry functions that give kernels tensor descriptors.

Deals in host text. Knows nothing about which tensors those are.
"""

ALIGNED = '''
def {prefix}_aligned(x):
    """`x`, or a copy of it where its memory does not start at a multiple of 16 bytes, which descriptors need."""
    if x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
'''
"""To be formatted with the prefix of the file's top-level names."""

__all__ = ["ALIGNED"]
