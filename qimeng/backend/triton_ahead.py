"""Compiles the kernels of one implementation beside each other, each in a child of this process.

Deals in launches that are met for the first time: a child compiles the kernel into Triton's cache, where this process
finds it when it compiles the same launches in order. What fails in a child fails there again, with its message. Knows
nothing about results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MANY_CORES = 4
"""Cores from which on it is done: each child takes one, besides those that compile other implementations."""

MOST = 12
"""Children at a time."""


def worth_it() -> bool:
    """Whether this machine has cores to spare."""
    return len(os.sched_getaffinity(0)) > MANY_CORES


def compile_ahead(call: Callable[[], Any]) -> None:
    """Run `call`, whose launches compile and do nothing else; return when all are compiled.

    Args:
        call: launches the kernels, on tensors without data.
    """
    with _forked() as children:
        call()
        while children:
            os.waitpid(children.pop(), 0)


@contextmanager
def _forked() -> Iterator[list[int]]:
    """Let each new launch of this process be compiled by a child; yields the list of children that were not awaited."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    children: list[int] = []
    seen: set[Any] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> None:
        key = (id(kernel), *(_kind(x) for x in args), *((name, _kind(x)) for name, x in sorted(options.items())))
        if key in seen:
            return
        seen.add(key)
        if len(children) >= MOST:
            os.waitpid(children.pop(0), 0)
        child = os.fork()
        if child:
            children.append(child)
            return
        status = 1
        try:
            launch(kernel, *args, grid=grid, warmup=True, **options)
            status = 0
        finally:
            os._exit(status)

    JITFunction.run = run
    try:
        yield children
    finally:
        JITFunction.run = launch
        for child in children:
            os.waitpid(child, 0)


def _kind(x: Any) -> Any:
    """What of an argument decides about a kernel's binary, or more than that."""
    return (str(x.dtype), tuple(x.shape)) if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)


__all__ = ["compile_ahead", "worth_it"]
