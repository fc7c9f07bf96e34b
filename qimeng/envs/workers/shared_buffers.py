"""Memory shared by the judge and a process, for the inputs and outputs of a batch of calls.

Deals in places (offset, shape, strides, dtype) and bytes. On a GPU the memory is a tensor of the process that the judge
maps; on the CPU it is a memory file that the judge reads and writes but never maps, so that the process cannot truncate
it under the judge. The judge decides the layout. Knows nothing about the calls or their times.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qimeng.envs.workers.channel import Malformed
from qimeng.envs.workers.outputs import Leaf
from qimeng.envs.workers.tensor_transfer import hand_over, take

ALIGNED = 512
"""Bytes at whose multiples tensors begin, as those of PyTorch's own memory do."""
FLAG = slice(0, 4)
"""Where the signal lies that a device waits for."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        offset: bytes from the beginning.
        dtype: such as ``"float32"``.
        shape: sizes.
        stride: strides in elements.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from its first to its last element."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return int((last + 1) * getattr(torch, self.dtype).itemsize)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that lies here in `memory`, a tensor of bytes."""
        dtype = getattr(torch, self.dtype)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype, device=memory.device)
        part = memory[self.offset : self.offset + self.nbytes].view(dtype)
        return part.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """Where the inputs and outputs of all calls of a batch lie.

    Attributes:
        inputs: for each call, its tensors.
        outputs: for each call, what it returns.
        first_output: where the outputs begin; everything before is the judge's to write.
        nbytes: of all.
    """

    inputs: tuple[tuple[Place, ...], ...]
    outputs: tuple[tuple[Place, ...], ...]
    first_output: int
    nbytes: int

    @classmethod
    def of(cls, inputs: Sequence[Sequence[torch.Tensor]], outputs: Sequence[Leaf]) -> Layout:
        """Places for `inputs`, a list for each call, and for tensors like `outputs` of each."""
        end = ALIGNED
        places: list[tuple[Place, ...]] = []
        for tensors in inputs:
            mine = []
            for x in tensors:
                mine.append(Place(end, str(x.dtype).removeprefix("torch."), tuple(x.shape), tuple(x.stride())))
                end = _aligned(end + mine[-1].nbytes)
            places.append(tuple(mine))
        first, results = end, []
        for _ in inputs:
            some = []
            for leaf in outputs:
                some.append(Place(end, leaf.dtype, leaf.shape, _contiguous(leaf.shape)))
                end = _aligned(end + some[-1].nbytes)
            results.append(tuple(some))
        return cls(tuple(places), tuple(results), first, max(end, first + ALIGNED))


def open_memory(nbytes: int, device: torch.device) -> tuple[torch.Tensor, Any, list[int]]:
    """Memory of this process for a judge: as bytes, what `Remote` needs to reach it, and open files for it."""
    if device.type == "cuda":
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        handed, files = hand_over([memory], stay=True)
        return memory, handed, files
    fd = os.memfd_create("arena")
    os.ftruncate(fd, nbytes)
    memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    memory.zero_()  # every page is there before a clock runs
    return memory, [], [fd]


class Remote:
    """The judge's side of a process's memory.

    Args:
        layout: of the memory.
        handed: what the process sent.
        files: open files that came with it, which this closes.
        device: where the memory is.

    Raises:
        Malformed: what came is no such memory.
    """

    def __init__(self, layout: Layout, handed: Any, files: Sequence[int], device: torch.device):
        self.layout, self._fd = layout, -1
        self._memory: torch.Tensor | None = None
        if device.type == "cuda":
            try:
                leaf = Leaf("Tensor", (layout.nbytes,), (1,), "uint8", "cuda")
                self._memory = take(handed, files, [leaf])[0]
            finally:
                for fd in files:
                    os.close(fd)
            return
        for fd in files[1:]:
            os.close(fd)
        if not files:
            raise Malformed("no memory was handed over")
        self._fd = files[0]
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise Malformed("memory was handed over in what is no file")

    def write(self, content: torch.Tensor) -> None:
        """Put `content` before the outputs, the signal left out; see `stage`."""
        if self._memory is not None:
            self._memory[ALIGNED : len(content)].copy_(content[ALIGNED:])
            return
        _write(self._fd, content[ALIGNED:], ALIGNED)

    def signal(self, value: torch.Tensor) -> None:
        """Put `value`, four bytes, where a device waits for it."""
        if self._memory is not None:
            self._memory[FLAG].copy_(value)

    def read(self, into: torch.Tensor) -> None:
        """Copy all outputs."""
        if self._memory is not None:
            into.copy_(self._memory[self.layout.first_output :])
            return
        _read(self._fd, into, self.layout.first_output)

    def inputs(self) -> torch.Tensor:
        """A copy of all that lies before the outputs."""
        if self._memory is not None:
            return self._memory[: self.layout.first_output].clone()
        found = torch.empty(self.layout.first_output, dtype=torch.uint8)
        _read(self._fd, found, 0)
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def stage(layout: Layout, number: int, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Put the inputs of call `number` where they belong in `into`, as many bytes as lie before the outputs."""
    for place, x in zip(layout.inputs[number], tensors, strict=True):
        if place.nbytes:
            span = (place.nbytes // x.dtype.itemsize,)
            part = into[place.offset : place.offset + place.nbytes].view(x.dtype)
            part.copy_(x.detach().as_strided(span, (1,)))


def _aligned(offset: int) -> int:
    return math.ceil(offset / ALIGNED) * ALIGNED


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _write(fd: int, content: torch.Tensor, offset: int) -> None:
    view, done = content.numpy().data, 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)
    except OSError as error:
        raise Malformed(f"memory that was handed over cannot be written: {error}") from error


def _read(fd: int, into: torch.Tensor, offset: int) -> None:
    view, done = into.numpy().data, 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise Malformed(f"{done} bytes came of outputs of {len(view)}")
        done += got


__all__ = ["ALIGNED", "Layout", "Place", "Remote", "open_memory", "stage"]
