"""Inputs and outputs of a batch lie where the judge says, whatever their shapes, strides and dtypes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from qimeng.envs.workers.call_batch import Batch, wait_for
from qimeng.envs.workers.channel import Malformed
from qimeng.envs.workers.outputs import Leaf, facts_from_json
from qimeng.envs.workers.shared_buffers import ALIGNED, Layout, Remote, open_memory, stage

CPU = torch.device("cpu")
TENSORS = {
    "plain": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(4, 6).t(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "a part": lambda: torch.randn(8, 8)[1::2, 2:5],
    "booleans": lambda: torch.rand(7) > 0.5,
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "half": lambda: torch.randn(9).half(),
    "float8": lambda: torch.randn(9).to(torch.float8_e4m3fn),
    "a number": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 4),
}


def handed(layout: Layout, outputs: list[Leaf] | None = None) -> tuple[torch.Tensor, Remote]:
    memory, items, files = open_memory(layout.nbytes, CPU)
    return memory, Remote(layout, items, files, CPU)


@pytest.mark.parametrize("name", TENSORS)
def test_what_the_judge_writes_is_what_a_process_finds(name):
    calls = [[TENSORS[name](), torch.randn(2)] for _ in range(3)]
    layout = Layout.of(calls, [])
    content = torch.zeros(layout.first_output, dtype=torch.uint8)
    for number, tensors in enumerate(calls):
        stage(layout, number, tensors, content)
    memory, remote = handed(layout)
    remote.write(content)
    for places, tensors in zip(layout.inputs, calls, strict=True):
        for place, x in zip(places, tensors, strict=True):
            found = place.of(memory)
            assert place.offset % ALIGNED == 0 and found.dtype == x.dtype and found.stride() == x.stride()
            assert found.shape == x.shape and torch.equal(
                found.float() if x.is_floating_point() else found, x.float() if x.is_floating_point() else x
            )
    assert torch.equal(remote.inputs()[ALIGNED:], content[ALIGNED:])
    remote.close()


def test_the_judge_reads_all_outputs_and_nothing_else():
    layout = Layout.of([[torch.zeros(2)]] * 2, [Leaf("Tensor", (3,), (1,), "float32", "cpu")])
    memory, remote = handed(layout)
    for number, places in enumerate(layout.outputs):
        places[0].of(memory).fill_(number + 1)
    copies = torch.zeros(layout.nbytes - layout.first_output, dtype=torch.uint8)
    remote.read(copies)
    assert copies[:12].view(torch.float32).tolist() == [1.0] * 3
    assert copies[ALIGNED : ALIGNED + 12].view(torch.float32).tolist() == [2.0] * 3
    remote.close()


def test_memory_that_is_not_there_is_a_malformed_answer():
    layout = Layout.of([[torch.zeros(2)]], [Leaf("Tensor", (3,), (1,), "float32", "cpu")])
    with pytest.raises(Malformed):
        Remote(layout, [], [], CPU)
    ours, theirs = os.pipe()
    with pytest.raises(Malformed, match="no file"):
        Remote(layout, [], [ours], CPU)
    os.close(theirs)
    fd = os.memfd_create("short")
    remote = Remote(layout, [], [fd], CPU)
    with pytest.raises(Malformed):
        remote.read(torch.zeros(layout.nbytes - layout.first_output, dtype=torch.uint8))
    remote.close()


def test_calls_of_a_batch_find_buffers_as_they_were_and_leave_what_they_returned():
    state = {"count": torch.zeros(1)}

    def call(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        state["count"] += 1
        return x * factor, state["count"].clone()

    leaves = [Leaf("Tensor", (4,), (1,), "float32", "cpu"), Leaf("Tensor", (1,), (1,), "float32", "cpu")]
    layout = Layout.of([[torch.zeros(4)]] * 3, leaves)
    batch = Batch(CPU, call, lambda: (torch.zeros(4), 2.0), layout, state, ["count"])
    assert state["count"].item() == 2, "two calls to warm up"
    assert [place.of(batch.memory).any().item() for place in layout.outputs[0]] == [False, False], "they leave nothing"
    for number, places in enumerate(layout.inputs):
        places[0].of(batch.memory).fill_(number)
    facts = batch.run(call, others=[[(1, 10.0)]] * 3)
    found = [[place.of(batch.memory).tolist() for place in places] for places in layout.outputs]
    assert found == [[[10.0 * n] * 4, [1.0]] for n in range(3)]
    assert len(facts) == 3 and [leaf.kind for leaf in facts_from_json(facts[0]).leaves] == ["Tensor", "Tensor"]
    batch.run(call)
    assert layout.outputs[1][0].of(batch.memory).tolist() == [2.0] * 4
    for fd in batch.answer.files:
        os.close(fd)


@pytest.mark.gpu
def test_queued_calls_wait_for_inputs_that_come_later():
    memory = torch.zeros(1024, dtype=torch.uint8, device="cuda")
    x, y = memory[512:516].view(torch.float32), torch.zeros(1, device="cuda")
    y.add_(x)  # a GPU that waits loads no kernels
    torch.cuda.synchronize()
    writer = torch.cuda.Stream()  # never waits for the stream that stands still
    with torch.cuda.stream(writer):
        value, signal = torch.ones(1, device="cuda"), torch.tensor([7], dtype=torch.int32, device="cuda")
    writer.synchronize()
    wait_for(memory, 7)
    y.add_(x)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    with torch.cuda.stream(writer):
        x.copy_(value)
        memory[0:4].copy_(signal.view(torch.uint8))
    torch.cuda.synchronize()
    assert y.item() == 1.0


STRIDED = """
import torch
from qimeng.envs.workers.call_batch import Batch
from qimeng.envs.workers.outputs import Leaf
from qimeng.envs.workers.shared_buffers import Layout
from qimeng.envs.workers.worker_setup import open_device

open_device(torch.device("cuda", 0))
x = torch.randn(64, 96, device="cuda")
layout = Layout.of([[x]] * 4, [Leaf("Tensor", (96, 64), (1, 96), "float32", "cuda")])
batch = Batch(x.device, lambda x: x.t(), lambda: (x,), layout, {}, [])
place, content = layout.inputs[0][0], x + 1
writer, signal = torch.cuda.Stream(), torch.tensor([7], dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
facts = batch.queue(7, lambda x: x.t())
with torch.cuda.stream(writer):
    place.of(batch.memory).copy_(content)
    batch.memory[0:4].copy_(signal.view(torch.uint8))
torch.cuda.synchronize()
assert len(facts) == 4 and torch.equal(layout.outputs[0][0].of(batch.memory), content.t())
"""


@pytest.mark.gpu
def test_queueing_does_not_wait_for_the_kernel_that_copies_a_strided_result():
    subprocess.run([sys.executable, "-c", STRIDED], check=True, timeout=120)
