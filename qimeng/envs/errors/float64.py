"""Computations in float64: their inputs, the dtypes in their code, and small changes of inputs (one ulp, or nearby).

Deals in trees of tensors and in operators as they are called. Knows nothing about specifications or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.errors import accuracy
from qimeng.envs.errors.double_convolution import as_products, is_worth_it
from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.leaf import infer_domain, unexpanded

CONTINUOUS = ("real", "positive", "probability")
NEARBY = (2.0**-17, 1 / 64)
"""Most that `nearby` takes off a value, as a share of it, for one look and the next: so little that two logits which
are nearly the same stay so, and enough that every rounding falls out anew, TF32's too. Half types, whose last place is
more than the former, are moved by two of them at least."""
STATE = 1 << 20
"""What separates the seeds of parameters and buffers from those of inputs."""


@dataclass(frozen=True)
class Near:
    """Which inputs near those of a draw.

    Attributes:
        seed: of how much each value is moved.
        share: most that it is moved by, as a share of it.
    """

    seed: int
    share: float = NEARBY[1]


def to_double(inputs: Sequence[Any], device: torch.device | None = None) -> tuple[Any, ...]:
    """`inputs` with every floating tensor in float64 and every complex one in complex128, on `device` if given."""
    double = {torch.complex64: torch.complex128}
    return tuple(
        _pytree.tree_map_only(
            torch.Tensor,
            lambda x: x.to(
                device=device, dtype=double.get(x.dtype, torch.float64) if accuracy.is_float(x) else x.dtype
            ),
            list(inputs),
        )
    )


class NamedAsDouble(DispatchMode):
    """In the block, an operator that names float32 gets float64; what names a half type is rounded to it, in float64.

    Otherwise ``x.float()`` inside a module, or inside the standard deviation of half types, would end the float64 run.
    A cast to a half type is an intended rounding and stays. This is for computations without jumps: a jump after a cast
    depends on every rounding after it. Convolutions are computed the quickest way.

    Raises:
        TypeError: bits are reinterpreted as another dtype, which is meaningless in float64.
    """

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` with float64 where it names another floating dtype."""
        if func is torch.ops.aten.view.dtype:
            raise TypeError("the bits of a float are no bits of its float64 value")
        kwargs = kwargs or {}
        if func is torch.ops.aten.convolution.default and _on_gpu(*args):
            return _convolved(*args)
        named = {x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)}  # never in a list of arguments
        if not named:
            return func(*args, **kwargs)
        args = tuple(_raised(x) for x in args)
        kwargs = {key: _raised(x) for key, x in kwargs.items()}
        found = func(*args, **kwargs)
        if not _HALF & named:
            return found
        return _pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.dtype in _HALF else x, found)


def _convolved(*arguments: Any) -> torch.Tensor:
    """A convolution in float64 on a GPU, the quickest way."""
    _, weight, _, stride, _, _, transposed, _, groups = arguments
    if is_worth_it(weight, transposed, groups):
        return as_products(*arguments)
    with torch.backends.cudnn.flags(enabled=not _is_slow_in_cudnn(weight, stride, groups)):
        found: torch.Tensor = torch.ops.aten.convolution.default(*arguments)
    return found


def _on_gpu(x: torch.Tensor, *arguments: Any) -> bool:
    return x.is_cuda and x.dtype is torch.float64


def _is_slow_in_cudnn(weight: torch.Tensor, stride: Sequence[int], groups: int) -> bool:
    """Whether PyTorch's own convolution is faster than cuDNN's (seen with torch 2.11 on an H100).

    It is for windows of several elements that move by one, with channels in one group.
    """
    return weight[0, 0].numel() > 1 and all(s == 1 for s in stride) and groups == 1


_HALF = {torch.float16, torch.bfloat16}


def _raised(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def move(inputs: Sequence[Any], by: float) -> None:
    """Multiply floating inputs by 1 + by or 1 - by, element by element, in place; zeros keep their sign."""
    for x in tensors_in(inputs):
        if x.is_floating_point() and x.numel():
            if not x.is_contiguous():
                x.mul_(1 + by * _signs(x.shape, x))
                continue
            flat = x.view(-1)
            factors = _signs((min(flat.numel(), accuracy.BLOCK),), x).mul_(by).add_(1)
            for start in range(0, flat.numel(), accuracy.BLOCK):
                part = flat[start : start + accuracy.BLOCK]
                part.mul_(factors[: part.numel()])


def nearby(inputs: Sequence[Any], domains: Sequence[str], near: Near) -> tuple[Any, ...]:
    """Inputs like `inputs` with other roundings: continuous ones times 1 - share * u, u uniform in [0, 1).

    Strides stay.

    Args:
        inputs: a specification's inputs.
        domains: of each of them, flattened (`KernelSpec.domains`); signs, indices and masks stay as they are.
        near: seed of u, and the share.
    """
    leaves, tree = _pytree.tree_flatten(list(inputs))
    for i, (x, domain) in enumerate(zip(leaves, domains, strict=True)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or domain not in CONTINUOUS:
            continue
        once = unexpanded(x)
        leaves[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        unexpanded(leaves[i]).copy_(once.double() * _factors(once, near, i))
    return tuple(_pytree.tree_unflatten(leaves, tree))


@torch.no_grad()
def move_nearby(module: torch.nn.Module, near: Near) -> None:
    """Move parameters and buffers in place as `nearby` moves inputs.

    Where what they meet is the same on all inputs nearby, as behind a sigmoid that is 1, new roundings come from them
    alone.
    """
    for i, x in enumerate(module.state_dict(keep_vars=True).values()):
        wide = x.is_floating_point() and x.dtype.itemsize > 1
        if wide and x.numel() and (isinstance(x, torch.nn.Parameter) or infer_domain(x) in CONTINUOUS):
            x.copy_(x.double() * _factors(x, near, STATE + i))


def _factors(x: torch.Tensor, near: Near, number: int) -> torch.Tensor:
    """By which numbers the elements of `x` are multiplied."""
    generator = torch.Generator(device=x.device).manual_seed(near.seed + number)
    share = max(near.share, min(NEARBY[1], 2 * torch.finfo(x.dtype).eps))
    u = torch.empty(x.shape, dtype=torch.float32, device=x.device).uniform_(generator=generator)
    return u.double().mul_(-share).add_(1)


def _signs(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, tuple(shape), device=like.device, dtype=torch.int8).to(like.dtype).mul_(2).sub_(1)


def aliases(x: torch.Tensor, inputs: Sequence[Any]) -> bool:
    """Whether `x` shares memory with one of the tensors in `inputs`."""
    memory = x.untyped_storage().data_ptr()
    return any(memory == y.untyped_storage().data_ptr() for y in tensors_in(inputs))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor in a pytree, in order."""
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


__all__ = ["NEARBY", "NamedAsDouble", "Near", "aliases", "move", "move_nearby", "nearby", "tensors_in", "to_double"]
