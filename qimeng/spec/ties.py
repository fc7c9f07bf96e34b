"""Relations between the inputs of one set: equal values, lengths that add up to a size, sorted segments.

Deals in the leaves of one example. Properties of a single tensor are found in `qimeng.spec.structure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qimeng.spec.leaf import Leaf, is_plain, readable
from qimeng.spec.ways import Shuffled


def same_as(given: Sequence[object], leaves: Sequence[Leaf]) -> tuple[int, ...]:
    """For each input the number of the first one that is the same: one tensor, or whole numbers that are equal."""
    found: list[int] = []
    for i, (x, leaf) in enumerate(zip(given, leaves, strict=True)):
        first = i
        for j in range(i):
            y, value = given[j], leaf.value
            if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or leaf.layout != leaves[j].layout:
                continue
            counts = not value.is_floating_point() and not value.is_complex() and value.numel() > 1
            if x is y or _place(x) == _place(y) or counts and torch.equal(value, leaves[j].value):
                first = found[j]
                break
        found.append(first)
    return tuple(found)


def tied(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """The leaves, with fewer ways to draw values that depend on another input.

    Lengths that add up to a size of another input are only reordered, so their sum stays. Sorted segments with offsets
    (such as the columns of a sparse matrix in compressed-row form) stay as given, since numbers and offsets drawn
    independently would not fit.
    """
    sizes = {size for leaf in leaves for size in leaf.shape}
    whole = [leaf for leaf in leaves if leaf.is_tensor and _is_vector(leaf.value)]
    values = {id(leaf): readable(leaf.value) for leaf in whole}
    stays: set[int] = set()
    for offsets in whole:
        for columns in whole:
            if columns is not offsets and _are_segments(values[id(columns)], values[id(offsets)]):
                stays |= {id(offsets), id(columns)}
    found = []
    for leaf in leaves:
        if id(leaf) in stays:
            leaf = replace(leaf, domain="fixed", limited=())
        elif leaf.domain in ("index", "permutation") and id(leaf) in values and _adds_up(values[id(leaf)], sizes):
            leaf = replace(leaf, limited=(Shuffled((0,)),))
        found.append(leaf)
    return tuple(found)


def _place(x: torch.Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), int(x.storage_offset())


def _is_vector(x: torch.Tensor) -> bool:
    whole = not x.is_floating_point() and not x.is_complex() and x.dtype is not torch.bool
    return whole and x.dim() == 1 and x.numel() > 1 and is_plain(x)


def _adds_up(lengths: torch.Tensor, sizes: set[int]) -> bool:
    return bool((lengths >= 0).all()) and int(lengths.sum()) in sizes - {len(lengths)}


def _are_segments(numbers: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Whether `numbers` rise within each segment that `offsets` mark, and not as a whole."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(numbers) or bool((offsets.diff() < 0).any()):
        return False
    falls = numbers.diff() <= 0
    starts = torch.zeros(len(numbers) + 1, dtype=torch.bool)
    starts[offsets.long()] = True
    return bool(falls.any()) and not bool((falls & ~starts[1:-1]).any()) and bool((~starts[1:-1]).any())


__all__ = ["same_as", "tied"]
