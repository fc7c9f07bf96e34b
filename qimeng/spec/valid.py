"""Which way of drawing new values the module accepts for each input, found by running it.

Deals in a spec made from examples, at reduced size on the CPU. The user's own inputs are valid by definition. Other
values are not if the module raises, its outputs change shape, or more of them are non-finite. Such an input is drawn
more cautiously. If no way works, it stays as given.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.spec.computation import Computation
from qimeng.spec.distributions import DISTRIBUTIONS, EXAMPLES, applies
from qimeng.spec.leaf import Leaf, readable
from qimeng.spec.origin import ExampleOrigin
from qimeng.spec.patience import BRIEF_S, left_s, patience
from qimeng.spec.seeding import seed_generators
from qimeng.spec.source import Source

SEEDS = (1, 2, 3)
"""Seeds of the input sets that each choice is tried on."""
SECONDS = 20.0
"""Time limit in seconds. Inputs that were not tried by then stay as given."""

Looks = tuple[str, float]
"""Structure of outputs as text, and the share of their values that are not finite."""


def choose_ways(spec: Computation) -> tuple[int, ...]:
    """For each flattened input, the index of the way of `Leaf.ways` to use; one past the last if it stays as given."""
    origin = spec.origin
    if not isinstance(origin, ExampleOrigin):
        return ()
    first = [0] * len(spec.leaves)
    if not any(leaf.ways for leaf in spec.leaves):
        return tuple(first)
    small = spec.reduced()
    if small is not spec and isinstance(small.origin, ExampleOrigin):
        pairs = zip(small.leaves, small.ways, spec.leaves, strict=True)
        return tuple(len(leaf.ways) if way and way >= len(it.ways) else way for it, way, leaf in pairs)
    if not spec.is_small:
        return tuple(first)  # too large to be run here
    began = time.monotonic()
    own = _looks(spec, None, 0)
    if own is None:
        return tuple(first)  # that it fails on its own inputs is for `KernelSpec.check` to say

    def holds(ways: list[int]) -> bool:
        return all(_is_like(_looks(spec, tuple(ways), seed), own) for seed in SEEDS)

    if holds(first):
        return tuple(first)
    chosen = [len(leaf.ways) for leaf in spec.leaves]
    for i, leaf in enumerate(spec.leaves):
        for way in range(len(leaf.ways)):
            if time.monotonic() - began > min(SECONDS, left_s()):
                return tuple(chosen)
            if holds([way if j == i or origin.same[j] == i else w for j, w in enumerate(chosen)]):
                chosen = [way if j == i or origin.same[j] == i else w for j, w in enumerate(chosen)]
                break
    return tuple(chosen)


def _is_like(found: Looks | None, own: Looks) -> bool:
    return found is not None and found[0] == own[0] and found[1] <= own[1] * 1.25


def _looks(spec: Computation, ways: tuple[int, ...] | None, seed: int) -> Looks | None:
    """What the module makes of inputs drawn in these ways, of its own where there are none; None where it raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            seed_generators(0)
            module = spec.module()
            inputs = spec.inputs(seed, "cpu", EXAMPLES) if ways is None else spec.redrawn(seed, ways)
            with patience("forward", min(BRIEF_S, left_s())):
                outputs = _pytree.tree_leaves(module(*inputs))
    except Exception:  # noqa: BLE001  the user's module may raise anything
        return None
    return _described(outputs)


def _described(outputs: list[Any]) -> Looks:
    tensors = [y for y in outputs if isinstance(y, torch.Tensor)]
    text = str([(tuple(y.shape), y.dtype) if isinstance(y, torch.Tensor) else type(y).__name__ for y in outputs])
    numbers = [y for y in tensors if y.is_floating_point() or y.is_complex()]
    total = sum(y.numel() for y in numbers)
    wrong = sum(int((~(y if y.dtype.itemsize > 1 else y.float()).isfinite()).sum()) for y in numbers)
    return text, wrong / max(total, 1)


def never_changed(spec: Computation) -> tuple[int, ...]:
    """Numbers of the flattened inputs that are the same in every trial though no constants.

    Those that no other distribution changes either; what is no tensor, empty or of one value says nothing.
    """
    found = []
    for i, (leaf, domain) in enumerate(zip(spec.leaves, spec.domains, strict=False)):
        if not isinstance(leaf.value, torch.Tensor) or leaf.value.numel() < 2:
            continue
        x = readable(leaf.value)
        moves = x.is_floating_point() and any(applies(d, domain) for d in DISTRIBUTIONS)
        if not moves and bool((x != x.flatten()[0]).any()) and _stays(leaf, spec.ways[i]):
            found.append(i)
    return tuple(found)


def _stays(leaf: Leaf, way: int) -> bool:
    if way >= len(leaf.ways):
        return True
    return all(torch.equal(leaf.value, leaf.draw(Source(seed, "cpu"), way)) for seed in SEEDS)


__all__ = ["choose_ways", "never_changed"]
