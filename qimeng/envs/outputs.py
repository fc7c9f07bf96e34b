"""What a call returned: described in words that can be compared, and handed to another process.

Deals in pytrees of tensors. On a GPU a tensor goes over as a CUDA IPC handle; on the CPU as the bytes of a memory file,
which is read, never mapped, so that a sender cannot pull it away under the reader. Everything received is checked.
Knows nothing about what the values should be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.channel import Malformed


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
    leaves, tree = _pytree.tree_flatten(output)
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


def hand_over(tensors: Sequence[torch.Tensor]) -> tuple[list[dict[str, Any]], list[int]]:
    """What `take` needs to see the same tensors in another process: JSON data and open files.

    GPU tensors stay where they are: keep them until the other process has let go of them.
    """
    items: list[dict[str, Any]] = []
    files: list[int] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            items.append({})
        elif tensor.is_cuda:
            storage = tensor.untyped_storage()
            device, handle, size, offset, counter, counter_offset, event, synchronize = storage._share_cuda_()
            items.append(
                {
                    "device": device,
                    "handle": handle.hex(),
                    "size": size,
                    "base": offset,
                    "counter": counter.hex(),
                    "counter_offset": counter_offset,
                    "event": event.hex(),
                    "synchronize": bool(synchronize),
                    "offset": tensor.storage_offset(),
                    "stride": list(tensor.stride()),
                }
            )
        else:
            fd = os.memfd_create("output")
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(
                    tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data
                )
            items.append({"file": len(files)})
            files.append(fd)
    return items, files


def take(items: Any, files: Sequence[int], leaves: Sequence[Leaf]) -> list[torch.Tensor]:
    """The tensors that another process handed over, for tensor leaves described before.

    On a GPU they are the other process's memory: let go of them before it ends. On the CPU they are copies.

    Raises:
        Malformed: what came does not fit the description.
    """
    if not isinstance(items, list) or len(items) != len(leaves):
        raise Malformed("a tensor was not handed over")
    return [_take_one(item, files, leaf) for item, leaf in zip(items, leaves, strict=True)]


def _take_one(item: Any, files: Sequence[int], leaf: Leaf) -> torch.Tensor:
    dtype = getattr(torch, leaf.dtype)
    if leaf.bytes == 0:
        return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
    try:
        if leaf.device == "cuda":
            return _take_cuda(item, leaf, dtype)
        return _take_file(files[int(item["file"])], leaf, dtype)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise Malformed(f"a tensor was not handed over: {error}") from error


def _take_cuda(item: Any, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
    stride, offset, size = _ints(item["stride"]), int(item["offset"]), int(item["size"])
    if len(stride) != len(leaf.shape) or offset < 0 or any(s < 0 for s in stride):
        raise Malformed("strides that fit no tensor of this shape")
    last = offset + sum((n - 1) * s for n, s in zip(leaf.shape, stride, strict=True))
    if (last + 1) * dtype.itemsize > size:
        raise Malformed("a tensor larger than its memory")
    storage = torch.UntypedStorage._new_shared_cuda(
        int(item["device"]),
        bytes.fromhex(item["handle"]),
        size,
        int(item["base"]),
        bytes.fromhex(item["counter"]),
        int(item["counter_offset"]),
        bytes.fromhex(item["event"]),
        bool(item["synchronize"]),
    )
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, leaf.shape, stride)


def _take_file(fd: int, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
    buffer = torch.empty(leaf.bytes, dtype=torch.uint8)
    view, done = buffer.numpy().data, 0
    while done < leaf.bytes:
        got = os.preadv(fd, [view[done:]], done)
        if got == 0:
            raise Malformed(f"{done} bytes came of a tensor of {leaf.bytes}")
        done += got
    return buffer.view(dtype).reshape(leaf.shape)


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
    if name and not isinstance(getattr(torch, str(name), None), torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return str(name)


__all__ = ["Facts", "Leaf", "describe", "difference", "facts_from_json", "facts_to_json", "hand_over", "take"]
