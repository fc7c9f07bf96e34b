"""Tensors go over whole, and whatever else comes is refused, never followed."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from qimeng.envs.workers.channel import Malformed
from qimeng.envs.workers.device_memory import PIECE_BYTES, Driver, Unmappable, Window
from qimeng.envs.workers.outputs import Leaf
from qimeng.envs.workers.small_tensors import copies
from qimeng.envs.workers.tensor_transfer import hand_over, take, tensor_in
from qimeng.envs.workers.worker_setup import open_device
from tests.envs.own_process import in_own_process

FLOATS = Leaf("Tensor", (5, 7), (7, 1), "float32", "cpu")
ON_GPU = Leaf("Tensor", (5, 7), (7, 1), "float32", "cuda")
GOOD = {"first": 0, "files": 1, "piece": PIECE_BYTES, "base": 512, "offset": 0, "stride": [7, 1]}


def close(files: list[int]) -> None:
    for fd in files:
        os.close(fd)


def test_more_tensors_than_a_message_has_files_go_over():
    tensors = [torch.full((3,), float(i)) for i in range(300)]
    items, files = hand_over(tensors)
    got = take(items, files, [Leaf("Tensor", (3,), (1,), "float32", "cpu")] * 300)
    assert [int(t[0]) for t in got] == list(range(300)) and len(files) == 1
    close(files)


@contextmanager
def no_files() -> Iterator[dict[str, int]]:
    """Open files of every kind that is no file of bytes."""
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        fifo = os.path.join(folder, "fifo")
        os.mkfifo(fifo)
        opened = {
            "socket": left.fileno(),
            "pipe": reading,
            "folder": os.open(folder, os.O_RDONLY),
            "fifo": os.open(fifo, os.O_RDWR),
            "device": os.open("/dev/zero", os.O_RDONLY),
            "event": os.eventfd(1),
            "path": os.open(folder, os.O_PATH),
        }
        try:
            yield opened
        finally:
            for name in ("folder", "fifo", "device", "event", "path"):
                os.close(opened[name])
            os.close(reading)
            os.close(writing)
            left.close()
            right.close()


def test_files_that_are_no_files_are_refused():
    with no_files() as opened:
        for name, fd in opened.items():
            with pytest.raises(Malformed):
                take([{"first": 0, "at": 0}], [fd], [FLOATS])
            assert name


VALUES = (
    None, True, -1, 0, 1, 2, 7, 16, 512, 1 << 20, PIECE_BYTES, (1 << 63) - 1, -(1 << 63), 1.5, 1e300, "", "7", "\0",
    [], [7], [7, 1], [-7, 1], [1 << 62, 1 << 62], [7, "1"], [[7], 1], {}, {"first": 0},
)  # fmt: skip


class Pieces(Driver):
    """A driver whose pieces are files of as many bytes as their number says; what is mapped must be unmapped."""

    def __init__(self, sizes: dict[int, int], refuses: str = ""):
        self.sizes, self.refuses = sizes, refuses
        self.held: list[tuple[str, int]] = []

    def _step(self, name: str) -> None:
        if name == self.refuses:
            raise Unmappable(name)

    def open(self, file: int) -> int:
        if file not in self.sizes:
            raise Unmappable("no memory")
        self.held.append(("handle", file))
        return file

    def reserve(self, size: int) -> int:
        self._step("reserve")
        self.held.append(("addresses", 1 << 40))
        return 1 << 40

    def map(self, address: int, size: int, handle: int) -> None:
        if size > self.sizes[handle]:
            raise Unmappable("larger than the piece")
        self.held.append(("mapped", address))

    def allow(self, address: int, size: int, device: int) -> None:
        self._step("allow")

    def unmap(self, address: int, size: int) -> None:
        self.held.remove(("mapped", address))

    def release(self, handle: int) -> None:
        self.held.remove(("handle", handle))

    def give_back(self, address: int, size: int) -> None:
        assert self.held == [("addresses", address)]  # the last of all
        self.held.clear()


def test_pieces_of_device_memory_are_mapped_side_by_side_and_given_back():
    driver = Pieces({3: PIECE_BYTES, 4: PIECE_BYTES})
    window = Window([3, 4], PIECE_BYTES, 0, driver)
    assert window.size == 2 * PIECE_BYTES and ("mapped", window.address + PIECE_BYTES) in driver.held
    del window
    assert not driver.held


@pytest.mark.parametrize(
    ("files", "piece", "refuses"),
    [
        ([], PIECE_BYTES, ""),
        ([3], 0, ""),
        ([3], PIECE_BYTES + 1, ""),
        ([3] * 4096, 1 << 36, ""),
        ([3, 9], PIECE_BYTES, ""),  # the second is no memory: PyTorch's own way ends the process here
        ([3, 5], 2 * PIECE_BYTES, ""),  # the second is smaller than was said
        ([3], PIECE_BYTES, "reserve"),
        ([3], PIECE_BYTES, "allow"),
    ],
)
def test_what_is_no_device_memory_is_refused_and_nothing_stays_mapped(files, piece, refuses):
    driver = Pieces({3: 2 * PIECE_BYTES, 5: PIECE_BYTES}, refuses)
    with pytest.raises(Unmappable):
        Window(files, piece, 0, driver)
    assert not driver.held


def test_a_tensor_is_found_where_its_base_and_its_offset_say():
    memory = torch.arange(64, dtype=torch.uint8)
    words = memory.view(torch.int16)
    found = tensor_in(memory[:60], 16 + 2 * 3, torch.int16, (3, 2), (5, 2))
    assert found.tolist() == [[int(words[11 + 5 * i + 2 * j]) for j in range(2)] for i in range(3)]


@pytest.mark.parametrize("seed", range(4))
def test_no_field_of_what_is_handed_over_does_more_than_be_refused(seed, monkeypatch):
    """Fields exchanged, left out and added at random; a window is asked for only inside the pieces that came."""
    asked: list[tuple[int, int]] = []

    def window(files: list[int], piece: int, device: int) -> Any:
        asked.append((len(files), piece))
        raise Unmappable("no driver here")

    monkeypatch.setattr("qimeng.envs.workers.tensor_transfer.Window", window)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    rng = random.Random(seed)
    _, files = hand_over([torch.ones(5, 7)])
    for _ in range(1500):
        item: Any = dict(rng.choice(({"first": 0, "at": 0}, GOOD)))
        for _ in range(rng.randrange(3)):
            name = rng.choice(("first", "at", "files", "piece", "base", "offset", "stride", "device", "counter"))
            item[name] = rng.choice(VALUES)
        if rng.random() < 0.1:
            item.pop(rng.choice(list(item)))
        if rng.random() < 0.1:
            item = rng.choice(VALUES)
        items: Any = rng.choice(([item], [item], [item], [], [item, item], item))
        in_pieces = isinstance(item, dict) and "files" in item  # else the values would go to a GPU
        leaf = ON_GPU if in_pieces and rng.random() < 0.8 else FLOATS
        del asked[:]
        try:
            (got,) = take(items, files, [leaf])
        except Malformed:
            assert all(count * piece >= 512 and count <= 1 for count, piece in asked)
            continue
        assert leaf is FLOATS and got.shape == (5, 7) and bool((got == 1).all())
    close(files)


def test_memory_of_many_tensors_is_mapped_once(monkeypatch):
    """A network's buffers lie in one piece of memory: to map it takes longer than to look at one of them."""
    memory = torch.arange(PIECE_BYTES // 2, dtype=torch.int16).view(torch.uint8)
    mapped: list[int] = []
    monkeypatch.setattr("qimeng.envs.workers.tensor_transfer.Window", lambda files, piece, device: mapped.append(piece))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "as_tensor", lambda window, device: memory)
    items = [
        {"piece": PIECE_BYTES, "base": 8, "first": 0, "files": 1, "offset": 3 * i, "stride": [1]} for i in range(50)
    ]
    found = take(items, [-1], [Leaf("Tensor", (3,), (1,), "int16", "cuda")] * 50)
    assert mapped == [PIECE_BYTES]
    assert [x.tolist() for x in found] == [[4 + 3 * i + j for j in range(3)] for i in range(50)]
    beyond = {**items[0], "offset": PIECE_BYTES // 2}
    with pytest.raises(Malformed):
        take([items[0], beyond], [-1], [Leaf("Tensor", (3,), (1,), "int16", "cuda")] * 2)


def stays_where_it_is() -> None:
    open_device(torch.device("cuda", 0))
    x, ones = torch.randn(3000, 1000, device="cuda")[5:, ::2], torch.ones(3, device="cuda")
    items, files = hand_over([x, ones], stay=True)  # whoever hands over keeps: PyTorch uses memory again that is freed
    leaf = Leaf("Tensor", tuple(x.shape), tuple(x.stride()), "float32", "cuda")
    seen, others = take(items, files, [leaf, Leaf("Tensor", (3,), (1,), "float32", "cuda")])
    close(files)
    assert torch.equal(seen, x) and seen.data_ptr() != x.data_ptr()
    assert others.tolist() == ones.tolist() == [1, 1, 1]
    small = copies([torch.full((3,), float(i), device="cuda") for i in range(50)])
    items, files = hand_over(small)
    assert len(files) == items[0]["files"]  # one memory goes over once
    found = take(items, files, [Leaf("Tensor", (3,), (1,), "float32", "cuda")] * 50)
    close(files)
    assert all(torch.equal(a, b) for a, b in zip(small, found, strict=True))
    del found
    x.zero_()
    torch.cuda.synchronize()
    assert not seen.any()
    del x
    torch.cuda.empty_cache()
    assert not seen.any()  # mapped here, so it stays


def wrong_handles() -> None:
    open_device(torch.device("cuda", 0))
    x = torch.ones(1 << 20, device="cuda")
    items, files = hand_over([x])
    leaf = Leaf("Tensor", (1 << 20,), (1,), "float32", "cuda")
    no_memory = os.memfd_create("none")
    for changed, with_files in (
        ({"piece": items[0]["piece"] * 4}, files),
        ({}, [no_memory] * len(files)),
        ({"files": 2, "base": 0}, [files[0], no_memory]),
        ({"base": 1 << 40}, files),
        ({"stride": [1 << 40]}, files),
    ):
        with pytest.raises(Malformed):
            take([{**items[0], **changed}], with_files, [leaf])
    (seen,) = take(items, files, [leaf])
    assert bool((seen == 1).all())
    close([*files, no_memory])


@pytest.mark.gpu
def test_a_tensor_on_the_gpu_stays_where_it_is_and_its_changes_are_seen():
    in_own_process(stays_where_it_is)  # `open_device` comes before anything else of CUDA's


@pytest.mark.gpu
def test_on_a_gpu_a_wrong_handle_is_refused_and_the_context_lives():
    in_own_process(wrong_handles)
