"""Specs as bytes, for worker processes.

Deals in pickling the user's own code by value, so that the other process need not be able to import it.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from qimeng.errors import SpecError
from qimeng.spec.origin import ExampleOrigin, FunctionModule

if TYPE_CHECKING:
    from qimeng.spec.spec import KernelSpec


def pack(spec: KernelSpec) -> bytes:
    """`spec` as bytes.

    Raises:
        SpecError: something in it cannot be pickled.
    """
    import cloudpickle

    modules = [m for m in _own_modules(spec) if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for m in modules:
        cloudpickle.register_pickle_by_value(m)
    try:
        data: bytes = cloudpickle.dumps(spec)
        return data
    except Exception as error:  # pickling calls the user's own reducers, which may raise anything
        advice = next((_ADVICE for m in _held_modules(spec) if is_parametrized(m)), f"{type(error).__name__}: {error}")
        raise SpecError(f"{spec.name}: cannot travel to a worker process: {advice}") from error
    finally:
        for m in modules:
            cloudpickle.unregister_pickle_by_value(m)


_ADVICE = (
    "PyTorch does not pickle modules with parametrizations (weight_norm, spectral_norm …); remove them first "
    "(torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')), or make the module in a file "
    "(KernelSpec.from_file)"
)


def _held_modules(spec: KernelSpec) -> list[torch.nn.Module]:
    return list(spec.origin.held.modules()) if isinstance(spec.origin, ExampleOrigin) else []


def unpack(data: bytes) -> KernelSpec:
    """The spec that `pack` wrote; trusts the bytes, as any pickle must be."""
    import cloudpickle

    spec: KernelSpec = cloudpickle.loads(data)
    return spec


def _own_modules(spec: KernelSpec) -> list[ModuleType]:
    """Python modules of the user's that define the spec's classes and functions."""
    held = _held_modules(spec)
    things: list[Any] = [*map(type, held), *(m.function for m in held if isinstance(m, FunctionModule))]
    found: dict[str, ModuleType] = {}
    for thing in things:
        module = sys.modules.get(getattr(inspect.unwrap(thing), "__module__", None) or "")
        if module is not None and module.__name__ != "__main__" and not _shared(module):
            found[module.__name__] = module
    return list(found.values())


def _shared(module: ModuleType) -> bool:
    """True for code that every process can import: the standard library, installed packages, this one."""
    path = getattr(module, "__file__", None) or ""
    top = module.__name__.split(".")[0]
    return not path or top in ("qimeng", torch.__name__) or "site-packages" in path or "/lib/python3" in path
