"""Tensors without memory.

Deals in running code for its shapes alone. Knows nothing about what is run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree

from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.layers import whole_layers

MOST_KNOWN = 1 << 24
"""Elements that the tables of a module made by `made_fake` may have together; what is beyond has no values."""


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """New tensors have shapes and no memory inside.

    Wrong shapes raise as they do on real tensors. PyTorch's own log, a traceback for every attempt, is suppressed.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), whole_layers():
            yield
    finally:
        log.disabled = before


def made_fake(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A module, made inside `fake_tensors`, whose tables keep their values where the code alone decides them.

    These are results of `arange`, `linspace`, `zeros` and so on, and what is computed from them alone; they are in
    memory, at most `MOST_KNOWN` elements together. What is drawn at random or not initialized has no values, nor has
    what is computed from it: that is where large weights come from. A constructor may therefore read numbers
    (``linspace(0, 1, 12).tolist()``), and tables outside the state_dict are known. Whether something holds for values
    that are not known is answered with no, as `torch.nn.init.trunc_normal_` asks whether to draw again. Where all that
    does not work, nothing has values.

    Args:
        make: makes the module; called a second time where the first one fails.
    """
    known = _Known()
    with contextlib.suppress(Exception), known:  # code of the user's that mixes both may raise anything
        module = make()
        if not known.overwritten(module):
            return module
    return make()


class _Known(DispatchMode):
    """Runs in memory what depends on no fake tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = MOST_KNOWN
        self.stale: list[torch.Tensor] = []

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        without = _unknown(func) or any(isinstance(x, FakeTensor) for x in given)
        if without and func is torch.ops.aten._local_scalar_dense.default and given[0].dtype is torch.bool:
            return False
        if without or not (given or self._fits(func, args, kwargs or {})):
            if func._schema.is_mutable:
                self.stale += [x for x in given if not isinstance(x, FakeTensor)]
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            made = func(*args, **(kwargs or {}))
        if self.stale and any(self._is_stale(x) for x in given):
            self.stale += [x for x in _pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        return made

    def _fits(self, func: Any, args: Any, kwargs: Any) -> bool:
        made = func(*args, **kwargs)
        count = sum(x.numel() for x in _pytree.tree_leaves(made) if isinstance(x, torch.Tensor))
        fits = count <= self.left
        self.left -= count if fits else 0
        return fits

    def _is_stale(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and any(_place(tensor) == _place(t) for t in self.stale)

    def overwritten(self, module: torch.nn.Module) -> bool:
        """Whether a table that is not in the state_dict was given values that are not known."""
        kept = {id(t) for t in module.state_dict(keep_vars=True).values()}
        plain = [t for part in module.modules() for t in vars(part).values() if isinstance(t, torch.Tensor)]
        return any(self._is_stale(t) for t in (*module.buffers(), *plain) if id(t) not in kept)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unknown(func: Any) -> bool:
    """Whether what it yields is random or not initialized."""
    return torch.Tag.nondeterministic_seeded in func.tags or str(func).startswith(("aten.empty", "aten.new_empty"))


__all__ = ["fake_tensors", "made_fake"]
