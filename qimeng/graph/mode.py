"""Checks whether a module computes different results in training and evaluation mode.

It runs the module in both modes, first without values to compare operators. If these differ, it runs with values: a
dropout with p = 0 is another operator but the same computation. Batch normalizations that use the statistics of the
batch in one mode alone need no values. Knows nothing about graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from qimeng.spec import KernelSpec, perturb_parameters
from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.fake import fake_tensors, made_fake
from qimeng.spec.returned import opened
from qimeng.spec.seeding import seed_generators

CLOSE = 1e-3
"""Values nearer than this, relative to the largest, are the same computation in another order."""


def mode_matters(spec: KernelSpec, device: str = "cpu") -> bool:
    """Whether `spec` with `training` switched is another computation, or none.

    It runs at reduced size; for a GPU, a long one runs there at its own. If it is too large for the CPU, different
    operators count as a different computation.

    Args:
        spec: the computation.
        device: where it will run.
    """
    small = spec.tried_on(device)
    place = "cuda" if device == "cuda" and spec.is_long else "cpu"
    other = small.with_(training=not small.training)
    try:
        here, there = _recorded(small), _recorded(other)
        if here.calls == there.calls:
            return False
        if here.normalized != there.normalized:
            return True
    except Exception:  # noqa: BLE001  user code that needs values raises errors of any class without them
        pass
    if place == "cpu" and not small.is_small:
        return True
    try:
        found = (_values(one.module(place), small, place) for one in (small, other))
        return not all(_same(a, b) for a, b in zip(*found, strict=True))
    except Exception:  # noqa: BLE001  user code of a mode that it was never used in may raise anything
        return True
    finally:
        if place == "cuda":
            torch.cuda.empty_cache()  # the judge's processes need the memory


class _Recorder(DispatchMode):
    """What runs.

    Attributes:
        calls: operators in order, with every argument that is no tensor.
        normalized: batches that are normalized by their own mean and variance, though there are running ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.normalized = 0

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = _pytree.tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs))
        self.calls.append(f"{func} {plain}")
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        self.normalized += given.get("running_mean") is not None and given.get("training") is True
        return func(*args, **kwargs)


def _recorded(spec: KernelSpec) -> _Recorder:
    """What a run without values does."""
    recorder = _Recorder()
    with fake_tensors(), torch.no_grad():
        module, inputs = made_fake(spec.module), spec.inputs(0)
        with recorder:
            module(*inputs)
    return recorder


def _values(module: torch.nn.Module, spec: KernelSpec, device: str) -> list[Any]:
    """What two calls of `module` on inputs of `spec` return, and the state that they leave behind."""
    perturb_parameters(module, 2)  # no sign changes: what is no number is equal to nothing
    found: list[Any] = []
    with torch.no_grad():
        for seed in (1, 2):
            seed_generators(seed)
            found += _pytree.tree_leaves(opened(module(*spec.inputs(seed, device))))
    return found + list(module.state_dict().values())


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)


__all__ = ["mode_matters"]
