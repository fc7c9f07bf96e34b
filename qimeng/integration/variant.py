"""A program for one kind of call of a module, and the module's tensors that it computes with.

Deals in sharing tensors between two modules. Needs PyTorch only: exported packages hold a copy of this file. Knows
nothing about when a program may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from qimeng.integration.calls import Key
from qimeng.integration.operator import Outputs
from qimeng.program.load import load_source


@dataclass(frozen=True)
class Place:
    """Where a module keeps one of its tensors, and the tensor that was there.

    Attributes:
        home: parameters or buffers of one submodule.
        name: in `home`.
        tensor: which was there.
        dtype: which it had.
        address: of its memory. ``tensor.data = other`` gives it another one, and no other version.
        version: which it had; None where other values do not matter.
    """

    home: dict[str, Any] = field(repr=False)
    name: str
    tensor: torch.Tensor = field(repr=False)
    dtype: torch.dtype
    address: int
    version: int | None

    @classmethod
    def of(cls, module: nn.Module, key: str, values: bool) -> Place | None:
        """Where `module` keeps the tensor of this name; None where it has none. `values` says whether those matter."""
        home, name = _home(module, key)
        place = home._parameters if name in home._parameters else home._buffers
        t = place.get(name)
        if t is None:
            return None
        return cls(place, name, t, t.dtype, t.data_ptr(), t._version if values and not t.is_inference() else None)


def same(places: Sequence[Place]) -> bool:
    """Whether the tensors are still there as they were."""
    for p in places:
        t = p.tensor
        if p.home.get(p.name) is not t or t.data_ptr() != p.address or t.dtype is not p.dtype:
            return False
        if p.version is not None and t._version != p.version:
            return False
    return True


class Answer(Protocol):
    """What answers one kind of call in place of a module's own code: a `Variant`, or a recording of the whole call."""

    @property
    def key(self) -> Key:
        """Of the call."""

    @property
    def form(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of such a call, tensors left out; None where no operator is to be made of it."""

    @property
    def outputs(self) -> Outputs | None:
        """What such a call returns, where an operator can return it."""

    @property
    def devices(self) -> frozenset[torch.device]:
        """Of the module's tensors that it computes with."""

    @property
    def kernels(self) -> bool:
        """Whether it needs a GPU, or Triton's interpreter."""

    @property
    def program(self) -> Callable[..., Any]:
        """Takes the arguments, returns what the module does."""

    def holds(self, module: nn.Module) -> bool:
        """Whether it computes with the present tensors of `module`, after taking them up if need be."""


@dataclass
class Variant:
    """A program for one kind of call.

    Attributes:
        key: of the call (`key_of`).
        program: a module that computes the same on such calls. It gets the tensors of the module that it serves.
        source: text of the program's file.
        form: the arguments of such a call, tensors left out.
        outputs: what such a call returns, where an operator can return it.
        places: of the tensors that the program computes with; None before those of a module were found to fit it.
        devices: of these tensors.
    """

    key: Key
    program: nn.Module = field(repr=False)
    source: str = field(repr=False)
    form: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: Outputs | None = None
    places: list[Place] | None = field(default=None, repr=False)
    devices: frozenset[torch.device] = frozenset()

    @cached_property
    def kernels(self) -> bool:
        """Whether it has Triton kernels, which need a GPU or Triton's interpreter."""
        return "@triton.jit" in self.source

    def bind(self, module: nn.Module) -> bool:
        """Let the program compute with the tensors of `module`; False where those do not fit it."""
        self.places = None
        shared = self.program.state_dict(keep_vars=True)
        carried = {key: t for key, t in self.program.named_buffers() if key not in shared}
        places = {key: Place.of(module, key, key in carried) for key in (*shared, *carried)}
        for key, t in (*shared.items(), *carried.items()):
            place = places[key]
            if place is None or not _alike(t, place.tensor):
                return False
            if key in carried and not torch.equal(t.to(place.tensor.device), place.tensor):
                return False
        for key in places:  # the program's own tensors stay with the program: only references change
            place, (home, name) = places[key], _home(self.program, key)
            assert place is not None
            tensor = place.tensor if key in shared else carried[key].to(place.tensor.device)
            (home._parameters if name in home._parameters else home._buffers)[name] = tensor  # type: ignore[assignment]
        vars(self.program)["_qimeng_fits"] = False  # it looks at its tensors again
        self.places = [place for place in places.values() if place is not None]
        self.devices = frozenset(place.tensor.device for place in self.places)
        return True

    def holds(self, module: nn.Module) -> bool:
        """Whether the program computes with the present tensors of `module`."""
        return self.places is not None and same(self.places) or self.bind(module)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("program", "places", "devices")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, program=load_source(state["source"]).Model(), places=None, devices=frozenset())


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and layout are the same."""
    steps = zip(a.shape, a.stride(), b.stride(), strict=True) if a.shape == b.shape else ()
    return a.shape == b.shape and a.dtype is b.dtype and all(n <= 1 or s == t for n, s, t in steps)


def _home(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor, and the tensor's name there."""
    path, _, name = key.rpartition(".")
    return module.get_submodule(path), name


__all__ = ["Answer", "Place", "Variant", "same"]
