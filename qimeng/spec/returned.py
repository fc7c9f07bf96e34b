"""Output classes: what a module may return besides tensors in tuples, lists and dicts.

Deals in dataclasses that PyTorch does not see into until they are registered. Knows nothing about graphs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils import _pytree


def opened(output: Any) -> Any:
    """`output` itself, after every dataclass in it is one that `torch.utils._pytree` sees into.

    PyTorch takes an instance of an unknown class as one leaf. Registering the class is what a user of torch.export does
    by hand; it lasts as long as the process and changes nothing else.
    """
    kind = type(output)
    if kind not in _pytree.SUPPORTED_NODES and _is_record(kind):
        _pytree.register_dataclass(kind)
    for part in _parts(output):
        opened(part)
    return output


def _is_record(kind: type) -> bool:
    """A dataclass that can be made again from its fields."""
    return dataclasses.is_dataclass(kind) and all(f.init for f in dataclasses.fields(kind))


def _parts(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return list(output.values())
    if isinstance(output, (tuple, list)):
        return list(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, f.name, None) for f in dataclasses.fields(output)]
    return []


__all__ = ["opened"]
