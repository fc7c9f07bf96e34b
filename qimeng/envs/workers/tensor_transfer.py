"""Tensors passed from an untrusted process to the judge.

Deals in open files beside plain data. On a GPU a tensor stays in place. The pieces of its memory are passed as files,
which the receiver maps (`qimeng.envs.workers.device_memory`). On the CPU its bytes are passed in a memory file, which
is read but never mapped, so that the sender cannot truncate it during the read. Every field is checked before use, and
wrong ones raise `Malformed`. Knows nothing about the right values.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from qimeng.envs.workers.channel import MAX_FILES, Malformed
from qimeng.envs.workers.device_memory import Unmappable, Window, pieces_of

MOST_ELEMENTS = 1 << 50


class Form(Protocol):
    """The expected form of a tensor (`qimeng.envs.workers.outputs.Leaf`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def dtype(self) -> str:
        """Such as ``"float32"``."""

    @property
    def device(self) -> str:
        """``"cuda"`` or ``"cpu"``."""

    @property
    def bytes(self) -> int:
        """Of its elements."""


def hand_over(tensors: Sequence[torch.Tensor], stay: bool = False) -> tuple[list[dict[str, Any]], list[int]]:
    """What `take` needs to see the same tensors in another process: JSON data, and open files that the caller closes.

    GPU tensors stay in place: keep them until the other process has released them. Where their memory cannot be shared
    by files (it is not PyTorch's own), and for those of the CPU, the values are copied into one file, one tensor after
    another, however many there are.

    Args:
        tensors: what goes over.
        stay: whether the receiver has to see what is written to them later.

    Raises:
        RuntimeError: GPU tensors have to stay, and cannot be shared.
    """
    items: list[dict[str, Any]] = []
    files: list[int] = []
    host: int | None = None
    written = 0
    known: dict[int, dict[str, Any]] = {}  # memory that goes over already, by its address
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.synchronize(device)  # whoever looks at them has no part in this process's streams
    for tensor in tensors:
        if tensor.numel() == 0:
            items.append({})
            continue
        memory = tensor.untyped_storage().data_ptr()
        if memory in known:
            items.append({**known[memory], **_place_in_memory(tensor)})
            continue
        shared = _shared(tensor) if tensor.is_cuda else None
        if shared is not None and len(files) + len(shared[1]) < MAX_FILES:
            known[memory] = {**shared[0], "first": len(files), "files": len(shared[1])}
            items.append({**known[memory], **_place_in_memory(tensor)})
            files += [os.dup(fd) for fd in shared[1]]
            continue
        if tensor.is_cuda and stay:
            raise RuntimeError("a tensor's memory cannot be shared with the judge: PyTorch's allocator was changed")
        if host is None:
            host = len(files)
            files.append(os.memfd_create("outputs"))
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
        with os.fdopen(os.dup(files[host]), "wb") as file:
            file.write(plain.numpy().data)
        items.append({"first": host, "at": written})
        written += plain.numel()
    return items, files


def _shared(tensor: torch.Tensor) -> tuple[dict[str, Any], list[int]] | None:
    """Where the memory of a GPU tensor lies in pieces, and their open files; None where they cannot be shared."""
    storage = tensor.untyped_storage()
    try:
        _, handle, _, base, counter, place, _, _ = storage._share_cuda_()
    except RuntimeError:  # not memory of PyTorch's allocator
        return None
    # PyTorch counts receivers in a shared file, and keeps memory until they have all signed off. Ours never do.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, place)
    found = pieces_of(handle)
    if found is None:
        return None
    piece, files = found
    return {"piece": piece, "base": base}, files


def _place_in_memory(tensor: torch.Tensor) -> dict[str, Any]:
    return {"offset": tensor.storage_offset(), "stride": list(tensor.stride())}


def take(items: Any, files: Sequence[int], forms: Sequence[Form]) -> list[torch.Tensor]:
    """The tensors that another process handed over, of the forms that were described before.

    On a GPU they are the other process's memory, unless it was copied; on the CPU they are copies.

    Raises:
        Malformed: what came does not fit the description.
    """
    if not isinstance(items, list) or len(items) != len(forms):
        raise Malformed("a tensor was not handed over")
    seen: dict[tuple[int, int, int], torch.Tensor] = {}
    return [_take_one(item, files, form, seen) for item, form in zip(items, forms, strict=True)]


def _take_one(
    item: Any, files: Sequence[int], form: Form, seen: dict[tuple[int, int, int], torch.Tensor]
) -> torch.Tensor:
    dtype = getattr(torch, form.dtype)
    if form.bytes == 0:
        return torch.empty(form.shape, dtype=dtype, device=form.device)
    if not isinstance(item, dict):
        raise Malformed("a tensor was not handed over")
    try:
        first = _number(item, "first", len(files) - 1)
        if form.device == "cuda" and "files" in item:
            count = _number(item, "files", len(files) - first)
            return _seen(item, files, first, count, form, dtype, seen)
        return _read(files[first], _number(item, "at", MOST_ELEMENTS), form, dtype).to(form.device)
    except (Unmappable, OSError, MemoryError, RuntimeError) as error:
        raise Malformed(f"a tensor was not handed over: {error}") from error


def _number(item: dict[str, Any], name: str, most: int) -> int:
    value = item.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise Malformed(f"a tensor was not handed over: its {name} makes no sense")
    return value


def _seen(
    item: dict[str, Any],
    files: Sequence[int],
    first: int,
    count: int,
    form: Form,
    dtype: torch.dtype,
    seen: dict[tuple[int, int, int], torch.Tensor],
) -> torch.Tensor:
    """A tensor in the other process's memory on the GPU; memory that was `seen` before is not mapped again."""
    piece, base = _number(item, "piece", 1 << 36), _number(item, "base", MOST_ELEMENTS)
    offset, strides = _number(item, "offset", MOST_ELEMENTS), item.get("stride")
    if not isinstance(strides, list) or len(strides) != len(form.shape):
        raise Malformed("strides that fit no tensor of this shape")
    if not all(type(s) is int and 0 <= s <= MOST_ELEMENTS for s in strides):
        raise Malformed("strides that fit no tensor of this shape")
    steps = [0 if n == 1 else s for n, s in zip(form.shape, strides, strict=True)]
    last = offset + sum((n - 1) * s for n, s in zip(form.shape, steps, strict=True))
    end = base + (last + 1) * dtype.itemsize
    if base % dtype.itemsize or end > piece * count:
        raise Malformed("a tensor larger than its memory")
    key = first, count, piece
    if key not in seen:
        window = Window(files[first : first + count], piece, torch.cuda.current_device())
        seen[key] = torch.as_tensor(window, device=f"cuda:{torch.cuda.current_device()}")
    return tensor_in(seen[key][:end], base + offset * dtype.itemsize, dtype, form.shape, steps)


def tensor_in(
    memory: torch.Tensor, at: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """The tensor that begins at byte `at` of `memory`, whole bytes of `dtype` from its storage's begin on."""
    return memory.view(dtype).as_strided(shape, stride, at // dtype.itemsize)


def _read(fd: int, start: int, form: Form, dtype: torch.dtype) -> torch.Tensor:
    """A tensor from a regular file; reading anything else might block or never end."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise Malformed("a tensor was handed over in what is no file")
    buffer = torch.empty(form.bytes, dtype=torch.uint8)
    view, done = buffer.numpy().data, 0
    while done < form.bytes:
        got = os.preadv(fd, [view[done:]], start + done)
        if got == 0:
            raise Malformed(f"{done} bytes came of a tensor of {form.bytes}")
        done += got
    return buffer.view(dtype).reshape(form.shape)


__all__ = ["Form", "hand_over", "take", "tensor_in"]
