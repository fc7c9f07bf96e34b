"""Many small tensors at once give what each gives by itself."""

from __future__ import annotations

import random

import pytest
import torch

from qimeng.envs.workers.small_tensors import (
    SMALL,
    checksums,
    copied_state,
    copies,
    copy_state,
    differing,
    weighted_sums,
)
from qimeng.envs.workers.tensor_bits import checksum, same

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


def tensors(seed: int) -> list[torch.Tensor]:
    """Of all kinds: contiguous or not, empty, of no dimensions, large, with NaN."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    found = [torch.randn(shape).mul_(50).to(d) for d in DTYPES for shape in ((), (0,), (7,), (3, 4), (SMALL + 1,))]
    found += [torch.randn(6, 8).T, torch.randn(2, 3, dtype=torch.complex64).conj(), torch.randn(9)[::2]]
    found += [torch.full((5,), torch.nan), torch.nn.Parameter(torch.randn(4)), torch.ones(3).expand(2, 3)]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_the_same_and_lie_in_memory_of_their_own(seed: int) -> None:
    given = tensors(seed)
    made = copies(given)
    assert all(same(a.detach(), b) for a, b in zip(given, made, strict=True))
    memory = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    assert not memory & {x.untyped_storage().data_ptr() for x in made if x.numel()}
    wide = [torch.complex128 if x.is_complex() else torch.float64 for x in given]
    assert all(same(x.detach().to(d), y) for x, d, y in zip(given, wide, copies(given, wide), strict=True))
    few = [x for x in made if x.dtype is torch.int8 and 0 < x.numel() <= SMALL]
    assert len(few) > 1 and len({x.untyped_storage().data_ptr() for x in few}) == 1


def test_a_state_is_copied_into_other_dtypes() -> None:
    state = {str(i): x.detach() for i, x in enumerate(tensors(0)) if not x.is_complex()}
    kept = copied_state(state)
    target = {
        key: torch.zeros(x.shape, dtype=torch.float64 if x.is_floating_point() else x.dtype) for key, x in state.items()
    }
    copy_state(kept, target)
    assert all(same(target[key], x.to(target[key].dtype)) for key, x in state.items())


@pytest.mark.parametrize("seed", range(4))
def test_sums_and_differences_are_those_of_each(seed: int) -> None:
    given = [x.detach() for x in tensors(seed)]
    others = [x.clone() for x in given]
    assert checksums(given) == tuple(map(checksum, given)) and not differing(given, others)
    sums = weighted_sums(given, seed)
    assert sums == weighted_sums(others, seed)
    changed = random.Random(seed).sample([i for i, x in enumerate(given) if x.numel()], 3)
    for i in changed:
        flat = others[i].view(-1) if others[i].is_contiguous() else others[i].select(0, 0).select(-1, 0)
        at = flat[-1] if flat.dim() else flat
        at.copy_(at.logical_not())
    others = [x if x.shape else x.clone() for x in others]
    assert differing(given, others) == sorted(changed) == [i for i, x in enumerate(given) if not same(x, others[i])]
    assert weighted_sums(others, seed) != sums
    others[changed[0]] = others[changed[0]].reshape(-1)[:0]
    assert changed[0] in differing(given, others)
    bits = [torch.zeros(3), torch.tensor([-0.0, 0, 0])]
    assert differing(bits[:1], bits[1:]) == [0] and checksums(bits[:1]) != checksums(bits[1:])
