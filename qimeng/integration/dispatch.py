"""A module's forward that runs a program where one was made for the call, and the module's own code elsewhere.

Deals in calls of one module: which program fits, why none does. Needs PyTorch only: exported packages hold a copy of
this file. Knows nothing about how programs are found.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

import torch
from torch import nn

from qimeng.integration.calls import Key, key_of, tensors_of
from qimeng.integration.operator import register, through
from qimeng.integration.variant import Answer, Variant

REASONS = {
    "shapes": "no program was made for the shapes, strides, dtypes or other arguments of this call",
    "gradients": "the call may need gradients, which programs do not compute: use torch.no_grad() for the programs",
    "mode": "it was optimized in the other one of training and evaluation mode",
    "hooks": "its submodules, or their hooks or forwards, changed, and a program calls none of them",
    "autocast": "the call is made under torch.autocast",
    "traced": "the call is traced by another tool",
    "attributes": "a number, flag or text that it or a submodule holds changed: optimize it again",
    "tensors": "its parameters or buffers, or the inputs, are on another device or have another dtype or layout",
}
"""Why a module's own code runs, in words; `Dispatch.calls` counts by these names."""


_GLOBAL_HOOKS: Any = nn.modules.module._global_forward_hooks
_GLOBAL_PRE_HOOKS: Any = nn.modules.module._global_forward_pre_hooks
"""Hooks that PyTorch calls around every module."""


class FallbackWarning(UserWarning):
    """An optimized module ran its own code; said once a module and reason."""


class Dispatch:
    """Stands in for the `forward` of a module, whose signature it shows to those who look at it.

    Args:
        module: whose forward it is.
        own: the forward that it takes the place of; None for that of the module's class.

    Attributes:
        variants: the programs, by the key of their calls.
        calls: how often a program ran (``"program"``), and the module's own code by reason (`REASONS`).
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None = None):
        self.module, self.own = module, own
        self.variants: dict[Key, Answer] = {}
        self.calls: Counter[str] = Counter()
        self._numbers: dict[Key, int] = {}
        self._inside = [_Part(part, part is module) for part in module.modules()]
        self._show_signature()

    def _show_signature(self) -> None:
        """`transformers` and torch.export read the names of a forward's arguments."""
        with suppress(ValueError, TypeError):  # some callables have none
            self.__signature__ = inspect.signature(self._bound)

    @property
    def _bound(self) -> Callable[..., Any]:
        return type(self.module).forward.__get__(self.module) if self.own is None else self.own

    @property
    def __code__(self) -> CodeType:
        """Of the module's own forward: torch.export says where that is."""
        return getattr(self._bound, "__code__", Dispatch.__call__.__code__)

    def add(self, variant: Answer) -> None:
        """Take up what is bound to the module."""
        self.variants[variant.key] = variant
        if variant.outputs is not None and variant.form is not None:
            self._numbers[variant.key] = register(self, variant.form, variant.outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        variant = self.variants.get(key_of(args, kwargs) or ())
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(variant, args, kwargs)
        if variant is None:
            reason = "traced" if _is_traced(args, kwargs) else "shapes"
        else:
            reason = self.refused(variant, args, kwargs)
        if variant is None or reason:
            self._note(reason)
            return self.original(*args, **kwargs)
        self.calls["program"] += 1
        return variant.program(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own code returns."""
        return (
            type(self.module).forward(self.module, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)
        )

    def _compiled(self, variant: Answer | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as one operator, for torch.compile and torch.export; the module's own code where gradients flow."""
        number = -1 if variant is None else self._numbers.get(variant.key, -1)
        if number < 0 or self._needs_gradients(args, kwargs) or _in_autocast():
            return self.original(*args, **kwargs)
        assert variant is not None and variant.outputs is not None
        return through(number, variant.outputs, args, kwargs)

    def _needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in (*tensors_of((args, kwargs)), *self.module.parameters()))

    def refused(self, variant: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why `variant` may not answer this call of its kind, one of `REASONS`; empty where it may."""
        if _is_traced((), {}):
            return "traced"
        if _in_autocast():
            return "autocast"
        if self._needs_gradients(args, kwargs):
            return "gradients"
        if _GLOBAL_HOOKS or _GLOBAL_PRE_HOOKS:
            return "hooks"
        for part in self._inside:
            if changed := part.changed():
                return changed
        if not variant.holds(self.module):
            return "tensors"
        devices = {t.device for t in tensors_of((args, kwargs))} | variant.devices
        runs = len(devices) == 1 and (not variant.kernels or next(iter(devices)).type == "cuda" or _interprets())
        return "" if runs else "tensors"

    def _note(self, reason: str) -> None:
        self.calls[reason] += 1
        if self.calls[reason] == 1 and reason != "gradients":
            name = type(self.module).__name__
            warnings.warn(f"{name} runs its own code: {REASONS[reason]}", FallbackWarning, stacklevel=5)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "__signature__"} | {"_numbers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for variant in self.variants.values():
            self.add(variant)
        self._show_signature()


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with these arguments is traced: as by torch.export, on tensors that have no memory."""
    if torch.jit.is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    plain = torch.Tensor.__torch_dispatch__
    return any(type(t).__torch_dispatch__ is not plain for t in tensors_of((args, kwargs)))


def _in_autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


class _Part:
    """What a program takes for granted of a submodule: its mode, numbers and texts in it, its submodules and hooks.

    Args:
        part: the submodule.
        outermost: whether the program takes its place; its hooks are called around the program.
    """

    def __init__(self, part: nn.Module, outermost: bool):
        self._part, self._outermost = part, outermost
        plain = {n: x for n, x in vars(part).items() if type(x) in (bool, int, float, str)}
        self._training = plain.pop("training", None)
        self._values, self._modules, self._hooks = tuple(plain.items()), self._submodules(), self._hooked()

    def changed(self) -> str:
        """What changed since then, one of `REASONS`; empty where nothing did."""
        held = self._part.__dict__
        if held["training"] is not self._training:
            return "mode"
        for name, value in self._values:
            now = held.get(name)
            if now is not value and now != value:
                return "attributes"
        same = self._submodules() == self._modules and (self._outermost or self._hooked() == self._hooks)
        return "" if same else "hooks"

    def _submodules(self) -> list[nn.Module | None]:
        return [*self._part.__dict__["_modules"].values()]

    def _hooked(self) -> tuple[Any, ...]:
        held = self._part.__dict__
        return len(held["_forward_hooks"]), len(held["_forward_pre_hooks"]), held.get("forward")


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def dispatch_of(module: nn.Module) -> Dispatch:
    """What stands in for the forward of `module`, from now on if nothing did."""
    present = module.__dict__.get("forward")
    if not isinstance(present, Dispatch):
        module.forward = present = Dispatch(module, present)
    return present


def attach(module: nn.Module, variant: Variant) -> bool:
    """Let `module` run a program where it fits; False where the tensors of `module` do not fit it."""
    if not variant.bind(module):
        return False
    dispatch_of(module).add(variant)
    return True


def take_out(module: nn.Module, key: Key) -> None:
    """Let `module` answer calls of this kind as it did before something was attached for them."""
    present = module.__dict__.get("forward")
    if isinstance(present, Dispatch):
        present.variants.pop(key, None)
        if not present.variants:
            detach(module)


def detach(module: nn.Module) -> None:
    """Give `module` the forward back that it had."""
    present = module.__dict__.get("forward")
    if isinstance(present, Dispatch):
        del module.__dict__["forward"]
        if present.own is not None:
            module.forward = present.own


@contextmanager
def own_code(model: nn.Module) -> Iterator[None]:
    """Inside, the submodules of `model` run their own code, whatever programs they have."""
    found = [(m, d) for m in model.modules() if isinstance(d := m.__dict__.get("forward"), Dispatch)]
    for module, _ in found:
        detach(module)
    try:
        yield
    finally:
        for module, dispatch in found:
            module.forward = dispatch


__all__ = ["REASONS", "Dispatch", "FallbackWarning", "attach", "detach", "dispatch_of", "own_code", "take_out"]
