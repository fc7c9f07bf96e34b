"""Copies, checksums and comparisons of many small tensors at once, such as all buffers of a network.

Each tensor by itself costs several operators and a wait for the device, which for hundreds of them takes longer than
the network. Here small ones are taken together, by device and dtype; larger ones one by one. Knows nothing about what
the values should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from qimeng.envs.workers.tensor_bits import bits_of, checksum, same, weighted_sum

SMALL = 1 << 14
"""Elements of the largest tensor that is taken together with others."""


def copies(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None) -> list[torch.Tensor]:
    """Copies of `tensors`; small ones of one kind are contiguous, and lie in one piece of memory.

    Args:
        tensors: what is copied.
        dtypes: of the copies, if they are others.
    """
    wanted = dtypes or [x.dtype for x in tensors]
    found = [x if _is_small(x) else x.to(dtype, copy=True) for x, dtype in zip(tensors, wanted, strict=True)]
    small = [i for i, x in enumerate(tensors) if _is_small(x)]
    for numbers in _grouped(small, [(x.device, x.dtype, d) for x, d in zip(tensors, wanted, strict=True)]):
        flat = _flat([tensors[i] for i in numbers]).to(wanted[numbers[0]])
        parts = flat.split([tensors[i].numel() for i in numbers])
        for i, part in zip(numbers, parts, strict=True):
            found[i] = part.view(tensors[i].shape)
    return found


def copied_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with copies of its tensors."""
    return dict(zip(state, copies(list(state.values())), strict=True))


def copy_state(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Copy what `source` holds into the tensors of `target` of the same names, which may have other dtypes."""
    pairs = [(value, target[key]) for key, value in source.items()]
    kinds = [(x.device, x.dtype, y.device, y.dtype) for x, y in pairs]
    with torch.no_grad():
        for numbers in _grouped(range(len(pairs)), kinds):
            torch._foreach_copy_([pairs[i][1] for i in numbers], [pairs[i][0] for i in numbers])


def differing(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the tensors that are not the same, bit for bit (`tensor_bits.same`)."""
    pairs = list(zip(some, others, strict=True))
    alike = [x.shape == y.shape and x.dtype == y.dtype and x.device == y.device for x, y in pairs]
    small = [i for i, (x, y) in enumerate(pairs) if alike[i] and _is_small(x)]
    equal = set[int]()
    for numbers in _grouped(small, [(x.device, x.dtype) for x, _ in pairs]):
        if torch.equal(*(_flat([bits_of(pair[side]) for pair in map(pairs.__getitem__, numbers)]) for side in (0, 1))):
            equal.update(numbers)
    return [i for i, (x, y) in enumerate(pairs) if i not in equal and not same(x, y)]


def checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The checksum of each (`tensor_bits.checksum`)."""
    small = [i for i, x in enumerate(tensors) if _is_small(x)]
    found = dict[int, int]()
    for numbers in _grouped(small, [(x.device, x.dtype) for x in tensors]):
        bits = [bits_of(tensors[i]).reshape(-1) for i in numbers]
        ends = torch.tensor([len(b) for b in bits]).cumsum(0) - 1
        totals = _flat(bits).cumsum(0, dtype=torch.int64)[ends.to(tensors[numbers[0]].device)]
        found |= zip(numbers, totals.diff(prepend=totals.new_zeros(1)).tolist(), strict=True)
    return tuple(found[i] if i in found else checksum(x) for i, x in enumerate(tensors))


def weighted_sums(tensors: Sequence[torch.Tensor], seed: int) -> list[int]:
    """Checksums of all (`tensor_bits.weighted_sum`): of the large ones, then of each kind of small ones together."""
    small = [i for i, x in enumerate(tensors) if _is_small(x)]
    packs = [
        _flat([bits_of(tensors[i]) for i in numbers])
        for numbers in _grouped(small, [(x.device, x.dtype) for x in tensors])
    ]
    return [weighted_sum(x, seed) for x in (*(x for x in tensors if not _is_small(x)), *packs)]


def _is_small(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and 0 < x.numel() <= SMALL


def _grouped(numbers: Iterable[int], kinds: Sequence[object]) -> list[list[int]]:
    """`numbers` whose kinds are the same, together."""
    found: dict[object, list[int]] = {}
    for number in numbers:
        found.setdefault(kinds[number], []).append(number)
    return list(found.values())


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


__all__ = ["SMALL", "checksums", "copied_state", "copies", "copy_state", "differing", "weighted_sums"]
