"""Specs as bytes, for worker processes.

Deals in pickling the user's own code by value, so the other process does not have to import it.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from qimeng.errors import SpecError
from qimeng.plugins import is_shared
from qimeng.spec.computation import Computation
from qimeng.spec.origin import ExampleOrigin, FunctionModule


def pack(spec: Computation, beside: Sequence[Any] = ()) -> bytes:
    """`spec` as bytes.

    Args:
        spec: what travels.
        beside: classes and functions that it needs beside those of its module.

    Raises:
        SpecError: something in it cannot be pickled.
    """
    import cloudpickle

    modules = [m for m in _own_modules(spec, beside) if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for m in modules:
        cloudpickle.register_pickle_by_value(m)
    try:
        return _dumps(spec)
    except Exception as error:  # pickling calls the user's own reducers, which may raise anything
        raise SpecError(
            f"{spec.name}: cannot travel to a worker process: {type(error).__name__}: {error}; "
            "make the module in a file (KernelSpec.from_file)"
        ) from error
    finally:
        for m in modules:
            cloudpickle.unregister_pickle_by_value(m)


def _dumps(thing: Any) -> bytes:
    """Pickled by value, and with what PyTorch does not pickle: float8 tensors, modules with parametrizations."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, torch.Tensor) and thing.is_floating_point() and thing.dtype.itemsize == 1:
                return _as_dtype, (thing.detach().view(torch.uint8), thing.dtype, type(thing) is torch.nn.Parameter)
            if isinstance(thing, torch.nn.Module) and is_parametrized(thing):
                return copyreg.__newobj__, (type(thing),), vars(thing)  # type: ignore[attr-defined]
            return super().reducer_override(thing)

    with io.BytesIO() as file:
        Pickler(file).dump(thing)
        return file.getvalue()


def _as_dtype(codes: torch.Tensor, dtype: torch.dtype, parameter: bool) -> torch.Tensor:
    tensor = codes.view(dtype)
    return torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor


def _held_modules(spec: Computation) -> list[torch.nn.Module]:
    return list(spec.origin.held.modules()) if isinstance(spec.origin, ExampleOrigin) else []


def unpack(data: bytes) -> Any:
    """The spec that `pack` wrote. The bytes must be trusted, as with any pickle."""
    import cloudpickle

    return cloudpickle.loads(data)


def _own_modules(spec: Computation, beside: Sequence[Any]) -> list[ModuleType]:
    """Python modules of the user's that define the spec's classes and functions."""
    held = _held_modules(spec)
    classes = [c for m in held for c in type(m).__mro__]
    things: list[Any] = [*dict.fromkeys(classes), *(m.function for m in held if isinstance(m, FunctionModule))]
    things += beside
    found: dict[str, ModuleType] = {}
    for thing in things:
        module = sys.modules.get(getattr(inspect.unwrap(thing), "__module__", None) or "")
        if module is not None and module.__name__ != "__main__" and not is_shared(module):
            found[module.__name__] = module
    return list(found.values())


def pack_module(module: torch.nn.Module, beside: Any) -> bytes:
    """`(module, beside)` as bytes that `pickle.loads` reads; the user's own classes travel by value.

    Raises:
        SpecError: something in it cannot be pickled.
    """
    import cloudpickle

    homes = {sys.modules.get(c.__module__) for m in module.modules() for c in type(m).__mro__}
    own = [
        m
        for m in homes
        if m is not None
        and m.__name__ != "__main__"
        and not is_shared(m)
        and m.__name__ not in cloudpickle.list_registry_pickle_by_value()
    ]
    for m in own:
        cloudpickle.register_pickle_by_value(m)
    try:
        return _dumps((module, beside))
    except Exception as error:  # pickling calls the user's own reducers, which may raise anything
        name = type(module).__name__
        raise SpecError(f"a module of class {name} cannot be pickled: {type(error).__name__}: {error}") from error
    finally:
        for m in own:
            cloudpickle.unregister_pickle_by_value(m)


__all__ = ["pack", "pack_module", "unpack"]
