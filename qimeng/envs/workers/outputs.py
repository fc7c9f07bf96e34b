"""Describes what a call returned, so that descriptions can be compared.

Deals in pytrees of tensors. A description from another process is validated. Knows nothing about what the values should
be, or how tensors go from one process to another (`qimeng.envs.workers.tensor_transfer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.workers.channel import Malformed
from qimeng.spec.returned import opened


@dataclass(frozen=True)
class Leaf:
    """One leaf of an output.

    Attributes:
        kind: its class in words; ``"Tensor"`` for plain tensors with no attributes of their own and nothing pending.
        shape: sizes.
        stride: strides in elements; 0 where the size is at most 1, since those mean nothing.
        dtype: such as ``"float32"``.
        device: ``"cuda"`` or ``"cpu"``.
        shares: names of the inputs, parameters and earlier outputs whose memory it shares.
        value: for a leaf that is no tensor, its text.
    """

    kind: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    shares: tuple[str, ...] = ()
    value: str = ""

    @property
    def is_tensor(self) -> bool:
        """True for tensors of any class."""
        return bool(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        n = getattr(torch, self.dtype).itemsize if self.is_tensor else 0
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class Facts:
    """Structure of an output and its leaves, values left out."""

    tree: str
    leaves: tuple[Leaf, ...]


def describe(output: Any, held: Mapping[str, torch.Tensor]) -> tuple[Facts, list[torch.Tensor]]:
    """The facts of `output` and its tensors.

    Args:
        output: what a call returned.
        held: inputs, parameters and buffers by name, whose memory an output may share.
    """
    leaves, tree = _pytree.tree_flatten(opened(output))
    owners: dict[int, list[str]] = {}
    for name, tensor in held.items():
        owners.setdefault(_memory(tensor), []).append(name)
    facts, tensors = [], []
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            facts.append(Leaf(_kind(leaf), value=repr(leaf)[:200]))
            continue
        memory = _memory(leaf)
        shares = tuple(sorted(owners.get(memory, ()))) if leaf.numel() else ()
        facts.append(
            Leaf(
                _kind(leaf),
                tuple(leaf.shape),
                _strides(leaf),
                str(leaf.dtype).removeprefix("torch."),
                leaf.device.type,
                shares,
            )
        )
        owners.setdefault(memory, []).append(f"output {number}")
        tensors.append(leaf)
    return Facts(str(tree), tuple(facts)), tensors


def difference(actual: Facts, expected: Facts) -> str | None:
    """How `actual` differs from what eager returns, in words; None where it does not.

    An output may share memory only where eager's does; it need not.
    """
    if actual.tree != expected.tree or len(actual.leaves) != len(expected.leaves):
        return f"the output's structure is {actual.tree[:200]}, expected {expected.tree[:200]}"
    for number, (a, e) in enumerate(zip(actual.leaves, expected.leaves, strict=True)):
        for what in ("kind", "shape", "dtype", "device", "stride", "value"):
            got, want = getattr(a, what), getattr(e, what)
            if got != want:
                return f"output {number}: {what} is {got}, expected {want}"
        more = sorted(set(a.shares) - set(e.shares))
        if more:
            return f"output {number} shares memory with {', '.join(more)}; it must be new memory"
    return None


def without_shares(facts: Facts) -> Facts:
    """The facts without shared memory, for calls where that is not checked."""
    return Facts(facts.tree, tuple(replace(leaf, shares=()) for leaf in facts.leaves))


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """The facts as JSON data."""
    return {"tree": facts.tree, "leaves": [vars(leaf) for leaf in facts.leaves]}


def facts_from_json(data: Any) -> Facts:
    """The facts that a process sent.

    Raises:
        Malformed: it is something else.
    """
    try:
        leaves = tuple(
            Leaf(
                str(leaf["kind"]),
                _ints(leaf["shape"]),
                _ints(leaf["stride"]),
                _dtype_name(leaf["dtype"]),
                str(leaf["device"]),
                tuple(str(s) for s in leaf["shares"]),
                str(leaf["value"]),
            )
            for leaf in data["leaves"]
        )
        return Facts(str(data["tree"]), leaves)
    except (TypeError, KeyError, ValueError) as error:
        raise Malformed(f"the output was not described: {error}") from error


def _kind(leaf: Any) -> str:
    """Class of a leaf; a name is no proof of a class, and an attribute may hide a method of the class."""
    kind = type(leaf)
    if kind is torch.Tensor:
        traits = {
            "a pending negation": leaf.is_neg(),
            "a pending conjugation": leaf.is_conj(),
            "a gradient to come": leaf.requires_grad,
            "inference mode's limits": leaf.is_inference(),
        }
        own = sorted(vars(leaf)) + [name for name, here in traits.items() if here]
        return "Tensor" if not own else f"Tensor with {', '.join(own)[:200]}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(0 if n <= 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _ints(items: Any) -> tuple[int, ...]:
    if not all(type(i) is int for i in items):
        raise ValueError("not all are integers")
    return tuple(items)


def _dtype_name(name: Any) -> str:
    if name and name not in _DTYPES:
        raise ValueError(f"no dtype {str(name)[:40]!r}")
    return str(name)


_DTYPES = frozenset(name for name, item in vars(torch).items() if isinstance(item, torch.dtype))


__all__ = ["Facts", "Leaf", "describe", "difference", "facts_from_json", "facts_to_json", "without_shares"]
