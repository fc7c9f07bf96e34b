"""Watches which memory kernels read and write in Triton's interpreter.

The interpreter reads past the end of a tensor what lies there, and the result may be right all the same. On a GPU that
is an illegal memory access, or it is not noticed either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def watched() -> Iterator[None]:
    """While this is open, a kernel that reaches for memory outside of the tensors it was given raises an IndexError.

    Elements between the rows of a tensor with gaps count as its own. Nothing happens where Triton compiles.
    """
    if not os.environ.get("TRITON_INTERPRET"):
        yield
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    kernel, spans = "", np.empty((0, 2), np.uint64)

    def begin(self: Any, *arguments: Any) -> Any:
        nonlocal kernel, spans
        made = plain["_init_args_hst"](self, *arguments)
        kernel, spans = self.fn.__name__, _joined(sorted(_spans(made)))
        return made

    def look(pointers: Any, mask: Any) -> None:
        at = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        at = at[np.broadcast_to(mask.data, at.shape).astype(bool)].astype(np.uint64)
        size = np.uint64(max(8, pointers.get_element_ty().primitive_bitwidth) // 8)
        place = np.searchsorted(spans[:, 0], at, side="right")
        ends = np.concatenate([np.zeros(1, np.uint64), spans[:, 1]])[place]
        if (wrong := at + size > ends).any():
            past = int(at[wrong][0]) - int(ends[wrong.argmax()])
            raise IndexError(
                f"{kernel}: {int(wrong.sum())} of {at.size} elements lie in no tensor, {past} bytes past one"
            )

    def load(self: Any, pointers: Any, mask: Any, *more: Any, **options: Any) -> Any:
        look(pointers, mask)
        return plain["create_masked_load"](self, pointers, mask, *more, **options)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any, **options: Any) -> Any:
        look(pointers, mask)
        return plain["create_masked_store"](self, pointers, value, mask, *more, **options)

    def update(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *more: Any, **options: Any) -> Any:
        look(pointers, mask)
        return plain["create_atomic_rmw"](self, operation, pointers, value, mask, *more, **options)

    patches = {
        "_init_args_hst": (GridExecutor, begin),
        "create_masked_load": (InterpreterBuilder, load),
        "create_masked_store": (InterpreterBuilder, store),
        "create_atomic_rmw": (InterpreterBuilder, update),
    }
    plain = {name: getattr(owner, name) for name, (owner, _) in patches.items()}
    for name, (owner, patch) in patches.items():
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for name, (owner, _) in patches.items():
            setattr(owner, name, plain[name])


def _spans(found: Any) -> Iterator[tuple[int, int]]:
    """First address and end of each tensor in `found`."""
    if isinstance(found, dict):
        found = tuple(found.values())
    if isinstance(found, tuple | list):
        for one in found:
            yield from _spans(one)
        return
    tensor = getattr(found, "base", found)  # of a descriptor
    if isinstance(tensor, torch.Tensor) and tensor.numel():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _joined(spans: list[tuple[int, int]]) -> Any:
    """Those that overlap as one."""
    made: list[list[int]] = []
    for begin, end in spans:
        if made and begin < made[-1][1]:
            made[-1][1] = max(made[-1][1], end)
        else:
            made.append([begin, end])
    return np.array(made, np.uint64).reshape(-1, 2)
