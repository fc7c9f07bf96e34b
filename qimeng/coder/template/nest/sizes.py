"""Round numbers.

Deals in integers.
"""

from __future__ import annotations


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and at least `least`, itself a power of two.

    >>> power_of_two(0), power_of_two(5), power_of_two(5, 16)
    (1, 8, 16)
    """
    return max(least, 1 << max(n - 1, 0).bit_length())


def round_up(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple of `multiple`.

    >>> round_up(65, 64)
    128
    """
    return -(-n // multiple) * multiple


__all__ = ["power_of_two", "round_up"]
