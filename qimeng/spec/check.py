"""Whether a spec can be optimized: it is run once at reduced size.

Deals in clear refusals. Knows nothing about capture.
"""

from __future__ import annotations

import contextlib
import math
import re
import reprlib
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.errors import SpecError
from qimeng.spec.computation import Computation
from qimeng.spec.distributions import EXAMPLES
from qimeng.spec.fake import fake_tensors, made_fake
from qimeng.spec.own_lines import line_of
from qimeng.spec.patience import TooLong, left_s, patience
from qimeng.spec.reduce import MUCH, NEEDS_VALUES, SHARE
from qimeng.spec.refused import refuse_float8
from qimeng.spec.returned import has_tensors, opened

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def shapes(inputs: Any) -> str:
    """Shapes and dtypes of a pytree of inputs, for messages.

    >>> shapes((torch.zeros(2, 3), 1.5, torch.zeros(2).numpy()))
    'float32[2, 3], 1.5, ndarray'
    """
    parts = []
    for x in _pytree.tree_leaves(inputs):
        if isinstance(x, torch.Tensor):
            parts.append(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}")
        else:
            parts.append(reprlib.repr(x) if isinstance(x, _PLAIN) else type(x).__name__)
    return ", ".join(parts) or "no inputs"


_NO_KERNEL = re.compile("not implemented for|INTERNAL ASSERT|is only supported|only supported on|CPU'? backend")
"""Words of PyTorch's errors where the CPU lacks an operator, or takes fewer arguments than a GPU."""


def missing_on_cpu(error: BaseException) -> bool:
    """Whether `error` is PyTorch's and says that the CPU lacks an operator that a GPU may have.

    >>> missing_on_cpu(RuntimeError("_scaled_mm only supports per-tensor scaling for CPU backend"))
    True
    """
    return isinstance(error, RuntimeError) and bool(_NO_KERNEL.search(str(error)))


def check(spec: Computation, device: str = "cpu") -> None:
    """Refuse what `KernelSpec.check` says."""
    _refuse_surroundings(spec)
    small = spec.tried_on(device)
    at_own_size = small is spec and device == "cuda" and spec.is_long
    values = not (at_own_size and _floats_alone(spec)) and small.is_small and _needs_values(small)
    if small is not spec or not values:
        _check_run(spec, values=False)  # sizes that do not fit may fit once they are made smaller
    if values:
        _check_run(small, values=True)
    _ = spec.domains  # refuses domains that do not fit the inputs


def _needs_values(spec: Computation) -> bool:
    """Whether a run with values is quick, or may fail where one without passes: an index may be out of range."""
    return spec.elements <= MUCH or not _floats_alone(spec)


def _floats_alone(spec: Computation) -> bool:
    with fake_tensors():
        given = _pytree.tree_leaves(spec.inputs(0, "cpu", EXAMPLES))
    return all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in given)


def _refuse_surroundings(spec: Computation) -> None:
    """Refuse settings of this process that decide what is computed and that the judge's processes do not have."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise SpecError(
                f"{spec.name}: torch.autocast is on for {device}; leave it before this call. To have a computation "
                "under autocast optimized, let the module's forward enter it"
            )
    if torch.get_default_dtype() is not torch.float32:
        raise SpecError(
            f"{spec.name}: the default dtype is {torch.get_default_dtype()}; set it to torch.float32 before this call, "
            "and name the dtype of tensors that forward makes (torch.zeros(…, dtype=x.dtype))"
        )


class _MissingOnCpu(Exception):
    """The CPU lacks an operator; the cause says which."""


def _check_run(spec: Computation, values: bool) -> None:
    """Run `spec` once as it is, with values or as shapes only; on a GPU where the CPU lacks an operator."""
    try:
        _run_on("cpu", spec, values)
    except _MissingOnCpu as missing:
        if not torch.cuda.is_available():
            why = missing.__cause__
            raise SpecError(
                f"{spec.name}: this module needs a GPU, and there is none here: PyTorch lacks an operator of it on "
                f"the CPU ({type(why).__name__}: {why}{line_of(why) if why else ''})"
            ) from why
        _run_on("cuda", spec, values)


def _run_on(device: str, spec: Computation, values: bool) -> None:
    """Run `spec` once on `device`.

    Raises:
        _MissingOnCpu: see there.
    """
    with contextlib.nullcontext() if values else fake_tensors(), torch.no_grad():
        module = spec.module(device) if values else made_fake(partial(spec.module, device))
        inputs = spec.inputs(0, device, EXAMPLES)
        leaves = _pytree.tree_leaves(inputs)
        for i, x in enumerate(leaves):
            refuse_float8(x, f"{spec.name}: input {i}")
        before = [(x.clone(), x._version) if isinstance(x, torch.Tensor) else (x, 0) for x in leaves]
        try:
            left = left_s()
            with patience(f"{spec.name}: forward", left, busy=math.inf if values else SHARE * left):
                outputs = opened(module(*inputs))
        except TooLong:
            if values:
                raise
            return  # a long loop takes far longer without values than with them
        except NEEDS_VALUES:
            return  # it runs on real values only
        except SpecError:
            raise  # of a form of weights, which says all
        except Exception as error:  # whatever the user's module raises is reported as it is
            if device == "cpu" and missing_on_cpu(error):
                raise _MissingOnCpu from error
            raise SpecError(
                f"{spec.name}: the module fails on its own inputs ({shapes(inputs)}): {type(error).__name__}: "
                f"{error}{line_of(error)}. The inputs must fit forward(*inputs)."
            ) from error
        for i, (x, (old, version)) in enumerate(zip(leaves, before, strict=True)):
            if isinstance(x, torch.Tensor) and (x._version != version or values and not _equal(x, old)):
                raise SpecError(f"{spec.name}: forward changes its input {i}; make it work on a copy (x.clone())")
    for i, y in enumerate(_pytree.tree_leaves(outputs)):
        refuse_float8(y, f"{spec.name}: output {i}")
    if not any(isinstance(y, torch.Tensor) or has_tensors(y) for y in _pytree.tree_leaves(outputs)):
        raise SpecError(f"{spec.name}: forward returns no tensor, but {type(outputs).__name__}")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


__all__ = ["check", "missing_on_cpu", "shapes"]
