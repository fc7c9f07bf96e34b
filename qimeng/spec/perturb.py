"""Values that parameters and buffers take in a trial, changed in place by a seed.

Deals in a module's state. Knows nothing about inputs except a seed that they may share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from qimeng.spec.leaf import infer_domain
from qimeng.spec.together import change_parameters, untied

SHARES = (0.0, 1.0, 0.25, 1 / 16)
"""Share of a parameter's rows that change (at least one), by the seed. A change of few rows does not show in a sample
of the values; a change of all rows shows errors that a single row hides."""

SMALL = 1 << 14
"""Elements of the largest tensor that is changed together with others."""

MOVED_SHARE = 1 / 8
"""Of the elements of a mask or table of integers, those that change places with one another."""


def seed_of(secret: int, share: int, signs: bool = False, fixed: bool = False) -> int:
    """A seed of `perturb_parameters`.

    Args:
        secret: at most 54 bits.
        share: which of `SHARES`.
        signs: whether what has one sign gets both.
        fixed: whether masks, tables of integers and constants change as well.
    """
    return secret << 4 | fixed << 3 | share << 1 | signs


def share_of(seed: int) -> int:
    """Which of `SHARES` a seed of `perturb_parameters` stands for."""
    return seed // 2 % len(SHARES)


@torch.no_grad()
def perturb_parameters(module: torch.nn.Module, seed: int) -> None:
    """Change `module`'s state in place, so that results precomputed from its first weights become wrong.

    With n ~ N(0, 1): parameters p (1 + 0.1 n) + 0.05 n in some rows, one at least; running variances v exp(0.3 n),
    running means m + 0.1 n; other buffers of many real values b (1 + 0.1 n) in some rows. If all elements of a
    parameter have one sign, such as a scale of ones, and `seed` is odd, half of the changed ones get the other sign. If
    `seed_of` was called with `fixed`, buffers with a single value change like parameters, and some elements of masks
    and integer tensors swap places; sorted values stay sorted. Single integers (counters), tensors outside the state
    dictionary and float8 tensors never change. If `qimeng.spec.together.tied` made the seed, parameters change together
    with the inputs. The result is the same for the same seed and device type.
    """
    tie, secret = untied(seed)
    share, signs, fixed = SHARES[share_of(seed)], seed % 2, bool(seed & 8)
    source = _Noise(seed)
    held = module.state_dict().keys()
    parameters = [t for t in module.parameters() if t.is_floating_point() and t.numel() and t.dtype.itemsize > 1]
    for tensors in _packs(parameters):
        _change(tensors, source, share, bool(signs))
    if tie:
        change_parameters(parameters, tie, secret)
    statistics: dict[str, list[torch.Tensor]] = {"running_var": [], "running_mean": []}
    for name, buffer in module.named_buffers():
        if name in held and buffer.numel() and not (buffer.is_floating_point() and buffer.dtype.itemsize == 1):
            last = name.rsplit(".", 1)[-1]
            if last in statistics:
                statistics[last].append(buffer)
            else:
                _perturb_buffer(buffer, source, share, fixed)
    for tensors in _packs(statistics["running_var"]):
        torch._foreach_mul_(tensors, _cut((0.3 * source.noise(_flat(tensors))).exp(), tensors))
    for tensors in _packs(statistics["running_mean"]):
        torch._foreach_add_(tensors, _cut(source.noise(_flat(tensors)), tensors), alpha=0.1)


def _change(tensors: Sequence[torch.Tensor], source: _Noise, share: float, signs: bool) -> None:
    """Change parameters of one dtype on one device, all at once."""
    if len(tensors) == 1:
        _change_one(tensors[0], source, share, signs)
        return
    flat = _flat(tensors)
    n, moved = source.noise(flat), source.rows_of_all(tensors, share)
    if signs:
        owner = _owners([x.numel() for x in tensors], flat.device)
        some = [_least((flat * side > 0).float(), owner, len(tensors)) for side in (1, -1)]
        has_one_sign = torch.maximum(*some)[owner].to(flat.dtype)
        flat.mul_(1 - 2 * has_one_sign * moved * (source.noise(flat) > 0))
    flat.mul_(1 + 0.1 * n * moved).add_(n * moved, alpha=0.05)
    torch._foreach_copy_(list(tensors), _cut(flat, tensors))


def _change_one(tensor: torch.Tensor, source: _Noise, share: float, signs: bool) -> None:
    n, moved = source.noise(tensor), source.rows(tensor, share)
    if signs and bool((tensor > 0).all() | (tensor < 0).all()):
        tensor.mul_(1 - 2 * moved * (source.noise(tensor) > 0))
    tensor.mul_(1 + 0.1 * n * moved).add_(n * moved, alpha=0.05)


def _packs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Small tensors of one dtype on one device together; alone the others, and those that may share memory."""
    where = [_memory(x) for x in tensors]
    count = Counter(where)
    found: dict[object, list[torch.Tensor]] = {}
    for number, (x, memory) in enumerate(zip(tensors, where, strict=True)):
        together = memory and count[memory] == 1 and x.numel() <= SMALL
        found.setdefault((x.device, x.dtype) if together else number, []).append(x)
    return list(found.values())


def _memory(x: torch.Tensor) -> int:
    """Where the memory of a plain tensor begins; 0 for others."""
    return x.untyped_storage().data_ptr() if type(x) in (torch.Tensor, torch.nn.Parameter) else 0


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _cut(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of `flat` for each of `tensors`, in its shape."""
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _owners(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """For each element of a flat tensor, the number of the part that it is in."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)


def _least(flat: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    """The least element of each part of a flat tensor."""
    return flat.new_full((count,), torch.inf).scatter_reduce_(0, owner, flat, "amin")


def _perturb_buffer(tensor: torch.Tensor, source: _Noise, share: float, fixed: bool) -> None:
    if tensor.is_floating_point() and infer_domain(tensor) in ("real", "positive"):
        one_value = bool(tensor.min() == tensor.max())
        if not one_value:
            tensor.mul_(1 + 0.1 * source.noise(tensor) * source.rows(tensor, share))
        elif fixed:
            n = source.noise(tensor) * source.rows(tensor, share)
            tensor.mul_(1 + 0.1 * n).add_(n, alpha=0.05)
    elif fixed and tensor.dim() and not tensor.is_complex() and infer_domain(tensor) in ("index", "mask", "sign"):
        _move_places(tensor, source)


def _move_places(tensor: torch.Tensor, source: _Noise) -> None:
    """Some elements change places; of integers in order, the inner ones are drawn anew among themselves, in order."""
    flat = tensor.flatten()
    count = flat.numel()
    ordered = flat.dtype is not torch.bool and bool((flat[1:] >= flat[:-1]).all())
    if ordered:
        at = source.integers(count, count, tensor.device).sort().values
        at[0], at[-1] = 0, count - 1
        tensor.copy_(flat[at].view_as(tensor))
        return
    at = source.order(count, tensor.device)[: max(2, int(count * MOVED_SHARE))]
    flat = flat.clone()
    flat[at] = flat[at.roll(1)]
    tensor.copy_(flat.view_as(tensor))


class _Noise:
    """Random numbers by a seed, one generator for each device."""

    def __init__(self, seed: int):
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        """Normal numbers, shaped like `like`."""
        draw = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        return draw.normal_(generator=self._generator(like.device)).to(like.dtype)

    def rows(self, like: torch.Tensor, share: float) -> torch.Tensor:
        """1 where the rows of `like` change, 0 where they stay, to be broadcast."""
        shape = [size if d == dim else 1 for d, size in enumerate(like.shape)] if (dim := _long(like)) >= 0 else []
        draw = torch.rand(shape, generator=self._generator(like.device), device=like.device)
        return ((draw < share) | (draw == draw.min())).to(like.dtype)

    def rows_of_all(self, tensors: Sequence[torch.Tensor], share: float) -> torch.Tensor:
        """The same for each element of `tensors`, of one dtype on one device, one tensor after another."""
        dims = [_long(x) for x in tensors]
        counts = [x.shape[dim] if dim >= 0 else 1 for x, dim in zip(tensors, dims, strict=True)]
        dtype, device = tensors[0].dtype, tensors[0].device
        draw = torch.rand(sum(counts), generator=self._generator(device), device=device)
        owner = _owners(counts, device)
        moved = ((draw < share) | (draw == _least(draw, owner, len(counts))[owner])).to(dtype).split(counts)
        shapes = [[n if d == dim else 1 for d, n in enumerate(x.shape)] for x, dim in zip(tensors, dims, strict=True)]
        return _flat([m.view(s).expand(x.shape) for m, s, x in zip(moved, shapes, tensors, strict=True)])

    def integers(self, count: int, below: int, device: torch.device) -> torch.Tensor:
        """`count` integers from 0 up to `below`."""
        return torch.randint(below, (count,), generator=self._generator(device), device=device)

    def order(self, count: int, device: torch.device) -> torch.Tensor:
        """The numbers from 0 up to `count` in any order."""
        return torch.randperm(count, generator=self._generator(device), device=device)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(self._seed)
        return self._generators[device]


def _long(x: torch.Tensor) -> int:
    """The first dimension of more than one element, else the last; -1 where there is none."""
    return next((d for d, size in enumerate(x.shape) if size > 1), x.dim() - 1)


__all__ = ["SHARES", "perturb_parameters", "seed_of", "share_of"]
