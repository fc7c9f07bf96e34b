"""A dispatch mode that lets higher-order operators (cond, scan, flex_attention …) through as they are.

PyTorch refuses these operators under a mode that does not declare support for them.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any

from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Passes every operator that runs to `call`, except those inside a higher-order operator."""

    supports_higher_order_operators = True
    _passed = False

    @abstractmethod
    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What `__torch_dispatch__` is to a `TorchDispatchMode`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            self._passed = True
            return func(*args, **(kwargs or {}))
        return self.call(func, types, args, kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._passed and "torch._dynamo" in sys.modules:
            import torch._dynamo

            torch._dynamo.reset()  # what it noted under this mode makes the next call without it fail
            self._passed = False


__all__ = ["DispatchMode"]
