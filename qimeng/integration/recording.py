"""A whole model's call recorded as a CUDA graph: one launch for all kernels, those of programs and of PyTorch.

Deals in one kind of call of one module. Inputs are copied to memory of the recording's own before a replay, results are
copied from there. Source: PyTorch's notes on CUDA graphs. Knows nothing about programs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree

from qimeng.integration.calls import Key, copied_into, filled, hollow, memory_like, tensors_of
from qimeng.integration.variant import Place, same

Replay = Callable[[], object]
WARM_UPS = 2
"""Calls before a recording, in which kernels are compiled, algorithms chosen and weights packed."""


class _CannotRecord(Exception):
    """Why the calls of a module cannot be recorded."""


def record(function: Callable[[], Any]) -> tuple[Replay, Any]:
    """What replays the kernels of `function` on the current CUDA device, and what `function` returned meanwhile."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        returned = function()
    return graph.replay, returned


class Recording:
    """Answers one kind of call of `module` by replaying a recording of it; a `Dispatch` asks it as it asks a `Variant`.

    It is recorded at the first call, and again when a parameter or buffer is changed or replaced. Where it cannot be
    recorded, the module's own forward answers. Threads take turns.

    Args:
        key: of the call.
        run: the module's own forward.
        recorder: makes a recording; `record` by default.

    Attributes:
        key: of the call.
        places: of the module's tensors; None before the first call.
        devices: of these tensors.
        refused: why calls are not recorded; empty where they are, and before the first call.
    """

    kernels: bool = True
    outputs, form = None, None
    key: Key
    places: list[Place] | None
    _stream: Any
    _replay: Replay | None
    _inputs: list[torch.Tensor]

    def __init__(self, key: Key, run: Callable[..., Any], recorder: Callable[..., tuple[Replay, Any]] = record):
        self.__setstate__({"key": key, "run": run, "recorder": recorder})

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's tensors are those that were recorded; else it is recorded anew at the next call."""
        return self.places is not None and same(self.places) or self.bind(module)

    def bind(self, module: nn.Module) -> bool:
        """Take the module's present tensors for those that count."""
        keys = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        with self._turn:
            self._forget()
            self.places = [place for key in keys if (place := Place.of(module, key, values=True)) is not None]
            self.devices = frozenset(place.tensor.device for place in self.places)
        return True

    def program(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        given = list(tensors_of((args, kwargs)))
        if self.refused or any(x.is_cuda for x in given) and torch.cuda.is_current_stream_capturing():
            return self.run(*args, **kwargs)
        with self._turn, _on(given):
            if self._replay is None:
                self._record(args, kwargs, given)
            if self._replay is None:
                return self.run(*args, **kwargs)
            stream: Any = torch.cuda.current_stream() if given[0].is_cuda else None
            if self._stream is not None and stream != self._stream:  # the memory is shared with calls on that one
                stream.wait_stream(self._stream)
            self._stream = stream
            for x, mine in zip(given, self._inputs, strict=True):
                copied_into(mine, x)
            self._replay()
            return _pytree.tree_map_only(torch.Tensor, lambda y: copied_into(memory_like(y), y), self._returned)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[torch.Tensor]) -> None:
        self._inputs = [copied_into(memory_like(x), x) for x in given]
        args, kwargs = filled(hollow((args, kwargs)), self._inputs)
        try:
            self._rehearse(args, kwargs)
            self._replay, self._returned = self.recorder(lambda: self.run(*args, **kwargs))
        except _CannotRecord as why:
            self.refused, self._inputs = str(why), []
        except RuntimeError as error:  # of CUDA: the rehearsal does not show all that cannot be recorded
            self.refused, self._inputs = f"recording failed ({error})"[:300], []

    def _rehearse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the module as in a recording, and see that a replay can stand for the call.

        Raises:
            _CannotRecord: tensors on several devices, a wait for the GPU, random numbers, changed inputs or buffers,
                results that are memory of inputs or parameters, or of a class that is not known.
        """
        held = [*self._inputs, *(place.tensor for place in self.places or ())]
        if not self._inputs or len({t.device for t in held}) > 1:
            raise _CannotRecord("its tensors are not all on one GPU")
        device = held[0].device
        self.run(*args, **kwargs)  # compiles, chooses algorithms, packs weights
        before, numbers = [_version(t) for t in held], _random_states(device)
        try:
            with _as_recorded(device):
                returned = self.run(*args, **kwargs)
        except Exception as error:  # what waits for the GPU raises; the module's own code may raise anything then
            raise _CannotRecord(f"a call waits for the GPU ({error})"[:300]) from error
        if [_version(t) for t in held] != before:
            raise _CannotRecord("a call changes inputs, parameters or buffers")
        if any(not torch.equal(a, b) for a, b in zip(numbers, _random_states(device), strict=True)):
            raise _CannotRecord("a call draws random numbers")
        leaves = _pytree.tree_leaves(returned)
        odd = [x for x in leaves if not isinstance(x, (torch.Tensor, bool, int, float, str, type(None)))]
        if odd:
            raise _CannotRecord(f"a call returns a {type(odd[0]).__name__}")
        results = [x for x in leaves if isinstance(x, torch.Tensor)]
        memory = [t.untyped_storage().data_ptr() for t in results if t.numel()]
        if {t.untyped_storage().data_ptr() for t in held} & set(memory) or len(set(memory)) < len(memory):
            raise _CannotRecord("results share memory with inputs, parameters or each other")

    def _forget(self) -> None:
        self.places, self.devices, self.refused = None, frozenset(), ""
        self._stream, self._replay, self._returned = None, None, None
        self._inputs = []

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key, "run": self.run, "recorder": self.recorder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._turn = threading.Lock()
        self.key, self.run, self.recorder = state["key"], state["run"], state["recorder"]
        self._forget()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _random_states(device: torch.device) -> Sequence[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def _as_recorded(device: torch.device) -> Iterator[None]:
    """Inside, code takes the way that it takes while it is recorded, and what waits for the GPU raises.

    A recording that fails can leave PyTorch's random generator unusable, so it is tried out first.
    """
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(), mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
        warnings.simplefilter("ignore")  # PyTorch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _on(given: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    return torch.cuda.device(given[0].device) if given and given[0].is_cuda else nullcontext()


__all__ = ["Recording", "record"]
