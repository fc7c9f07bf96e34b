"""Specs as bytes, for worker processes.

Deals in pickling the user's own code by value, so the other process does not have to import it.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    try:
        return _dumps_by_value(spec, _homes(spec, beside))
    except Exception as error:  # pickling calls the user's own reducers, which may raise anything
        raise SpecError(
            f"{spec.name}: cannot travel to a worker process: {type(error).__name__}: {error}; "
            "make the module in a file (KernelSpec.from_file)"
        ) from error


def _dumps_by_value(thing: Any, homes: Sequence[ModuleType]) -> bytes:
    """`thing` pickled, with what is defined in `homes` and the user's modules that they use.

    Where something of those cannot be pickled, they are left to be imported.
    """
    try:
        with _by_value(_with_imported(homes)):
            return _dumps(thing)
    except Exception:  # noqa: BLE001  users' reducers raise anything; what is raised without these modules is told
        with _by_value([m for m in homes if m.__name__ != "__main__" and not is_shared(m)]):
            return _dumps(thing)


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    """In the block, what these modules define is pickled itself, not by its name."""
    import cloudpickle

    chosen = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for m in chosen:
        cloudpickle.register_pickle_by_value(m)
    try:
        yield
    finally:
        for m in chosen:
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


def _homes(spec: Computation, beside: Sequence[Any]) -> list[ModuleType]:
    """Python modules that define the spec's classes and functions."""
    held = _held_modules(spec)
    classes = [c for m in held for c in type(m).__mro__]
    things: list[Any] = [*dict.fromkeys(classes), *(m.function for m in held if isinstance(m, FunctionModule))]
    things += beside
    homes = (sys.modules.get(getattr(inspect.unwrap(t), "__module__", None) or "") for t in things)
    return list(dict.fromkeys(m for m in homes if m is not None))


def _with_imported(modules: Iterable[ModuleType | None]) -> list[ModuleType]:
    """Those of `modules` that are the user's, and the user's modules that these have something from."""
    found: dict[str, ModuleType] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module is None or module.__name__ in found or module.__name__ != "__main__" and is_shared(module):
            continue
        found[module.__name__] = module
        for held in list(vars(module).values()):
            home = sys.modules.get(str(getattr(held, "__module__", "")))
            waiting.append(held if isinstance(held, ModuleType) else home)
    found.pop("__main__", None)  # travels by value as it is
    return list(found.values())


def pack_module(module: torch.nn.Module, beside: Any) -> bytes:
    """`(module, beside)` as bytes that `pickle.loads` reads; the user's own classes travel by value.

    Raises:
        SpecError: something in it cannot be pickled.
    """
    homes = [sys.modules.get(c.__module__) for m in module.modules() for c in type(m).__mro__]
    try:
        return _dumps_by_value((module, beside), list(dict.fromkeys(m for m in homes if m is not None)))
    except Exception as error:  # pickling calls the user's own reducers, which may raise anything
        name = type(module).__name__
        raise SpecError(f"a module of class {name} cannot be pickled: {type(error).__name__}: {error}") from error


__all__ = ["pack", "pack_module", "unpack"]
