"""Where a computation comes from: the text of a KernelBench-style file, or a live module with example inputs.

Deals in making new modules and inputs on any device, in their original dtype. Knows nothing about later casts,
precision modes, distributions or capture.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import inspect
import linecache
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree
from torch.utils._mode_utils import no_dispatch

from qimeng.errors import SpecError
from qimeng.spec.fake import fake_tensors
from qimeng.spec.fingerprint import fingerprint
from qimeng.spec.kept import forget_fakes
from qimeng.spec.leaf import Leaf
from qimeng.spec.own_lines import line_of
from qimeng.spec.refused import refuse_input, refuse_lazy, refuse_meta, refuse_torchscript
from qimeng.spec.returned import opened
from qimeng.spec.seeding import seed_generators
from qimeng.spec.source import Source
from qimeng.spec.ties import same_as, tied

MADE_FROM = "_qimeng_made_from"
"""Attribute of a program's model: the module that it was made from, which another optimization begins with."""
NAMES = ("Model", "get_inputs", "get_init_inputs")
"""What a KernelBench-style file must define."""


class Origin(ABC):
    """Makes modules and inputs."""

    native: torch.dtype
    """The floating dtype it is written in; other floating dtypes in it stay as they are when the spec's is changed."""

    @abstractmethod
    def module(self, seed: int, device: str) -> torch.nn.Module:
        """A fresh module on `device`."""

    @abstractmethod
    def inputs(self, seed: int, device: str) -> tuple[Any, ...]:
        """Fresh positional inputs on `device`."""

    @abstractmethod
    def examples(self, seed: int, device: str) -> tuple[Any, ...]:
        """The user's own positional inputs on `device`; `seed` is for inputs that the user gave a way to make."""

    @property
    @abstractmethod
    def packages(self) -> frozenset[str]:
        """Top-level packages that its code is from, or imports."""

    @property
    @abstractmethod
    def content(self) -> str:
        """Text that is equal for origins that compute the same thing on inputs of the same shapes."""


@contextlib.contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Torch's global generators start from `seed` inside, new tensors land on `device`; both restored after."""
    kind = torch.device(device).type
    devices = list(range(torch.cuda.device_count())) if kind == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        seed_generators(seed)
        yield


@dataclass(frozen=True)
class SourceOrigin(Origin):
    """A KernelBench-style file, loaded in a module of its own.

    Attributes:
        text: the file's text.
        name: for messages.
        file: name of the file, for messages that show a line; empty where the text is of none.
    """

    text: str
    name: str
    file: str = field(default="", compare=False)

    @property
    def native(self) -> torch.dtype:  # type: ignore[override]
        """KernelBench files are written in PyTorch's default dtype."""
        return torch.float32

    def load(self) -> None:
        """Execute the file now rather than at its first use, so that a bad one is refused.

        Raises:
            SpecError: as `namespace`.
        """
        _ = self.namespace

    @cached_property
    def namespace(self) -> ModuleType:
        """The executed file.

        Raises:
            SpecError: it does not parse, run, or define `NAMES`.
        """
        key = "qimeng_spec_" + hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()
        module = ModuleType(key)
        module.__file__ = f"<{key}>/{self.file or self.name}"
        linecache.cache[module.__file__] = (len(self.text), None, self.text.splitlines(True), module.__file__)
        sys.modules[key] = module
        try:
            with seeded(0, "cpu"):  # what it draws when it is loaded is the same in every process
                exec(compile(self.text, module.__file__, "exec"), module.__dict__)
        except (Exception, SystemExit) as error:  # whatever the user's file raises is reported as it is
            line = "" if isinstance(error, SyntaxError) else line_of(error)  # a syntax error has its line in its text
            raise SpecError(f"{self.name}: the file does not load: {type(error).__name__}: {error}{line}") from error
        missing = [n for n in NAMES if not callable(getattr(module, n, None))]
        if missing:
            raise SpecError(
                f"{self.name}: the file must define {', '.join(NAMES)}; missing: {', '.join(missing)}. "
                "For a module or function of your own use KernelSpec.from_module or KernelSpec.from_function."
            )
        return module

    def module(self, seed: int, device: str) -> torch.nn.Module:
        """A fresh `Model(*get_init_inputs())`, its weights drawn on `device` from `seed`.

        Keyword arguments are those of KernelBook's form, ``[[...], {...}]``, or a dict (see `init_arguments`).
        """
        space = self.namespace
        with seeded(seed, device):
            try:
                args, kwargs = init_arguments(space.Model, space.get_init_inputs())
                module = space.Model(*args, **kwargs)
            except torch.OutOfMemoryError:  # others may hold the device's memory: the judge waits for it
                raise
            except Exception as error:  # whatever the user's constructor raises is reported as it is
                raise SpecError(
                    f"{self.name}: Model(*get_init_inputs()) raises {type(error).__name__}: {error}{line_of(error)}"
                ) from error
        if not isinstance(module, torch.nn.Module):
            raise SpecError(f"{self.name}: Model must be a torch.nn.Module, got {type(module).__name__}")
        refuse_lazy(module, self.name)
        return module

    @cached_property
    def training(self) -> bool:
        """The mode that the module comes in: the file's own constructor may call ``eval()``.

        The module is built without memory if possible. True if it cannot be built at all.
        """
        for values in (fake_tensors, contextlib.nullcontext):
            try:
                with values(), torch.no_grad():
                    return self.module(0, "cpu").training
            except (SpecError, torch.OutOfMemoryError):
                continue
        return True

    def inputs(self, seed: int, device: str) -> tuple[Any, ...]:
        """`get_inputs()` run on `device` from `seed`, so that nothing large passes the host."""
        with seeded(seed, device):
            try:
                inputs = self.namespace.get_inputs()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the user's function raises is reported as it is
                raise SpecError(
                    f"{self.name}: get_inputs() raises {type(error).__name__}: {error}{line_of(error)}"
                ) from error
        if not isinstance(inputs, (list, tuple)):
            raise SpecError(f"{self.name}: get_inputs() must return a list of inputs, got {type(inputs).__name__}")
        return tuple(_pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(device), tuple(inputs)))

    def examples(self, seed: int, device: str) -> tuple[Any, ...]:
        """What `get_inputs()` returns under the spec's own seed, as KernelBench runs it."""
        return self.inputs(seed, device)

    @property
    def packages(self) -> frozenset[str]:
        """Those that the file imports."""
        nodes = list(ast.walk(ast.parse(self.text)))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        return frozenset(name.partition(".")[0] for name in names)

    @cached_property
    def content(self) -> str:
        """The file without comments, layout and docstrings."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
                first = body[0].value
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    del body[0]
        return ast.unparse(tree)

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "name": self.name, "file": self.file}


@dataclass(frozen=True, eq=False)
class ExampleOrigin(Origin):
    """A live module and its example inputs.

    The module is held, not copied. If you change its structure, the spec changes too.

    Attributes:
        held: the user's module.
        leaves: one description for each flattened input.
        tree: the positional inputs with each leaf's number in its place.
        native: floating dtype of most of its parameters, or of its inputs.
        shrinkable: True for functions, whose sizes come from their inputs alone.
        same: for each leaf the number of the first one that always has the same values.
    """

    held: torch.nn.Module
    leaves: tuple[Leaf, ...]
    tree: Any
    native: torch.dtype
    shrinkable: bool = False
    same: tuple[int, ...] = ()

    def module(self, seed: int, device: str) -> torch.nn.Module:
        """A copy of the module, weights included; tied tensors stay tied."""
        memo: dict[int, Any] = {}
        forget_fakes(self.held)
        with torch.no_grad():
            for t in _tensors(self.held):
                new = _copied(t, device)
                memo[id(t)] = torch.nn.Parameter(new, requires_grad=False) if isinstance(t, torch.nn.Parameter) else new
        try:
            with torch.no_grad():  # scripted modules copy their parameters themselves, as autograd sees it
                return copy.deepcopy(self.held, memo)
        except Exception as error:  # copying calls the user's own code, which may raise anything
            name = type(self.held).__name__
            said = (str(error).splitlines() or [""])[0][:200]
            raise SpecError(f"{name}: the module cannot be copied: {type(error).__name__}: {said}") from error

    def inputs(self, seed: int, device: str, ways: tuple[int, ...] = ()) -> tuple[Any, ...]:
        """Inputs of the examples' shapes, strides and dtypes with other values for which the same holds.

        Args:
            seed: of the values.
            device: where they are made.
            ways: for each leaf which of its ways is taken; the first by default.
        """
        source = Source(seed, device)
        ways = ways or (0,) * len(self.leaves)
        drawn = [
            leaf.draw(source.of(number), way) for leaf, number, way in zip(self.leaves, self.same, ways, strict=True)
        ]
        return tuple(_pytree.tree_map(lambda i: drawn[i], self.tree))

    def examples(self, seed: int, device: str) -> tuple[Any, ...]:
        """The example inputs, bit for bit and with their strides."""
        made = [leaf.example(device) for leaf in self.leaves]
        return tuple(_pytree.tree_map(lambda i: made[i], self.tree))

    @property
    def packages(self) -> frozenset[str]:
        """Those that define the classes of the module and its submodules."""
        return frozenset(type(m).__module__.partition(".")[0] for m in self.held.modules())

    @cached_property
    def content(self) -> str:
        """The module's code, attributes and parameter shapes, and the inputs: layout and values.

        The values count because a program is checked on them: what passed on some has not passed on others.
        """
        inputs = (f"{leaf.layout} {leaf.content}" for leaf in self.leaves)
        return "\n".join([fingerprint(self.held), repr(self.tree), *inputs])

    def __getstate__(self) -> dict[str, Any]:
        names = ("held", "leaves", "tree", "native", "shrinkable", "same")
        return {n: self.__dict__[n] for n in names}


class FunctionModule(torch.nn.Module):
    """A plain function as a module without parameters."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


def made_from(module: torch.nn.Module) -> torch.nn.Module:
    """The module that a program was made from, with the program's present parameters and buffers; else `module`."""
    origin = vars(module).get(MADE_FROM)
    if not isinstance(origin, torch.nn.Module):
        return module
    origin.load_state_dict(module.state_dict(keep_vars=True), strict=False, assign=True)
    return origin.train(module.training)


def examples(module: torch.nn.Module, inputs: tuple[Any, ...], shrinkable: bool) -> ExampleOrigin:
    """The origin of `module` with inputs like `inputs`.

    Raises:
        SpecError: `inputs` is no tuple or list of positional inputs, or one of them has no values, or is sparse or
            packed.
    """
    if not isinstance(inputs, (tuple, list)):
        raise SpecError(f"example inputs must be a tuple of positional inputs, got {type(inputs).__name__}; write (x,)")
    packed = _pytree.tree_leaves(tuple(inputs), is_leaf=lambda x: isinstance(x, PackedSequence))
    if any(isinstance(x, PackedSequence) for x in packed):
        raise SpecError("an example input is a PackedSequence: give the padded tensor, and pack it in forward")
    flat, tree = _pytree.tree_flatten(opened(tuple(inputs)))
    for i, x in enumerate(flat):
        refuse_input(x, f"example input {i}")
    refuse_lazy(module, type(module).__name__)
    refuse_meta(module)
    refuse_torchscript(module.function if isinstance(module, FunctionModule) else module)
    counts = Counter(t.dtype for t in (*module.parameters(), *module.buffers()) if _counts(t))
    counts = counts or Counter(t.dtype for t in flat if isinstance(t, torch.Tensor) and _counts(t))
    native = counts.most_common(1)[0][0] if counts else torch.float32
    numbers = _pytree.tree_unflatten(list(range(len(flat))), tree)
    leaves = [Leaf.of(x) for x in flat]
    return ExampleOrigin(module, tied(leaves), numbers, native, shrinkable, same_as(flat, leaves))


def _counts(t: torch.Tensor) -> bool:
    """Whether the dtype of `t` may be a spec's: floating, and no float8, which is a code for numbers."""
    return t.is_floating_point() and t.dtype.itemsize > 1


def init_arguments(made: Any, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a constructor from what `get_init_inputs` returns.

    A list is the positional ones (KernelBench), a dict the keyword ones, and ``[[...], {...}]`` both (KernelBook) where
    every key of the dict names a parameter of `made`; a list and a dict are two positional arguments otherwise.

    >>> init_arguments(torch.nn.Linear, [3, 4])
    ((3, 4), {})
    >>> init_arguments(torch.nn.Linear, [[3], {"out_features": 4}])
    ((3,), {'out_features': 4})
    >>> init_arguments(torch.nn.Sequential, [[], {"layers": 4}])
    (([], {'layers': 4}), {})
    """
    if isinstance(given, dict):
        return (), given
    if isinstance(given, (list, tuple)) and list(map(type, given)) in ([list, dict], [tuple, dict]):
        args, kwargs = given
        with contextlib.suppress(TypeError, ValueError):  # it takes no such arguments, or hides what it takes
            if set(kwargs) <= set(inspect.signature(made).bind(*args, **kwargs).arguments):
                return tuple(args), kwargs
    return tuple(given), {}


def in_mode(module: torch.nn.Module, training: bool) -> torch.nn.Module:
    """`module` in training or evaluation mode; as it is where it is in that mode already, since parts may be frozen."""
    return module if module.training == training else module.train(training)


def cast(module: torch.nn.Module, dtype: torch.dtype, only: torch.dtype | None = None) -> None:
    """Cast floating parameters and buffers in place (those of dtype `only` where given); tied ones stay tied.

    Works under fake tensors, where `Module.to` does not.
    """
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # old ones are held, so that no id is used twice
    for part in module.modules():
        for name, t in [*part._parameters.items(), *part._buffers.items()]:
            if t is None or not t.is_floating_point() or t.dtype is dtype or (only is not None and t.dtype is not only):
                continue
            if id(t) not in done:
                new = t.detach().to(dtype)
                done[id(t)] = (
                    t,
                    torch.nn.Parameter(new, requires_grad=False) if isinstance(t, torch.nn.Parameter) else new,
                )
            setattr(part, name, done[id(t)][1])


def _copied(t: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device`; under fake tensors without values, unless `t` is a table or a plain number."""
    if isinstance(t, torch.nn.Parameter) and isinstance(torch.empty(0), FakeTensor):
        return torch.empty_like(t, device=device)
    if t.dim() or isinstance(t, torch.nn.Parameter) or t.is_meta:
        return t.detach().to(device, copy=True)
    with no_dispatch():
        value = t.item()
    return torch.tensor(value, dtype=t.dtype, device=device)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and all other tensors that a copy of `module` would copy, wherever it holds them."""
    plain = [t for m in module.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    known = [*module.parameters(), *module.buffers(), *plain]
    memo: dict[int, Any] = {id(t): t for t in known}
    with contextlib.suppress(Exception), unset_fake_temporarily(), torch.no_grad():
        copy.deepcopy(module, memo)  # which keeps in `memo` what it copied; that it fails is for the caller to say
    return [*known, *(t for t in memo.get(id(memo), ()) if isinstance(t, torch.Tensor))]


__all__ = [
    "ExampleOrigin",
    "FunctionModule",
    "MADE_FROM",
    "Origin",
    "SourceOrigin",
    "cast",
    "examples",
    "in_mode",
    "init_arguments",
    "made_from",
    "seeded",
]
