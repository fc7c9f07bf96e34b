"""The structure of a computation's outputs: tuples, lists, dicts and output classes.

Deals in the containers around the tensors, and in Python text that rebuilds them. Knows nothing about graphs.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.spec.returned import HOLDERS, state_of

_KEYS = (str, int, bool, bytes, type(None))
"""Types of the keys of a dict, and of the parts of a tuple that is one."""


class UnknownStructure(ValueError):
    """A class that no standalone file can make; the message is its name."""


@dataclass(frozen=True)
class Structure:
    """A leaf, or a container with its parts.

    Attributes:
        kind: ``"leaf"``, ``"none"``, ``"tuple"``, ``"list"``, ``"dict"``, ``"ordered"`` (OrderedDict), ``"default"``
            (defaultdict), ``"size"`` (torch.Size), ``"struct"`` (a result class of PyTorch's own, such as
            ``torch.return_types.topk``), ``"named"`` (a named tuple), ``"record"`` (a dataclass) or ``"object"`` (a
            plain object with tensors among its attributes).
        home: Python module of the class of a named tuple, record or object.
        name: qualified name of that class; of a defaultdict, what makes its new values.
        keys: of a dict; the fields of a named tuple or record; the attributes of an object with tensors in them.
        parts: what is inside, in order.
        rest: text of an object's other attributes.
        leaf: number of the leaf.
    """

    kind: str = "leaf"
    home: str = ""
    name: str = ""
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()
    rest: tuple[tuple[str, str], ...] = ()
    leaf: int = 0

    def text(self, leaves: Sequence[str]) -> str:
        """Python text that puts `leaves` together; named tuples and records come from a function ``_output_class``."""
        inner = [part.text(leaves) for part in self.parts]
        pairs = ", ".join(f"{k!r}: {v}" for k, v in zip(self.keys, inner, strict=False))
        if self.kind == "leaf":
            return leaves[self.leaf]
        if self.kind in ("none", "list"):
            return f"[{', '.join(inner)}]" if self.kind == "list" else "None"
        if self.kind == "dict":
            return f"{{{pairs}}}"
        if self.kind == "ordered":
            return f"__import__('collections').OrderedDict({{{pairs}}})"
        if self.kind == "default":
            return f"__import__('collections').defaultdict({self.name}, {{{pairs}}})"
        whole = "".join(f"{i}, " for i in inner)
        if self.kind in ("tuple", "size"):
            return f"torch.Size(({whole}))" if self.kind == "size" else f"({whole})"
        if self.kind == "struct":
            return f"{self.name}(({whole}))"
        made = f"_output_class({self.home!r}, {self.name!r}, {self.keys!r}, {self.kind!r})"
        if self.kind == "object":
            others = "".join(f"{k!r}: {v}, " for k, v in self.rest)
            return f"_output_object({made}, {{{others}{pairs}}})"
        return f"{made}({', '.join(inner) if self.kind == 'named' else f'**{{{pairs}}}'})"

    def classes(self) -> Iterator[Structure]:
        """Every named tuple, record and object in it."""
        if self.kind in ("named", "record", "object"):
            yield self
        for part in self.parts:
            yield from part.classes()


def structure_of(spec: Any) -> Structure:
    """The structure that a `torch.utils._pytree.TreeSpec` describes.

    Raises:
        UnknownStructure: it holds a class that cannot be written into a file.
    """
    return _read(spec, count())


def _read(spec: Any, numbers: Iterator[int]) -> Structure:
    if spec.is_leaf():
        return Structure(leaf=next(numbers))
    parts = [_read(part, numbers) for part in spec.children()]
    if spec.type is torch.Size:  # put together, it is a tuple
        return Structure("size", parts=tuple(parts))
    return _described(_pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context))


def _described(item: Any) -> Structure:
    kind = type(item)
    if isinstance(item, Structure):
        return item
    if item is None:
        return Structure("none")
    if kind in (tuple, list):
        return Structure(kind.__name__, parts=tuple(map(_described, item)))
    if kind in (dict, OrderedDict, defaultdict):
        return _mapping(item)
    if _pytree.is_structseq(item):
        return Structure("struct", name=f"torch.return_types.{kind.__name__}", parts=tuple(map(_described, item)))
    if _pytree.is_namedtuple(item):
        return Structure("named", kind.__module__, kind.__qualname__, kind._fields, tuple(map(_described, item)))
    if dataclasses.is_dataclass(kind) and all(f.init for f in dataclasses.fields(kind)):
        if kind.__bases__ != (object,) and not _is_installed(kind):
            raise UnknownStructure(f"{kind.__name__}, a class with bases of its own that no installed package has")
        fields = tuple(f.name for f in dataclasses.fields(kind))
        return Structure(
            "record", kind.__module__, kind.__qualname__, fields, tuple(_described(getattr(item, f)) for f in fields)
        )
    if kind in HOLDERS:
        parts, rest = state_of(item)
        others = tuple((key, _written(kind, key, value)) for key, value in rest.items())
        whole = tuple(map(_described, parts.values()))
        return Structure("object", kind.__module__, kind.__qualname__, tuple(parts), whole, others)
    raise UnknownStructure(kind.__name__)


def _mapping(item: Any) -> Structure:
    """Of a dict, whose keys have to be what Python text can say."""
    for key in item:
        if not all(type(part) in _KEYS for part in (key if type(key) is tuple else (key,))):
            raise UnknownStructure(f"dict with a key of type {type(key).__name__}")
    made, makes = {dict: "dict", OrderedDict: "ordered", defaultdict: "default"}[type(item)], ""
    if made == "default":
        factory = item.default_factory
        if factory is not None and vars(builtins).get(getattr(factory, "__name__", "")) is not factory:
            raise UnknownStructure("defaultdict whose values a function makes")
        makes = "None" if factory is None else factory.__name__
    return Structure(made, name=makes, keys=tuple(item), parts=tuple(map(_described, item.values())))


def _written(kind: type, key: str, value: Any) -> str:
    """The text of an attribute without tensors; a device is the one that the program runs on."""

    def text(item: Any) -> str:
        return _written(kind, key, item)

    if isinstance(value, torch.device):
        return "device"
    if type(value) in (list, tuple):
        inner = "".join(f"{text(item)}, " for item in value)
        return f"[{inner}]" if type(value) is list else f"({inner})"
    if type(value) is dict:
        return f"{{{', '.join(f'{text(k)}: {text(v)}' for k, v in value.items())}}}"
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    raise UnknownStructure(f"{kind.__name__} whose attribute {key} is a {type(value).__name__}")


def _is_installed(kind: type) -> bool:
    """Whether any process on this machine can import the class."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in path and "<locals>" not in kind.__qualname__


__all__ = ["Structure", "UnknownStructure", "structure_of"]
