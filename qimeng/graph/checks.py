"""Checks of values in a module's own Python code, such as ``if (x < 0).any(): raise ValueError(…)`` or assertions.

A graph cannot hold such a branch. But where the other branch only raises an error, the graph follows the branch that
the examples take, and a piece of PyTorch code at its end raises the module's error for inputs that would take the
other one. Deals in the places in the code where a tensor is taken for true or false. Knows nothing about the rest of
the graph.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from qimeng.graph.leaves import call_of
from qimeng.spec import EXAMPLES, KernelSpec
from qimeng.spec.patience import BRIEF_S, TooLong, left_s, patience
from qimeng.spec.returned import opened

Site = tuple[tuple[str, int, int], ...]
"""File, line and column of a place, then of where its function was called: a helper that checks serves many places.
(No instruction: Python executes a call by others once it is warm.)"""

Answer = Callable[[Site, torch.Tensor, CodeType], bool | None]
"""Whether the tensor that code asks for there counts as true; None for its own value."""

MOST = 32
"""Most places that are tried; each takes a run of the module."""

_TRUTHS = (torch.Tensor.__bool__, torch.Tensor.item)


def _equal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y).all() if x.shape == y.shape else torch.zeros((), dtype=torch.bool, device=x.device)


_COMPARED: dict[Any, Callable[..., torch.Tensor]] = {
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.equal: _equal,
}
"""What the functions that say true or false of two tensors look at, as a tensor."""
_COMPARED |= {torch.Tensor.allclose: _COMPARED[torch.allclose], torch.Tensor.equal: _equal}


@dataclass(frozen=True)
class Check:
    """A place where the module raises an error for some values.

    Attributes:
        passes: what the tensor there is, taken for true or false, where no error is raised.
        error: name of the error's class, one of Python's own.
        message: its text for the examples.
    """

    passes: bool
    error: str
    message: str


class _Truths(TorchFunctionMode):
    """In the block, `answer` says whether a tensor of one truth value is true; None leaves it to PyTorch."""

    def __init__(self, answer: Answer):
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        if func in _TRUTHS and (func is not torch.Tensor.item or args[0].dtype is torch.bool):
            found = self.answer(_site(frame), args[0], frame.f_code)
            if found is not None:
                return found
        elif func in _COMPARED:
            found = self.answer(_site(frame), _COMPARED[func](*args, **(kwargs or {})), frame.f_code)
            if found is not None:
                return found
        elif func is torch._assert and isinstance(args[0], torch.Tensor):  # what it calls does not come here again
            found = self.answer(_site(frame), args[0], frame.f_code)
            if found is not None:
                assert found, args[1]
                return None
        elif isinstance(func, FunctionType) and func.__module__ == torch.nn.functional.__name__:
            with self:  # such a function may check values itself
                return _body(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@lru_cache
def _body(function: FunctionType) -> FunctionType:
    """One of `torch.nn.functional`, which a mode sees from the inside: it does not hand its call to the mode first."""
    space = function.__globals__
    plain = {name: lambda *_: False for name in space if name.startswith("has_torch_function")}
    body = FunctionType(
        function.__code__, {**space, **plain}, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _site(asker: FrameType) -> Site:
    """The nearest place in code that is not PyTorch's, and the one that called its function, if that is not either.

    Where there is PyTorch's code alone, in a loss of `torch.nn` for one, the place that asks.
    """
    frame: FrameType | None = asker
    while frame is not None and not _is_others(frame):
        if frame.f_code.co_filename == __file__ and frame.f_code is not _Truths.__torch_function__.__code__:
            return (_place(asker),)
        frame = frame.f_back
    if frame is None:
        return ()
    caller = frame.f_back
    return (_place(frame),) if caller is None or not _is_others(caller) else (_place(frame), _place(caller))


def _place(frame: FrameType) -> tuple[str, int, int]:
    line, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return frame.f_code.co_filename, line or 0, column or 0


def _is_others(frame: FrameType) -> bool:
    return not _is_torch(frame) and frame.f_code.co_filename != __file__


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "torch"


def checks_of(spec: KernelSpec) -> dict[Site, Check]:
    """The places in the code of `spec`'s module at which it raises an error for some values, and for the examples not.

    Each place is tried: the module runs on the examples, as if the tensor there had the other truth value, the first
    time that it is asked for (a loop would never end otherwise). It is a check if that ends in a statement that raises.
    """
    seen: dict[Site, bool | None] = {}

    def note(site: Site, tensor: torch.Tensor, asker: CodeType) -> None:
        value = bool(tensor)
        seen[site] = value if seen.get(site, value) == value else None  # now this, now that: no check

    if not spec.is_small or _run(spec, note) is not None:
        return {}
    found = {}
    for site, value in list(seen.items())[:MOST]:
        if value is not None and site:
            once = _Once(site, not value)
            error = _run(spec, once)
            if error is not None and _is_raised(error, once.asker):
                known = type(error).__name__ if vars(builtins).get(type(error).__name__) is type(error) else ""
                text = str(error) if known else f"{type(error).__name__}: {error}"
                found[site] = Check(value, known or "RuntimeError", (text.splitlines() or [""])[0])
    return found


class _Once:
    """The answer `value` at `site`, to the first question; remembers the code that asked."""

    def __init__(self, site: Site, value: bool):
        self.site, self.value = site, value
        self.asker: CodeType | None = None

    def __call__(self, here: Site, tensor: torch.Tensor, asker: CodeType) -> bool | None:
        if here != self.site or self.asker is not None:
            return None
        self.asker = asker
        return self.value


def _run(spec: KernelSpec, answer: Answer) -> Exception | None:
    """What the module raises on the examples; None also where it does not end."""
    module, inputs = spec.module(), spec.inputs(0, "cpu", EXAMPLES)
    try:
        with torch.no_grad(), _Truths(answer), patience("forward", min(BRIEF_S, left_s())):
            module(*inputs)
    except TooLong:
        return None
    except Exception as error:  # noqa: BLE001  the user's module may raise anything
        return error
    return None


def _is_raised(error: Exception, asker: CodeType | None) -> bool:
    """Whether a statement of the module's code raised it, PyTorch's functions for assertions did, or who asked."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    frame = trace.tb_frame
    if _is_torch(frame) and frame.f_globals["__name__"] != "torch" and frame.f_code is not asker:
        return False
    return frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def hold(module: torch.nn.Module, checks: Mapping[Site, Check]) -> None:
    """Let `module`, when it is exported, pass each check, and raise its errors with a placeholder at its end."""
    if not checks:
        return
    forward = module.forward

    def checked(*args: Any, **kwargs: Any) -> Any:
        conditions: list[torch.Tensor] = []
        held: list[Check] = []

        def answer(site: Site, tensor: torch.Tensor, asker: CodeType) -> bool | None:
            if site not in checks:
                return None
            conditions.append(tensor)
            held.append(checks[site])
            return checks[site].passes

        with _Truths(answer):
            output = opened(forward(*args, **kwargs))
        leaves, tree = _pytree.tree_flatten(output)
        place = next((i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)), None)
        if conditions and place is not None:
            key = call_of("check", [leaves[place]], _text(held))
            leaves[place] = torch.ops.qimeng.module([*conditions, leaves[place]], key)[0]
        return _pytree.tree_unflatten(leaves, tree)

    module.forward = checked


def _text(checks: list[Check]) -> str:
    rows = "".join(f"    ({c.passes}, {c.error}, {c.message!r}),\n" for c in checks)
    return (
        'def part(*tensors):\n    """Raise the module\'s own errors about values; the last tensor is its result."""\n'
        f"    checks = (\n{_indented(rows)}    )\n"
        "    for tensor, (passes, error, message) in zip(tensors, checks):\n"
        "        if bool(tensor) is not passes:\n            raise error(message)\n    return (tensors[-1],)\n"
    )


def _indented(rows: str) -> str:
    return "".join(f"    {row}\n" for row in rows.splitlines())


__all__ = ["Check", "checks_of", "hold"]
