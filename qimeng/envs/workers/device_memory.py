"""Maps GPU memory of another process, piece by piece, through CUDA's driver.

Deals in open files that each stand for a piece of device memory (`cuMemExportToShareableHandle`), and in mapping them
one after another into this process. Every step is a call with an error code, and earlier steps are undone if one fails.
So a file that is no memory, or memory that is too small, only raises an exception. PyTorch's own function
(`_new_shared_cuda`) trusts its input: it follows a pointer into a shared counter, and ends the process if a piece
cannot be mapped. The memory stays as long as it is mapped, whatever the other process does. Source: CUDA driver API,
"Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

PIECE_BYTES = 2 << 20
"""Every piece is a multiple of it."""
MOST_BYTES = 1 << 40
_POSIX_FILE, _DEVICE, _READ_WRITE = 1, 1, 3


class Unmappable(Exception):
    """The files stand for no memory of that size on this device."""


class _Access(ctypes.Structure):
    """The driver's CUmemAccessDesc."""

    _fields_ = [("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class Driver:
    """The calls of CUDA's driver that are needed; each raises `Unmappable` where the driver refuses."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        size, pointer, handle = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
        self._calls: dict[str, Any] = {}
        for name, arguments in {
            "cuMemImportFromShareableHandle": [ctypes.POINTER(handle), ctypes.c_void_p, ctypes.c_int],
            "cuMemAddressReserve": [ctypes.POINTER(pointer), size, size, pointer, ctypes.c_uint64],
            "cuMemMap": [pointer, size, size, handle, ctypes.c_uint64],
            "cuMemSetAccess": [pointer, size, ctypes.POINTER(_Access), size],
            "cuMemUnmap": [pointer, size],
            "cuMemRelease": [handle],
            "cuMemAddressFree": [pointer, size],
        }.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, ctypes.c_int
            self._calls[name] = call

    def open(self, file: int) -> int:
        """A handle on the piece that an open file stands for."""
        handle = ctypes.c_uint64()
        self._do("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(file), _POSIX_FILE)
        return int(handle.value)

    def reserve(self, size: int) -> int:
        """An address with `size` bytes of addresses behind it."""
        pointer = ctypes.c_uint64()
        self._do("cuMemAddressReserve", ctypes.byref(pointer), size, 0, 0, 0)
        return int(pointer.value)

    def map(self, address: int, size: int, handle: int) -> None:
        """Put `size` bytes of the piece at an address."""
        self._do("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int, device: int) -> None:
        """Let a device read and write there."""
        self._do("cuMemSetAccess", address, size, ctypes.byref(_Access(_DEVICE, device, _READ_WRITE)), 1)

    def unmap(self, address: int, size: int) -> None:
        """Take the piece away from there."""
        self._do("cuMemUnmap", address, size)

    def release(self, handle: int) -> None:
        """Give a handle up."""
        self._do("cuMemRelease", handle)

    def give_back(self, address: int, size: int) -> None:
        """Give reserved addresses up."""
        self._do("cuMemAddressFree", address, size)

    def _do(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise Unmappable(f"{name} answers {code}")


@lru_cache(1)
def the_driver() -> Driver:
    """This machine's."""
    return Driver()


class Window:
    """Contiguously mapped pieces of device memory, mapped while any tensor made from them is alive.

    Args:
        files: one for each piece; they may be closed afterwards.
        piece: bytes of each.
        device: number of the device.
        driver: this machine's by default.

    Raises:
        Unmappable: the files stand for no such memory.
    """

    def __init__(self, files: Sequence[int], piece: int, device: int, driver: Driver | None = None):
        self._undo: list[Callable[[], None]] = []
        self.size = size = piece * len(files)
        if not files or piece < 1 or piece % PIECE_BYTES or self.size > MOST_BYTES:
            raise Unmappable(f"{len(files)} pieces of {piece} bytes are no device memory")
        if driver is None:
            torch.cuda.synchronize(device)  # makes the context, in which pieces are opened, this thread's
            self._undo.append(lambda: torch.cuda.synchronize(device))  # undone last to first: nothing reads it any more
        driver = driver or the_driver()
        waits, self._undo = self._undo, []
        try:
            self.address = address = driver.reserve(size)
            self._undo.append(lambda: driver.give_back(address, size))  # not self: it would hold itself
            for number, file in enumerate(files):
                at = address + number * piece
                handle = driver.open(file)
                self._undo.append(lambda handle=handle: driver.release(handle))  # type: ignore[misc]
                driver.map(at, piece, handle)
                self._undo.append(lambda at=at: driver.unmap(at, piece))  # type: ignore[misc]
            driver.allow(self.address, self.size, device)
        except Unmappable:
            self.close()
            raise
        self._undo += waits
        self.__cuda_array_interface__ = {
            "shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3,
        }  # fmt: skip

    def close(self) -> None:
        """Undo all steps in reverse order; call it once no tensor of it is left."""
        while self._undo:
            with suppress(Unmappable):
                self._undo.pop()()

    def __del__(self) -> None:
        """Give the memory back when the last tensor has gone."""
        self.close()


def pieces_of(handle: bytes) -> tuple[int, list[int]] | None:
    r"""Bytes of each piece and the open files, of memory that this process's own PyTorch shares; None for other memory.

    Args:
        handle: as PyTorch 2.6 to 2.13 write it for expandable segments: a byte for the version, ``e``, then the number
            of the process (four bytes more are unused), the bytes of a piece, the number of pieces and their open files
            (c10/cuda/CUDACachingAllocator.cpp, `ExpandableSegment::share`).

    >>> pieces_of(b"\x01e" + struct.pack("=iiQQii", 77, 0, 2 << 20, 2, 5, 6))
    (2097152, [5, 6])
    >>> pieces_of(b"\x01c" + bytes(64)) is None
    True
    """
    header = struct.Struct("=iiQQ")
    body = handle[2:]
    if handle[1:2] != b"e" or len(body) < header.size:
        return None
    _, _, piece, count = header.unpack_from(body)
    if len(body) != header.size + 4 * count:  # handles of another kind (NVLink fabric) are longer
        return None
    return piece, list(struct.unpack_from(f"={count}i", body, header.size))


__all__ = ["PIECE_BYTES", "Driver", "Unmappable", "Window", "pieces_of", "the_driver"]
