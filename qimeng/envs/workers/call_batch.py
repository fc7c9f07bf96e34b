"""A batch of calls in a process. The judge writes the inputs and reads the outputs.

Deals in memory that the judge laid out (`qimeng.envs.workers.shared_buffers`) and in one program. Its own reports do
not count: the judge starts the clock, writes the inputs, copies all outputs and stops the clock. On a GPU the calls can
be queued before their inputs exist. The device then waits for the judge's signal, so launch overhead on the host is not
timed. Knows nothing about times or verdicts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.workers import outputs
from qimeng.envs.workers.service import Answer
from qimeng.envs.workers.shared_buffers import Layout, open_memory

_EQUAL = 1
"""``CU_STREAM_WAIT_VALUE_EQ`` of cuda.h."""


class Batch:
    """The calls of one batch. Two warm-up calls on other inputs allocate the memory that calls need.

    The result of the second is copied as those of the batch will be: a GPU that waits for the judge's signal loads no
    kernels, not even that of such a copy, and the host would wait as well.

    Args:
        device: where they run.
        call: the program.
        template: makes those other inputs, whose tensors are replaced by those of each call.
        layout: where inputs and outputs lie.
        state: parameters and buffers by name.
        mutated: buffers that a call updates; every call finds them as they are now.

    Attributes:
        first: what the last of those two calls returned.
    """

    def __init__(
        self,
        device: torch.device,
        call: Callable[..., Any],
        template: Callable[[], Sequence[Any]],
        layout: Layout,
        state: Mapping[str, torch.Tensor],
        mutated: Sequence[str],
    ):
        self._device, self._state = device, dict(state)
        self._before = {key: state[key].clone() for key in mutated}
        self.first = self._warm_up(call, template)
        self.memory, self._handed, self._files = open_memory(layout.nbytes, device)
        self._inputs = [[place.of(self.memory) for place in places] for places in layout.inputs]
        self._trays = [[place.of(self.memory) for place in places] for places in layout.outputs]
        self._hand_out(outputs.describe(self.first, {})[1], self._trays[0])
        for tray in self._trays[0]:
            tray.zero_()

    @property
    def answer(self) -> Answer:
        """What the judge needs to reach the memory."""
        return Answer(self._handed, tuple(self._files))

    def run(
        self,
        call: Callable[..., Any],
        seeds: Sequence[int] = (),
        others: Sequence[Sequence[tuple[int, Any]]] = (),
    ) -> list[Any]:
        """Make all calls; the structure of what each returned.

        Args:
            call: the program.
            seeds: of the random numbers of each call; none where it draws none.
            others: for each call, position and value of the inputs that are no tensors; those of the template where
                empty.
        """
        facts = []
        for number, (inputs, trays) in enumerate(zip(self._inputs, self._trays, strict=True)):
            for key, value in self._before.items():
                self._state[key].copy_(value)
            leaves = list(self._leaves)
            for position, x in zip(self._positions, inputs, strict=True):
                leaves[position] = x.data
            for position, value in others[number] if others else ():
                leaves[position] = value
            if seeds:
                self._seed(seeds[number])
            output = call(*_pytree.tree_unflatten(leaves, self._tree))
            found, tensors = outputs.describe(output, {})
            facts.append(outputs.facts_to_json(found))
            self._hand_out(tensors, trays)
            del output, tensors
        return facts

    def queue(self, value: int, call: Callable[..., Any]) -> list[Any]:
        """`run`, none of which the device begins before the judge has written `value` as its signal."""
        wait_for(self.memory, value)
        return self.run(call)

    def _hand_out(self, tensors: Sequence[torch.Tensor], trays: Sequence[torch.Tensor]) -> None:
        """Copy what a call returned to where the judge reads it."""
        for tray, x in zip(trays, tensors, strict=False):
            if tray.shape == x.shape and tray.dtype == x.dtype:
                tray.copy_(x)

    def _seed(self, seed: int) -> None:
        """As `seed_generators`, for the device at hand alone: that of all devices takes longer than many a call."""
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)

    def _warm_up(self, call: Callable[..., Any], template: Callable[[], Sequence[Any]]) -> Any:
        """What a second call returns; the inputs are given up before the memory for others is taken."""
        inputs = tuple(template())
        leaves, self._tree = _pytree.tree_flatten(inputs)
        self._positions = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self._leaves = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        call(*inputs)
        return call(*inputs)


def wait_for(memory: torch.Tensor, value: int) -> None:
    """Have the device's current stream wait until the first four bytes of `memory` are `value`.

    Raises:
        RuntimeError: the driver cannot.
    """
    stream = torch.cuda.current_stream(memory.device).cuda_stream
    try:
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"this driver has no cuStreamWaitValue32: {error}") from error
    status = wait(
        ctypes.c_void_p(stream), ctypes.c_ulonglong(memory.data_ptr()), ctypes.c_uint32(value), ctypes.c_uint(_EQUAL)
    )
    if status:
        raise RuntimeError(f"cuStreamWaitValue32 answers with error {status}")


__all__ = ["Batch", "wait_for"]
