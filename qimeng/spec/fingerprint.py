"""A text that says what a live module or function computes.

Deals in code, plain attributes and parameter shapes, but not in the values of weights. Knows nothing about inputs.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def fingerprint(thing: Any) -> str:
    """Text that is equal for things that compute the same, and stable from process to process.

    Code of installed libraries is named, not read. An object that occurs again, such as a shared layer or a tied
    weight, is written as the number of its first occurrence.
    """
    return _text(thing, {}, frozenset())


Seen = dict[int, tuple[int, Any]]
"""Identity to number and object; the object is held so that its identity is not used again."""


def _text(thing: Any, seen: Seen, inside: frozenset[int]) -> str:
    """`inside` holds the identities of the containers being written, which may contain themselves."""
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, (tuple, list, set, frozenset, dict)):
        if id(thing) in inside:
            return "..."
        inside |= {id(thing)}
        if isinstance(thing, dict):
            return f"{{{','.join(f'{_text(k, seen, inside)}:{_text(v, seen, inside)}' for k, v in thing.items())}}}"
        items = [_text(t, seen, inside) for t in thing]
        return f"[{','.join(sorted(items) if isinstance(thing, (set, frozenset)) else items)}]"
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__}"
    if id(thing) in seen:
        return f"#{seen[id(thing)][0]}"
    seen[id(thing)] = len(seen), thing
    return _object(thing, seen, inside)


def _object(thing: Any, seen: Seen, inside: frozenset[int]) -> str:
    def text(part: Any) -> str:
        return _text(part, seen, inside)

    if isinstance(thing, torch.Tensor):
        return f"tensor{tuple(thing.shape)}{thing.dtype}"
    if isinstance(thing, functools.partial):
        return f"partial({text(thing.func)},{text(thing.args)},{text(thing.keywords)})"
    if isinstance(thing, MethodType):
        return f"method({text(thing.__func__)},{text(thing.__self__)})"
    if isinstance(thing, FunctionType):
        return _function(thing, text)
    if isinstance(thing, type):
        return _class(thing, text)
    if isinstance(thing, torch.nn.Module):
        return f"{text(type(thing))}{text(_attributes(thing))}"
    name = getattr(thing, "__qualname__", None)
    if name:  # built-in functions, operators of torch
        return f"{getattr(thing, '__module__', '')}.{name}"
    return f"{text(type(thing))}{text(getattr(thing, '__dict__', {}))}"


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    hooks = {k for k in module.__dict__ if k.startswith("_") and "hook" in k} | {"training", "_is_full_backward_hook"}
    found = {k: v for k, v in sorted(module.__dict__.items()) if k not in hooks}
    apart = [name for name, part in module.named_children() if part.training != module.training]
    return found | ({"in the other mode": apart} if apart else {})


def _installed(thing: Any) -> bool:
    """Code of libraries, this one included, whose versions are recorded elsewhere."""
    home = inspect.getmodule(thing)
    path = getattr(home, "__file__", None) or ""
    own = getattr(home, "__name__", "").split(".")[0] == "qimeng"
    return own or "site-packages" in path or "dist-packages" in path or "/lib/python3" in path


def _class(cls: type, text: Callable[[Any], str]) -> str:
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__ == "builtins" or _installed(cls):
        return name
    skip = (
        "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__firstlineno__",
        "__static_attributes__",
    )  # fmt: skip
    body = {k: v for k, v in sorted(vars(cls).items()) if k not in skip}
    return f"class({text(list(cls.__bases__))},{text(body)})"


def _function(function: FunctionType, text: Callable[[Any], str]) -> str:
    if _installed(function):
        return f"{function.__module__}.{function.__qualname__}"
    codes = _codes(function.__code__)
    cells = [c.cell_contents for c in function.__closure__ or () if not _empty(c)]
    names = {i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    read = {n: function.__globals__[n] for n in sorted(names) if n in function.__globals__}
    lines = [
        _line(i) for code in codes for i in dis.get_instructions(code) if i.opname not in ("RESUME", "CACHE", "NOP")
    ]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return f"def({';'.join(lines)},{text(defaults)},{text(cells)},{text(read)})"


def _line(instruction: dis.Instruction) -> str:
    value = instruction.argval
    if isinstance(value, CodeType):
        return instruction.opname
    if isinstance(value, frozenset):
        return f"{instruction.opname} {sorted(map(repr, value))}"
    return f"{instruction.opname} {instruction.argrepr}"


def _empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell  # never true; reading is what may fail
    except ValueError:  # a cell not yet filled
        return True


def _codes(code: CodeType) -> list[CodeType]:
    return [code, *(c for k in code.co_consts if isinstance(k, CodeType) for c in _codes(k))]


__all__ = ["fingerprint"]
