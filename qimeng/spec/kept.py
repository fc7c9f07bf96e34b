"""What modules hold beside their state: fake tensors that a user's own was left with, buffers that are not persistent.

A hook that is a closure, as in ``layer.register_forward_hook(lambda m, x, y: self.seen.append(y))``, is not copied with
the module. Where a copy runs for its shapes alone, it adds to the user's own list what nobody can copy or read. Deals
in attributes of a module. Knows nothing about what was run.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

_CONTAINERS = (list, dict, OrderedDict, defaultdict, deque)


def forget_fakes(module: torch.nn.Module) -> None:
    """Take fake tensors out of lists and dicts of `module` and its parts; an attribute that is one is None."""
    for part in module.modules():
        for name, value in [(n, v) for n, v in vars(part).items() if n not in ("_parameters", "_buffers")]:
            if isinstance(value, FakeTensor):
                vars(part)[name] = None
            elif type(value) in _CONTAINERS and _has_fakes(value):
                kept = list(value.items() if isinstance(value, dict) else value)
                value.clear()
                kept = [x for x in kept if not _has_fakes(x)]
                value.update(kept) if isinstance(value, dict) else value.extend(kept)


def make_state(module: torch.nn.Module, names: Collection[str]) -> None:
    """Let the buffers of `module` called `names` be part of its state_dict; other names are passed over."""
    for prefix, part in module.named_modules():
        for name in list(part._non_persistent_buffers_set):
            if f"{prefix}.{name}".lstrip(".") in names:
                part._non_persistent_buffers_set.discard(name)


def take_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load into `model` what `state`, of the module it was made from, holds for it."""
    make_state(model, state)
    model.load_state_dict({key: state[key] for key in model.state_dict()})


def _has_fakes(value: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in _pytree.tree_leaves(value))


__all__ = ["forget_fakes", "make_state", "take_state"]
