"""Running a program up to one of its regions, and timing each region of a run.

Deals in modules made from a program's source, whose regions are functions in its namespace, called one after the other
in a straight line. Knows nothing about what the regions compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch


class _Reached(Exception):
    def __init__(self, arguments: tuple[Any, ...]):
        self.arguments = arguments


def inputs_of_region(
    module: ModuleType, model: torch.nn.Module, inputs: Sequence[Any], entries: Sequence[str], number: int
) -> tuple[Any, ...]:
    """The arguments that the region's function gets in a call of `model`.

    Args:
        module: the namespace that the model's regions are called from.
        model: the program.
        inputs: of the program.
        entries: name of the function of each region, in the order of their calls.
        number: which of those calls.
    """
    count = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:
                raise _Reached(arguments)
            return function(*arguments)

        return counted

    with _replaced(module, entries, wrap), torch.no_grad():
        try:
            model(*inputs)
        except _Reached as reached:
            return reached.arguments
    raise RuntimeError(f"the program ended before its region number {number}")


def time_regions(
    module: ModuleType, run: Callable[[], Any], entries: Sequence[str], prepare: Callable[[], None]
) -> tuple[list[float], float]:
    """Device milliseconds of each region in one run, in the order of their calls; CUDA only.

    A region's time is its kernels' alone where the host launches the whole run before `prepare`'s work is done; so what
    the host took is returned as well, in milliseconds.

    Args:
        module: the namespace that the regions are called from.
        run: calls the program.
        entries: name of the function of each region.
        prepare: called before the run, for flushing caches and for putting work before it.
    """
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = function(*arguments)
            end.record()
            events.append((start, end))
            return result

        return timed

    with _replaced(module, entries, wrap):
        prepare()
        began = time.perf_counter()
        run()
        host_ms = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events], host_ms


def one_by_one(model: torch.nn.Module, inputs: Sequence[Any]) -> Any:
    """What `model` returns, its kernels launched one by one also where it replays a recording of them."""
    launch = vars(model).get("_qimeng_launch")
    if launch is None:
        return model(*inputs)
    launch.on = False
    try:
        return model(*inputs)
    finally:
        launch.on = True


class _replaced:  # noqa: N801  a context manager
    """Functions of a module wrapped for a while."""

    def __init__(self, module: ModuleType, names: Sequence[str], wrap: Callable[[Callable[..., Any]], Any]):
        self.module, self.names, self.wrap = module, set(names), wrap
        self.before: dict[str, Any] = {}

    def __enter__(self) -> None:
        for name in self.names:
            self.before[name] = getattr(self.module, name)
            setattr(self.module, name, self.wrap(self.before[name]))

    def __exit__(self, *error: object) -> None:
        for name, function in self.before.items():
            setattr(self.module, name, function)


__all__ = ["inputs_of_region", "one_by_one", "time_regions"]
