"""Detects whether untrusted code changed names that other code in its process relies on.

Deals in names and their values before untrusted code was loaded: functions, classes and modules of PyTorch, of this
library, and of the standard library's clocks, messages and numbers. This check runs in the checked process, so it is
not decisive: the judge compares values and reads clocks itself. It names each changed name, even if the change did no
harm yet. Knows nothing about verdicts.
"""

from __future__ import annotations

import gc
import operator
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
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
_RELIED_ON = (
    "add_.Tensor", "clone", "copy_", "empty.memory_format", "empty_strided", "eq.Tensor", "equal", "fill_.Scalar",
    "linear", "mul.Tensor", "mul_.Tensor", "normal_", "rand", "randint", "randn", "randperm", "sum", "sum.dim_IntList",
    "uniform_", "view.dtype", "zero_", "_foreach_copy_", "cat",
)  # fmt: skip
"""Operators that inputs, parameters and comparisons are made with."""
_MISSING = object()
_all, _map, _is = all, map, operator.is_  # kept by `Seal.apart`: code that replaces the built-in ones changes nothing
_made_of = tuple(operator.attrgetter(name) for name in ("__code__", "__defaults__", "__kwdefaults__"))
_SIGNALS = sorted(signal.valid_signals())
_SETTINGS = tuple(
    name
    for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation",
        "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cudnn_benchmark", "_get_cudnn_enabled",
        "_get_deterministic_algorithms", "_get_mkldnn_enabled", "_get_cudnn_deterministic",
    )
    if hasattr(torch._C, name)
)  # fmt: skip
_PRECISIONS = [("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv"))]
_SMALL, _DENORMAL = 2.0**-60, 5e-324
"""Added to one, and doubled: the results show how the processor rounds, and whether it keeps denormals."""


class Seal:
    """The values of the names when it is made. Make it before untrusted code is loaded."""

    def __init__(self) -> None:
        self._modules = {name: sys.modules[name] for name in (*_MODULES, *_own_modules()) if name in sys.modules}
        self._spaces: dict[str, tuple[Mapping[str, Any], dict[str, tuple[Any, tuple[Any, ...]]]]] = {}
        self._columns: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {}
        for name, module in self._modules.items():
            self._take(name, vars(module))
        for kind in (*_CLASSES, *self._own_classes()):
            self._take(f"{kind.__module__}.{kind.__qualname__}", vars(kind))
        functions = [v for _, values, _ in self._columns.values() for v in values if type(v) is FunctionType]
        self._functions = tuple(functions)
        self._made_of = tuple(tuple(map(part, functions)) for part in _made_of)
        self._names = {kind: frozenset(vars(kind)) for kind in _CLASSES}
        self._state = _state()

    def apart(self) -> Callable[[], list[str]]:
        """`broken` as a function with its own code, names and tables, which no change to this class affects.

        Otherwise code that replaces this check would not be detected.
        """
        look = FunctionType(Seal.broken.__code__, dict(Seal.broken.__globals__))
        spaces = {name: (now, dict(taken)) for name, (now, taken) in self._spaces.items()}
        tables = SimpleNamespace(
            _modules=dict(self._modules),
            _spaces=spaces,
            _columns=dict(self._columns),
            _functions=self._functions,
            _made_of=self._made_of,
            _names=dict(self._names),
            _state=dict(self._state),
        )
        return lambda: look(tables)

    def broken(self) -> list[str]:
        """Names that stand for something else now, and other traces; empty where there are none.

        It is asked for at every trial, and there are 8,000 names. Those of a space in which all names are the same
        objects as before are not looked at one by one where no function anywhere has another code or other defaults,
        except for functions with defaults of keywords, which are tables that can change.
        """
        found = [f"sys.modules[{n!r}]" for n, m in self._modules.items() if sys.modules.get(n) is not m]
        alike = _all(
            [_all(_map(_is, _map(p, self._functions), kept)) for p, kept in zip(_made_of, self._made_of, strict=True)]
        )
        for space, (now, taken) in self._spaces.items():
            known, values, with_keywords = self._columns[space]
            same = alike and _all(_map(_is, _map(now.get, known), values))
            for name in with_keywords if same else taken:
                value, parts = taken[name]
                present = now.get(name, _MISSING)
                if (present is not value and not _by_torch_itself(present, value)) or (
                    present is value and not _same(_parts(value), parts)
                ):
                    found.append(f"{space}.{name}")
        for kind, names in self._names.items():
            for name in vars(kind).keys() - names:
                if any(name in vars(base) for base in kind.__mro__[1:]):
                    found.append(f"{kind.__name__}.{name}")
        return found + [name for name, value in _state().items() if value != self._state[name]]

    def _take(self, name: str, space: Mapping[str, Any]) -> None:
        kept = {
            k: (v, _parts(v))
            for k, v in list(space.items())
            if (callable(v) or isinstance(v, (ModuleType, property))) and not k.startswith("last_")  # sys.last_type
        }
        self._spaces[name] = space, kept
        values = tuple(v for v, _ in kept.values())
        with_keywords = tuple(k for k, (v, _) in kept.items() if getattr(v, "__kwdefaults__", None))
        self._columns[name] = tuple(kept), values, with_keywords

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


def unlike(item: object, before: Mapping[str, Any]) -> list[str]:
    """Attributes of an object that are others than `before`, what `vars` gave of it; of those that never change."""
    now, kind = vars(item), type(item).__name__
    return [f"{kind}.{name}" for name in before.keys() | now.keys() if now.get(name) is not before.get(name, _MISSING)]


def _own_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith(_OWN)]


def _parts(value: Any) -> tuple[Any, ...]:
    """What a function is made of: its code, and what it takes for granted."""
    if type(value) is not FunctionType:
        return ()
    named = value.__kwdefaults__ or {}
    return (value.__code__, *(value.__defaults__ or ()), *named, *named.values())


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether both are of the very same objects; names of keywords are equal texts."""
    return len(some) == len(others) and all(
        a is b or (type(a) is str and type(b) is str and a == b) for a, b in zip(some, others, strict=True)
    )


def _by_torch_itself(present: Any, value: Any) -> bool:
    """Whether PyTorch's own compiler put `present` there, as it does when it is imported or first used."""
    if type(present) is not FunctionType:
        return False
    file = present.__code__.co_filename.removeprefix(os.path.dirname(torch.__file__))
    return file == "/_dynamo/mutation_guard.py" or (
        file == "/_compile.py" and getattr(present, "__wrapped__", None) is value
    )


_precision_of = getattr(torch._C, "_get_fp32_precision_getter", lambda backend, operator: "")  # PyTorch 2.9 has it


def _state() -> dict[str, Any]:
    """Hooks of Python and PyTorch that can call untrusted code, and settings that change results."""
    return {
        "a tracing function": sys.gettrace(),
        "a profiling function": sys.getprofile(),
        "a callback of the garbage collector": tuple(gc.callbacks),
        "how often threads take turns": sys.getswitchinterval(),
        "the handler of a signal": tuple(map(signal.getsignal, _SIGNALS)),
        "a function mode of torch": torch._C._len_torch_function_stack(),
        "a dispatch mode of torch": torch._C._len_torch_dispatch_stack(),
        "an operator of torch": tuple(torch._C._dispatch_dump(f"aten::{n}").count(" (inactive): ") for n in _RELIED_ON),
        "global hooks of torch.nn.Module": tuple(len(getattr(hooks, name)) for name in _HOOKS),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "a setting of torch.backends": (
            *(getattr(torch._C, name)() for name in _SETTINGS),
            *(_precision_of(*which) for which in _PRECISIONS),
        ),
        "the processor's rounding": (1.0 + _SMALL, 1.0 - _SMALL, 2 * _DENORMAL > 0),
    }


__all__ = ["Seal", "shadowed", "unlike"]
