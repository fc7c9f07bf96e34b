"""Recurrent layers as one operator each where only shapes are computed.

PyTorch computes the shapes of an LSTM's results by running all of its steps, which takes half a minute for six layers
of 512 steps. Inside `whole_layers` the layers call an operator that says the shapes at once. On tensors with memory,
`flatten_parameters` keeps them as fast as PyTorch makes them. Deals in `torch.nn.LSTM`, `torch.nn.GRU` and
`torch.nn.RNN`. Knows nothing about graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

import torch
from torch import _VF, Tensor
from torch._subclasses.fake_tensor import FakeTensor

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")

STANDS_FOR = {f"qimeng.{name}.default": f"aten.{name}.input" for name in NAMES}
"""The operator that a layer calls inside `whole_layers`, to the operator of PyTorch that it stands for."""

_REST = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool both, bool batch_first"
_LIBRARY = torch.library.Library("qimeng", "FRAGMENT")
_LIBRARY.define(f"lstm(Tensor input, Tensor[] hx, {_REST}) -> (Tensor, Tensor, Tensor)")
for _name in NAMES[1:]:
    _LIBRARY.define(f"{_name}(Tensor input, Tensor hx, {_REST}) -> (Tensor, Tensor)")


def _output(x: Tensor, hx: Tensor, both: bool, batch_first: bool) -> Tensor:
    """The values of the last layer; with the batch first they still lie in memory with the steps first."""
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    y = x.new_empty((steps, batch, hx.shape[2] * (2 if both else 1)))
    return y.transpose(0, 1) if batch_first else y


@torch.library.register_fake("qimeng::lstm", lib=_LIBRARY)
def _lstm(x: Tensor, hx: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _output(x, hx[0], *rest[-2:]), x.new_empty(hx[0].shape), x.new_empty(hx[1].shape)


def _other(x: Tensor, hx: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _output(x, hx, *rest[-2:]), x.new_empty(hx.shape)


for _name in NAMES[1:]:
    torch.library.register_fake(f"qimeng::{_name}", _other, lib=_LIBRARY)
for _name in NAMES:
    _LIBRARY.impl(_name, getattr(torch.ops.aten, _name).input, "CompositeExplicitAutograd")


_inside, _lock = [0], Lock()


@contextlib.contextmanager
def whole_layers() -> Iterator[None]:
    """Recurrent layers that need no gradient, on sequences of one length, are one operator each inside.

    That holds for all threads until the last of them leaves.
    """
    with _lock:
        _inside[0] += 1
        for name in NAMES if _inside[0] == 1 else ():
            setattr(_VF, name, _whole(name, getattr(_VF, name)))
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            for name in NAMES if not _inside[0] else ():
                delattr(_VF, name)  # what PyTorch has is found again


def _whole(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        packed = not isinstance(args[2], (tuple, list))  # another overload takes the sizes of the batch second
        return function(*args) if packed or torch.is_grad_enabled() else getattr(torch.ops.qimeng, name)(*args)

    return call


def flatten_parameters(module: torch.nn.Module) -> None:
    """Put the weights of each recurrent layer in one piece of memory, in place, where cuDNN computes it.

    A layer that is copied or cast tensor by tensor loses that, and cuDNN then copies the weights at every call.
    Programs that call such layers, and their regions, have a method of their own for it.
    """
    for part in module.modules():
        layer = isinstance(part, torch.nn.RNNBase)
        flatten = part.flatten_parameters if layer else getattr(part, "_qimeng_flatten", None)
        if callable(flatten) and not any(isinstance(t, FakeTensor) for t in part.parameters()):
            flatten()


__all__ = ["NAMES", "STANDS_FOR", "flatten_parameters", "whole_layers"]
