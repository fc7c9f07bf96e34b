"""Where a model's time goes: one call of it, watched submodule by submodule.

Deals in times and arguments of calls. Knows nothing about which submodules are worth a program.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qimeng.errors import SpecError
from qimeng.integration.calls import Key, copied_into, key_of, memory_like
from qimeng.spec.check import shapes
from qimeng.spec.own_lines import line_of
from qimeng.spec.patience import TooLong, patience

ROOT = ""
"""Name of the model itself."""


@dataclass
class Visit:
    """What was seen of one submodule in a call of the model.

    Attributes:
        name: of the submodule in the model; empty for the model itself.
        module: the submodule.
        seconds: in all of its calls together, its own submodules included.
        keys: kinds of the calls (`key_of`), in their order; None for one that cannot be told apart.
        inside: names of the submodules whose calls it was called in, outermost first.
    """

    name: str
    module: nn.Module
    seconds: float
    keys: list[Key | None]
    inside: tuple[str, ...]

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self.keys)


def visits(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> dict[str, Visit]:
    """Every submodule that a call of `model` calls, by name; the second call is watched, the first one warms up.

    Args:
        model: the model.
        args: of the call.
        kwargs: of the call, by name.
        device: that its kernels run on; on a GPU each submodule's end is waited for, so that times are its own.

    Raises:
        SpecError: the model raises an error, or does not end in time.
    """
    seen: dict[str, Visit] = {}
    stack: list[str] = []

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def enter(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        wait()
        visit = seen.setdefault(name, Visit(name, module, 0.0, [], tuple(stack)))
        visit.keys.append(key_of(given, named))
        stack.append(name)
        visit.seconds -= time.perf_counter()

    def leave(name: str) -> None:
        wait()
        seen[name].seconds += time.perf_counter()
        stack.pop()

    with torch.no_grad():
        try:
            with patience(f"{type(model).__name__}: forward"):
                model(*args, **kwargs)
        except TooLong:
            raise
        except Exception as error:  # whatever the user's model raises is reported as it is
            raise SpecError(
                f"{type(model).__name__}: the model fails on its example inputs ({shapes((args, kwargs))}): "
                f"{type(error).__name__}: {error}{line_of(error)}. The inputs must fit forward"
            ) from error
        with _watched(model, enter, leave):
            model(*args, **kwargs)
    return seen


def arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: dict[str, Key]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments that submodules get in a call of `model`, copied: of the first call of the wanted kind of each."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def enter(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if name in wanted and name not in found and key_of(given, named) == wanted[name]:
            found[name] = _copied(given), _copied(named)

    with torch.no_grad(), _watched(model, enter, lambda name: None):
        model(*args, **kwargs)
    return found


def _copied(x: Any) -> Any:
    """Arguments as they are now, with the same strides: a submodule may change them in place."""
    if isinstance(x, torch.Tensor):
        return copied_into(memory_like(x), x)
    if isinstance(x, (tuple, list)):
        return type(x)([_copied(i) for i in x])
    return {k: _copied(v) for k, v in x.items()} if isinstance(x, dict) else x


@contextmanager
def _watched(model: nn.Module, enter: Any, leave: Any) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda m, given, named, name=name: enter(name, m, given, named), with_kwargs=True, prepend=True
            )
        )
        handles.append(module.register_forward_hook(lambda m, given, out, name=name: leave(name), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["ROOT", "Visit", "arguments", "visits"]
