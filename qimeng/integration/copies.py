"""Copies of models that share tensors, and calls that leave no trace in buffers.

Deals in whole modules. Knows nothing about programs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qimeng.errors import SpecError


def shared_copy(module: nn.Module) -> nn.Module:
    """A copy of a model that shares all of its parameters and buffers.

    Raises:
        SpecError: the model cannot be copied.
    """
    memo = {id(t): t for t in (*module.parameters(), *module.buffers())}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # copying calls the user's own code, which may raise anything
        raise SpecError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}): optimize it in place, with "
            "inplace=True"
        ) from error


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Calls inside leave no trace in buffers, such as running means and counters."""
    before = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)


__all__ = ["same_buffers", "shared_copy"]
