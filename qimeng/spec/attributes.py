"""State in plain attributes: tensors that forward reads and then replaces or changes, as ``self.hidden = …``.

An attribute may hold them in lists, tuples and dicts. A graph updates buffers only, so such tensors become buffers
outside the state_dict. Deals in attributes of a module and its parts. Knows nothing about graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.fake import fake_tensors, made_fake
from qimeng.spec.patience import BRIEF_S, TooLong, left_s, patience

_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""

_CONTAINERS, _PLAIN = (list, tuple, dict, deque), (bool, int, float, str)
"""What may hold tensors, and what else a container of them may hold."""

_DEEP = 4
"""Objects within objects that are looked into."""


def held_in(module: torch.nn.Module) -> dict[str, list[Any]]:
    """What `module` and its parts hold in plain attributes, by dotted name: tensors, numbers and texts.

    Those in lists, tuples and dicts, and in attributes of plain objects, too; each object under its first name.
    """
    seen = set[int]()
    return {
        f"{prefix}.{name}".lstrip("."): _inside(value, seen)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OF_MODULES
    }


def stateful(make_module: Callable[[], torch.nn.Module], make_inputs: Callable[[], tuple[Any, ...]]) -> tuple[str, ...]:
    """Names of the buffers that stand for tensors in plain attributes which a call reads, and then replaces or changes.

    Structure, shapes and dtypes are kept. Both arguments run under fake tensors, and one call with them. Empty where
    that does not run, or not in time.
    """
    with _disable_current_modes(), fake_tensors(), torch.no_grad():
        try:
            module = made_fake(make_module)
            if not has_tensors(module):
                return ()
            inputs = make_inputs()
            without: dict[int, torch.Tensor] = {}
            for held in list(_attributes(module)):  # views of a tensor in memory would not show as such
                held.hold([without.setdefault(id(x), torch.empty_like(x)) for x in held.tensors])
            before, seen = list(_attributes(module)), _Uses()
            with patience("forward", left_s(), busy=BRIEF_S), seen:
                module(*inputs)
        except (Exception, TooLong):  # noqa: BLE001  the user's module may raise anything
            return ()
        after = {held.dotted: held for held in _attributes(module)}
    return tuple(
        name
        for old in before
        if (new := after.get(old.dotted)) is not None and new.is_like(old) and seen.carry(old.tensors, new.tensors)
        for name in old.buffers
    )


def has_tensors(module: torch.nn.Module) -> bool:
    """Whether `module` or a part holds a tensor in a plain attribute that could be a buffer."""
    return any(True for _ in _attributes(module))


def as_buffers(module: torch.nn.Module, names: Collection[str]) -> None:
    """Let tensors in plain attributes of `module` be buffers outside the state_dict, where these are called `names`."""
    containers = []
    for held in list(_attributes(module)):
        if not names or not set(held.buffers) <= set(names):
            continue
        if not held.is_container:
            delattr(held.part, held.name)
        for number, (name, tensor) in enumerate(zip(held.buffers, held.tensors, strict=True)):
            shared = any(tensor is other for other in held.tensors[:number])
            held.part.register_buffer(name.rpartition(".")[2], tensor.clone() if shared else tensor, persistent=False)
        if held.is_container:
            containers.append(_Container(held))
            containers[-1].put_together(module)
    if containers:
        module.forward = _Carrying(module, containers)


@dataclass(frozen=True)
class _Attribute:
    """A plain attribute: a dense tensor, or a container of such and of plain values.

    Attributes:
        prefix: name of the part that has it.
        part: which that is.
        name: of the attribute.
        leaves: what it holds.
        tree: how that is put together.
    """

    prefix: str
    part: torch.nn.Module
    name: str
    leaves: Sequence[Any]
    tree: Any

    @property
    def dotted(self) -> str:
        """Its name, with the part's."""
        return f"{self.prefix}.{self.name}".lstrip(".")

    @property
    def is_container(self) -> bool:
        """Whether it is no tensor itself."""
        return not self.tree.is_leaf()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that it holds."""
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]

    @property
    def buffers(self) -> list[str]:
        """Names of buffers that may stand for these."""
        return [f"{self.dotted}_{i}" for i in range(len(self.tensors))] if self.is_container else [self.dotted]

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let it hold other tensors."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        setattr(self.part, self.name, _pytree.tree_unflatten(leaves, self.tree))

    def is_like(self, other: _Attribute) -> bool:
        """Whether it has the structure of `other`, the shapes and dtypes of its tensors, and its plain values."""
        return self.tree == other.tree and list(map(_kind, self.leaves)) == list(map(_kind, other.leaves))


class _Container:
    """Puts an attribute together from buffers before each call of a module, and takes it apart after it.

    Once a call leaves another structure there, the attribute is the module's own again.

    Args:
        held: the attribute.
    """

    def __init__(self, held: _Attribute):
        self._prefix, self._name = held.prefix, held.name
        plain = [None if isinstance(x, torch.Tensor) else x for x in held.leaves]
        self._form = _pytree.tree_unflatten(plain, held.tree)  # a tree is not to be copied
        self._buffers = [name.rpartition(".")[2] for name in held.buffers]

    def put_together(self, module: torch.nn.Module) -> None:
        """Before a call."""
        if (present := self._present(module)) is not None:
            present.hold([getattr(present.part, name) for name in self._buffers])

    def take_apart(self, module: torch.nn.Module) -> None:
        """After a call."""
        if (present := self._present(module)) is not None:
            for name, tensor in zip(self._buffers, present.tensors, strict=True):
                present.part._buffers[name] = tensor  # assigned, torch.export would refuse what changes places

    def _present(self, module: torch.nn.Module) -> _Attribute | None:
        """The attribute as it is; None where it is of another structure than the buffers."""
        part = module.get_submodule(self._prefix)
        found = _attribute(self._prefix, part, self._name)
        plain, tree = _pytree.tree_flatten(self._form)
        if found is None or found.tree != tree or len(found.tensors) != len(self._buffers):
            return None
        shapes = [getattr(part, name).shape for name in self._buffers]
        same = [x for x in found.leaves if not isinstance(x, torch.Tensor)] == [x for x in plain if x is not None]
        return found if same and [x.shape for x in found.tensors] == shapes else None


class _Carrying:
    """The forward of a module, from and to buffers. An object, so that copies of the module have copies of it.

    Args:
        module: the module.
        containers: its attributes that buffers stand for.
    """

    def __init__(self, module: torch.nn.Module, containers: Sequence[_Container]):
        self._module, self._forward, self._containers = module, module.forward, containers
        update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for container in self._containers:
            container.put_together(self._module)
        output = self._forward(*args, **kwargs)
        for container in self._containers:
            container.take_apart(self._module)
        return output


class _Uses(DispatchMode):
    """Notes the memory of tensors that operators read, and of those that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self.changed: set[int] = set()

    def carry(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
        """Whether one of the tensors `before` was read, and then replaced by another in `after`, or changed."""
        pairs = zip(before, after, strict=True)
        return any(_place(x) in self.read and (x is not y or _place(x) in self.changed) for x, y in pairs)

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            tensors = [x for x in _pytree.tree_leaves(given.get(argument.name)) if isinstance(x, torch.Tensor)]
            self.read.update(map(_place, tensors))
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.changed.update(map(_place, tensors))
        return func(*args, **(kwargs or {}))


def _attributes(module: torch.nn.Module) -> Iterator[_Attribute]:
    """The plain attributes of `module` and its parts that hold tensors, none of them a parameter or buffer already."""
    own = {id(x) for x in (*module.parameters(), *module.buffers())}
    for prefix, part in module.named_modules():
        for name in [name for name in vars(part) if name not in _OF_MODULES and name.isidentifier()]:
            held = _attribute(prefix, part, name)
            if held is None or any(id(x) in own for x in held.tensors):
                continue
            if not held.is_container or not any(hasattr(part, name.rpartition(".")[2]) for name in held.buffers):
                yield held


def _attribute(prefix: str, part: torch.nn.Module, name: str) -> _Attribute | None:
    """The attribute `name` of a part; None for what is no dense tensor and no container of such and of plain values."""
    value = vars(part).get(name)
    if not isinstance(value, (torch.Tensor, *_CONTAINERS)):
        return None
    leaves, tree = _pytree.tree_flatten(value)
    found = _Attribute(prefix, part, name, leaves, tree)
    dense = all(x.layout is torch.strided for x in found.tensors)
    plain = all(isinstance(x, (torch.Tensor, *_PLAIN)) for x in leaves)
    return found if found.tensors and dense and plain else None


def _kind(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)


def _inside(value: Any, seen: set[int], deep: int = _DEEP) -> list[Any]:
    found: list[Any] = []
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, (torch.Tensor, *_PLAIN)):
            found.append(leaf)
        elif deep and id(leaf) not in seen and hasattr(leaf, "__dict__") and not callable(leaf):  # no module, function
            seen.add(id(leaf))
            found += [x for name in vars(leaf) for x in _inside(vars(leaf)[name], seen, deep - 1)]
    return found


def _place(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


__all__ = ["as_buffers", "has_tensors", "held_in", "stateful"]
