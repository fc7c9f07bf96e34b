"""State in plain attributes: tensors that forward reads and then replaces or changes, as ``self.hidden = …``.

A graph updates buffers only, so such attributes become buffers outside the state_dict. Deals in attributes of a module
and its parts. Knows nothing about graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.fake import fake_tensors, made_fake
from qimeng.spec.patience import BRIEF_S, TooLong, left_s, patience


def tensors_in(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that `module` and its parts hold as plain attributes, by dotted name."""
    return {f"{prefix}.{name}".lstrip("."): value for prefix, _, name, value in _plain(module)}


def stateful(make_module: Callable[[], torch.nn.Module], make_inputs: Callable[[], tuple[Any, ...]]) -> tuple[str, ...]:
    """Names of plain attributes whose tensors a call reads, and then replaces or changes, shape and dtype kept.

    Both arguments run under fake tensors, and one call with them. Empty where that does not run, or not in time.
    """
    with _disable_current_modes(), fake_tensors(), torch.no_grad():
        try:
            module = made_fake(make_module)
            if not tensors_in(module):
                return ()
            inputs = make_inputs()
            without: dict[int, torch.Tensor] = {}
            for _, part, name, value in list(_plain(module)):  # views of a tensor in memory would not show as such
                setattr(part, name, without.setdefault(id(value), torch.empty_like(value)))
            before, seen = tensors_in(module), _Uses()
            with patience("forward", left_s(), busy=BRIEF_S), seen:
                module(*inputs)
        except (Exception, TooLong):  # noqa: BLE001  the user's module may raise anything
            return ()
        after = tensors_in(module)
    return tuple(
        name
        for name, old in before.items()
        if _place(old) in seen.read
        and (new := after.get(name)) is not None
        and (new is not old or _place(old) in seen.changed)
        and (new.shape, new.dtype) == (old.shape, old.dtype)
    )


def as_buffers(module: torch.nn.Module, names: Collection[str]) -> None:
    """Let the plain attributes of `module` called `names` be buffers outside the state_dict."""
    for prefix, part, name, value in list(_plain(module)):
        if f"{prefix}.{name}".lstrip(".") in names:
            delattr(part, name)
            part.register_buffer(name, value, persistent=False)


class _Uses(DispatchMode):
    """Notes the memory of tensors that operators read, and of those that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self.changed: set[int] = set()

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            tensors = [x for x in _pytree.tree_leaves(given.get(argument.name)) if isinstance(x, torch.Tensor)]
            self.read.update(map(_place, tensors))
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.changed.update(map(_place, tensors))
        return func(*args, **(kwargs or {}))


def _plain(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Name of the part, the part, the attribute's name and its dense tensor."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and name.isidentifier():
                yield prefix, part, name, value


def _place(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


__all__ = ["as_buffers", "stateful", "tensors_in"]
