"""Words as numbers: any family and any operator gets a vector of the same length, without a list of known ones.

Deals in words and their hashes (feature hashing: Weinberger et al., "Feature Hashing for Large Scale Multitask
Learning", https://arxiv.org/abs/0902.2206). Knows nothing about what the words mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

WIDTH = 16
"""Numbers of a word. Of two words drawn at random, one pair in 32,768 has the same."""


@lru_cache(4096)
def vector(word: str) -> np.ndarray:
    """`WIDTH` numbers, each -1 or 1, float32, that only depend on the word.

    >>> vector("gemm").shape, set(vector("gemm").tolist()) <= {-1.0, 1.0}
    ((16,), True)
    """
    bits = hashlib.blake2b(word.encode(), digest_size=WIDTH // 8).digest()
    found = 2 * np.unpackbits(np.frombuffer(bits, dtype=np.uint8)).astype(np.float32) - 1
    found.setflags(write=False)
    return found


def mean_vector(words: Iterable[str]) -> np.ndarray:
    """The mean of the words' vectors, each as often as it occurs, from -1 to 1; zeros where there is no word."""
    listed = list(words)
    return np.mean([vector(w) for w in listed], axis=0) if listed else np.zeros(WIDTH, dtype=np.float32)


__all__ = ["WIDTH", "mean_vector", "vector"]
