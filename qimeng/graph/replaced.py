"""Buffers that forward replaces, ``self.state = y``, as buffers that it writes into.

torch.export does not see the former where a submodule does it. Deals in a module's buffers before and after a call.
Knows nothing about graphs.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

Places = dict[tuple[torch.nn.Module, str], torch.Tensor]


def written_into(module: torch.nn.Module) -> None:
    """Let each call of `module`, when it is exported, end with the tensors as buffers that it began with.

    What it put in their place is written into them, where shape and dtype are the same.
    """
    forward = module.forward

    @wraps(forward)
    def writing(*args: Any, **kwargs: Any) -> Any:
        before = _buffers(module)
        output = forward(*args, **kwargs)
        _write(before, _buffers(module))
        return output

    module.forward = writing


def _write(before: Places, after: Places) -> None:
    held = {id(t) for t in before.values()}
    news = {
        place: new.clone() if id(new) in held else new  # buffers that change places
        for place, old in before.items()
        if (new := after.get(place)) is not None and new is not old
        if (new.shape, new.dtype) == (old.shape, old.dtype)
    }
    for (part, name), new in news.items():
        part._buffers[name] = before[part, name].copy_(new)


def _buffers(module: torch.nn.Module) -> Places:
    return {(p, name): t for p in module.modules() for name, t in p._buffers.items() if t is not None}


__all__ = ["written_into"]
