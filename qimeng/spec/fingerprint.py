"""A text that says what a live module or function computes.

Deals in code, plain attributes and parameter shapes; weights' values do not enter. Knows nothing about inputs.
"""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def fingerprint(thing: Any) -> str:
    """Text that is equal for things that compute the same, and stable from process to process.

    Code of installed libraries is named, not read.
    """
    seen: dict[int, int] = {}
    return _text(thing, seen)


def _text(thing: Any, seen: dict[int, int]) -> str:
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, torch.Tensor):
        return f"tensor{tuple(thing.shape)}{thing.dtype}"
    if id(thing) in seen:
        return f"#{seen[id(thing)]}"
    seen[id(thing)] = len(seen)
    if isinstance(thing, (tuple, list)):
        return f"[{','.join(_text(t, seen) for t in thing)}]"
    if isinstance(thing, (set, frozenset)):
        return f"{{{','.join(sorted(_text(t, seen) for t in thing))}}}"
    if isinstance(thing, dict):
        return f"{{{','.join(f'{_text(k, seen)}:{_text(v, seen)}' for k, v in thing.items())}}}"
    if isinstance(thing, functools.partial):
        return f"partial({_text(thing.func, seen)},{_text(thing.args, seen)},{_text(thing.keywords, seen)})"
    if isinstance(thing, MethodType):
        return f"method({_text(thing.__func__, seen)},{_text(thing.__self__, seen)})"
    if isinstance(thing, FunctionType):
        return _function(thing, seen)
    if isinstance(thing, type):
        return _class(thing, seen)
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__}"
    if isinstance(thing, torch.nn.Module):
        return f"{_text(type(thing), seen)}{_text(_attributes(thing), seen)}"
    name = getattr(thing, "__qualname__", None)
    if name:  # built-in functions, operators of torch
        return f"{getattr(thing, '__module__', '')}.{name}"
    return f"{_text(type(thing), seen)}{_text(getattr(thing, '__dict__', {}), seen)}"


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    hooks = {k for k in module.__dict__ if k.startswith("_") and "hook" in k} | {"training", "_is_full_backward_hook"}
    return {k: v for k, v in sorted(module.__dict__.items()) if k not in hooks}


def _installed(thing: Any) -> bool:
    path = getattr(inspect.getmodule(thing), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path or "/lib/python3" in path


def _class(cls: type, seen: dict[int, int]) -> str:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__ == "builtins" or _installed(cls):
        return name
    skip = ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__", "__annotations__")
    body = {k: v for k, v in sorted(vars(cls).items()) if k not in skip}
    return f"class({_text(list(cls.__bases__), seen)},{_text(body, seen)})"


def _function(function: FunctionType, seen: dict[int, int]) -> str:
    if _installed(function):
        return f"{function.__module__}.{function.__qualname__}"
    cells = [c.cell_contents for c in function.__closure__ or () if not _empty(c)]
    names = {
        i.argval for code in _codes(function.__code__) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"
    }
    read = {n: function.__globals__[n] for n in sorted(names) if n in function.__globals__}
    code = ";".join(
        f"{i.opname} {'' if isinstance(i.argval, CodeType) else i.argrepr.split(' at 0x')[0]}"
        for c in _codes(function.__code__)
        for i in dis.get_instructions(c)
        if i.opname not in ("RESUME", "CACHE", "NOP")
    )
    return f"def({code},{_text(function.__defaults__, seen)},{_text(cells, seen)},{_text(read, seen)})"


def _empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell  # never true; reading is what may fail
    except ValueError:  # a cell not yet filled
        return True


def _codes(code: CodeType) -> list[CodeType]:
    return [code, *(c for k in code.co_consts if isinstance(k, CodeType) for c in _codes(k))]
