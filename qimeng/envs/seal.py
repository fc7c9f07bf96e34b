"""Whether foreign code has changed what others in its process rely on.

Deals in names and what they stood for before foreign code came: functions, classes and modules in the namespaces of
PyTorch, of this library and of the standard library's clocks, messages and numbers. A check by the process that is
checked cannot be the last word, and is not: values are compared and clocks are read by the judge. It says which name
was changed, also where that did no harm yet. Knows nothing about verdicts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.nn.modules import module as hooks

_MODULES = (
    "builtins", "ctypes", "gc", "json", "json.decoder", "json.encoder", "math", "os", "pickle", "random", "select",
    "signal", "socket", "statistics", "struct", "sys", "threading", "time", "numpy",
    "torch", "torch._C", "torch._C._nn", "torch._tensor", "torch.autograd", "torch.cuda", "torch.cuda.random",
    "torch.cuda.streams", "torch.functional", "torch.linalg", "torch.nn", "torch.nn.functional",
    "torch.nn.modules.module", "torch.overrides", "torch.random", "torch.testing", "torch.utils._pytree",
)  # fmt: skip
_CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.Event, torch.cuda.Event, torch.cuda.Stream)
_OWN = "qimeng."
_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_buffer_registration_hooks",
    "_global_module_registration_hooks", "_global_parameter_registration_hooks",
)  # fmt: skip
_MISSING = object()


class Seal:
    """What the names stand for when it is made; make it before foreign code is loaded."""

    def __init__(self) -> None:
        self._modules = {name: sys.modules[name] for name in (*_MODULES, *_own_modules()) if name in sys.modules}
        self._spaces: dict[str, tuple[Mapping[str, Any], dict[str, tuple[Any, CodeType | None]]]] = {}
        for name, module in self._modules.items():
            self._take(name, vars(module))
        for kind in (*_CLASSES, *self._own_classes()):
            self._take(f"{kind.__module__}.{kind.__qualname__}", vars(kind))
        self._names = {kind: frozenset(vars(kind)) for kind in _CLASSES}
        self._state = _state()

    def broken(self) -> list[str]:
        """Names that stand for something else now, and other traces; empty where there are none."""
        found = [f"sys.modules[{n!r}]" for n, m in self._modules.items() if sys.modules.get(n) is not m]
        for space, (now, taken) in self._spaces.items():
            for name, (value, code) in taken.items():
                present = now.get(name, _MISSING)
                if (present is not value and not _by_torch_itself(present, value)) or (
                    code is not None and present is value and value.__code__ is not code
                ):
                    found.append(f"{space}.{name}")
        for kind, names in self._names.items():
            for name in vars(kind).keys() - names:
                if any(name in vars(base) for base in kind.__mro__[1:]):
                    found.append(f"{kind.__name__}.{name}")
        return found + [name for name, value in _state().items() if value != self._state[name]]

    def _take(self, name: str, space: Mapping[str, Any]) -> None:
        kept = {
            k: (v, _code(v))
            for k, v in list(space.items())
            if (callable(v) or isinstance(v, (ModuleType, property))) and not k.startswith("last_")  # sys.last_type
        }
        self._spaces[name] = space, kept

    def _own_classes(self) -> Iterator[type]:
        for name, module in self._modules.items():
            if name.startswith(_OWN):
                for item in list(vars(module).values()):
                    if isinstance(item, type) and item.__module__ == name:
                        yield item


def shadowed(item: object) -> list[str]:
    """Attributes of an object that hide what its class has under the same name."""
    kind = type(item)
    return [f"{kind.__name__}.{name} of one object" for name in vars(item) if callable(getattr(kind, name, None))]


def _own_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith(_OWN)]


def _code(value: Any) -> CodeType | None:
    return value.__code__ if type(value) is FunctionType else None


def _by_torch_itself(present: Any, value: Any) -> bool:
    """Whether PyTorch's own compiler put `present` there, as it does when it is imported or first used."""
    if type(present) is not FunctionType:
        return False
    file = present.__code__.co_filename.removeprefix(os.path.dirname(torch.__file__))
    return file == "/_dynamo/mutation_guard.py" or (
        file == "/_compile.py" and getattr(present, "__wrapped__", None) is value
    )


def _state() -> dict[str, Any]:
    """Doors of Python and PyTorch through which foreign code is called back, and settings that change results."""
    return {
        "a tracing function": sys.gettrace(),
        "a profiling function": sys.getprofile(),
        "a function mode of torch": torch._C._len_torch_function_stack(),
        "a dispatch mode of torch": torch._C._len_torch_dispatch_stack(),
        "global hooks of torch.nn.Module": tuple(len(getattr(hooks, name)) for name in _HOOKS),
        "torch's default dtype": torch.get_default_dtype(),
    }


__all__ = ["Seal", "shadowed"]
