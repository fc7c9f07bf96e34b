"""Which operators of a module draw random numbers.

Deals in a module's run, watched for operators that PyTorch itself marks. Knows nothing about what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def random_operators(run: Callable[[], Result]) -> tuple[Result, tuple[str, ...]]:
    """What `run` returns, and the names of its operators that draw random numbers, sorted.

    >>> random_operators(lambda: torch.nn.functional.dropout(torch.zeros(1), 0.5).item())
    (0.0, ('aten.bernoulli_',))
    """
    with _Watch() as watch:
        result = run()
    return result, tuple(sorted(watch.names))


__all__ = ["random_operators"]
