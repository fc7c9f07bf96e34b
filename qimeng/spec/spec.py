"""`KernelSpec`: what to compute.

Deals in making the reference module and its inputs from seeds, on any device, in any dtype, at full or reduced size.
Knows nothing about graphs, kernels or judging.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.errors import SpecError
from qimeng.spec.inputs import Leaf, distort, infer_domain
from qimeng.spec.source import call, load_text, shrink_size, shrink_text

MODES = ("default", "highest", "high")
DTYPES = ("float32", "float16", "bfloat16", "float64")
SMALL = (64, 32, 16, 8)
"""Sizes to which a reduced spec's dimensions are cut, in the order tried."""
SMALL_ELEMENTS = 1 << 18
"""Most elements of a tensor of a reduced spec."""


class FunctionModule(torch.nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        """Call the function."""
        return self.function(*inputs)


def _cast(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Put parameters and buffers on `device` in `dtype` (floating ones), without gradients; tied ones stay tied.

    `Module.to` cannot do this under fake tensors.
    """
    done: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, t in table.items():
                if t is None:
                    continue
                if id(t) not in done:
                    moved = t.detach().to(device=device, dtype=dtype if t.is_floating_point() else t.dtype)
                    done[id(t)] = torch.nn.Parameter(moved, requires_grad=False) if table is part._parameters else moved
                table[name] = done[id(t)]  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """A computation to optimize: a reference module and how to make its inputs from a seed.

    Build one with `from_file`, `from_source`, `from_module`, `from_function` or `of`.

    Attributes:
        name: for people; nothing depends on it.
        dtype: dtype of floating parameters and inputs.
        mode: precision mode: ``"default"`` (as PyTorch ships), ``"highest"`` (no TF32), ``"high"`` (TF32 allowed).
        training: whether the module runs in training mode (KernelBench never calls `eval()`).
        seed: seed of the parameters.
        source: KernelBench-style text; empty for a spec made from a module or function.
        payload: the module (or function) and the examples, pickled, for specs without text.
        leaves: how to draw each flattened input; empty for specs with text.
        domains: what each flattened input may be: real, positive, probability, sign, index, mask or scalar.
    """

    name: str
    dtype: str = "float32"
    mode: str = "default"
    training: bool = True
    seed: int = 42
    source: str = ""
    payload: bytes = field(default=b"", repr=False)
    leaves: tuple[Leaf, ...] = field(default=(), repr=False)
    domains: tuple[str, ...] = ()
    tolerances: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse unknown modes and dtypes."""
        if self.mode not in MODES:
            raise SpecError(f"unknown precision mode {self.mode!r}; choose one of {', '.join(MODES)}")
        if self.dtype not in DTYPES:
            raise SpecError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")

    # -- ways in

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> KernelSpec:
        """A KernelBench-style file with `Model`, `get_inputs` and `get_init_inputs`.

        Raises:
            SpecError: the file is missing, does not run, or lacks a name.
        """
        file = Path(path)
        if not file.is_file():
            raise SpecError(f"no such file: {file}")
        return cls.from_source(file.read_text(), file.stem, **options)

    @classmethod
    def from_source(cls, text: str, name: str = "spec", *, domains: Sequence[str] | None = None, **options: Any) -> KernelSpec:
        """The same from text."""
        options = {k: v for k, v in options.items() if v is not None}
        load_text(text, name)
        spec = cls(name, source=text, **options)
        return replace(spec, domains=tuple(domains) if domains else spec._infer_domains())

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, inputs: Sequence[Any], *, name: str | None = None, domains: Sequence[str] | None = None, **options: Any
    ) -> KernelSpec:
        """A module with example inputs; inputs of the same shapes and kind are drawn for each trial.

        Raises:
            SpecError: the module or inputs cannot be pickled.
        """
        import copy

        kept = copy.deepcopy(module).cpu()
        return cls._from_object(kept, tuple(inputs), name or type(module).__name__, module.training, domains, options)

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], inputs: Sequence[Any], *, name: str | None = None, domains: Sequence[str] | None = None, **options: Any
    ) -> KernelSpec:
        """A plain function of tensors with example inputs."""
        label = name or getattr(function, "__name__", "function")
        return cls._from_object(FunctionModule(function), tuple(inputs), label, False, domains, options)

    @classmethod
    def of(cls, thing: Any, inputs: Sequence[Any] | None = None, **options: Any) -> KernelSpec:
        """A spec from whatever describes one: a spec, a path, a module, or a function.

        Raises:
            SpecError: it is none of these, or a module or function without example inputs.
        """
        if isinstance(thing, cls):
            changes = {k: v for k, v in options.items() if v is not None}
            return thing.with_(**changes) if changes else thing
        if isinstance(thing, (str, Path)):
            return cls.from_file(thing, **options)
        if not callable(thing):
            raise SpecError(f"cannot make a spec from {type(thing).__name__}: give a path, a module, a function or a KernelSpec")
        if inputs is None:
            raise SpecError("a module or a function needs example inputs: pass them as a tuple")
        options = {k: v for k, v in options.items() if v is not None}
        if isinstance(thing, torch.nn.Module):
            return cls.from_module(thing, inputs, **options)
        return cls.from_function(thing, inputs, **options)

    @classmethod
    def _from_object(
        cls, module: torch.nn.Module, inputs: tuple[Any, ...], name: str, training: bool, domains: Sequence[str] | None, options: dict[str, Any]
    ) -> KernelSpec:
        import cloudpickle

        flat, tree = _pytree.tree_flatten(inputs)
        try:
            payload = cloudpickle.dumps((module, tree))
        except Exception as error:  # pickling raises whatever an object's reduce raises
            raise SpecError(f"{name}: cannot be sent to another process: {error}") from error
        floats = [x.dtype for x in flat if isinstance(x, torch.Tensor) and x.is_floating_point()]
        options.setdefault("training", training)
        options.setdefault("dtype", str(floats[0]).removeprefix("torch.") if floats else "float32")
        leaves = tuple(Leaf.like(x) for x in flat)
        found = tuple(domains) if domains else tuple(infer_domain(x) for x in flat)
        return cls(name, payload=payload, leaves=leaves, domains=found, **options)

    # -- what it makes

    def module(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
        """A fresh reference module with parameters from `seed`, made on `device`.

        Args:
            device: where the parameters are made.
            dtype: of floating parameters and buffers; the spec's by default.

        Raises:
            SpecError: the constructor fails.
        """
        torch.manual_seed(self.seed)
        if self.source:
            loaded = load_text(self.source, self.name)
            with torch.device(device):
                arguments = call(loaded, "get_init_inputs", self.name)
                try:
                    module: torch.nn.Module = loaded.Model(*arguments)
                except Exception as error:  # whatever a user's constructor raises
                    raise SpecError(f"{self.name}: Model{tuple(arguments)!r:.200} failed: {type(error).__name__}: {error}") from error
        else:
            import cloudpickle

            module = cloudpickle.loads(self.payload)[0]
        _cast(module, torch.device(device), dtype or getattr(torch, self.dtype))
        return module.train(self.training)

    def inputs(
        self, seed: int, device: str | torch.device = "cpu", distribution: str = "given", dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        """The positional inputs for `seed`, made on `device`; the same seed and device give the same values.

        Args:
            seed: of every random number.
            device: where they are made; large inputs never pass the host.
            distribution: one of `DISTRIBUTIONS`; inputs whose domain it leaves stay as given.
            dtype: of floating inputs; the spec's by default.
        """
        wanted = dtype or getattr(torch, self.dtype)
        drawn, tree = self._draw(seed, device)
        generator = torch.Generator(device).manual_seed(seed + 1)
        domains = self.domains or ("real",) * len(drawn)
        made = []
        for x, domain in zip(drawn, domains, strict=True):
            y = distort(x, domain, distribution, generator)
            made.append(y.to(wanted) if isinstance(y, torch.Tensor) and y.is_floating_point() else y)
        return tuple(_pytree.tree_unflatten(made, tree))

    def _draw(self, seed: int, device: str | torch.device) -> tuple[list[Any], Any]:
        if self.source:
            torch.manual_seed(seed)
            with torch.device(device):
                values = call(load_text(self.source, self.name), "get_inputs", self.name)
            flat, tree = _pytree.tree_flatten(tuple(values))
            return [x.to(device) if isinstance(x, torch.Tensor) else x for x in flat], tree
        import cloudpickle

        generator = torch.Generator(device).manual_seed(seed)
        return [leaf.draw(generator, device) for leaf in self.leaves], cloudpickle.loads(self.payload)[1]

    def _infer_domains(self) -> tuple[str, ...]:
        """Domains from the values of the reduced spec (full-size inputs may be many GiB); real where there is none."""
        small = self.reduced()
        if small is self and not self._is_small():
            return ()
        flat, _ = small._draw(0, "cpu")
        return tuple(infer_domain(x) for x in flat)

    # -- variants

    def with_(self, **changes: Any) -> KernelSpec:
        """The same computation with another dtype, mode, training flag, seed or name."""
        return replace(self, **changes)

    @cached_property
    def digest(self) -> str:
        """Content hash of what is computed and how it is judged; the name does not count."""
        parts = [self.dtype, self.mode, str(self.training), str(self.seed), self.source, repr(self.leaves), repr(self.domains)]
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8)
        digest.update(self.payload)
        return digest.hexdigest()

    def reduced(self) -> KernelSpec:
        """The same computation at sizes that Triton's interpreter runs in a second; itself where that is not possible."""
        return self._reduced

    @cached_property
    def _reduced(self) -> KernelSpec:
        for largest in SMALL:
            small = self._shrunk(largest)
            if small is not None and small._is_small():
                return small
        return self

    def _shrunk(self, largest: int) -> KernelSpec | None:
        if self.source:
            return replace(self, source=shrink_text(self.source, largest))
        shapes = [tuple(shrink_size(s, largest) for s in leaf.shape) for leaf in self.leaves]
        import cloudpickle

        module = cloudpickle.loads(self.payload)[0]
        if any(True for _ in module.parameters()):
            shapes = [(shrink_size(leaf.shape[0], 8), *leaf.shape[1:]) if leaf.shape else () for leaf in self.leaves]
        from qimeng.graph.opgraph import row_major

        leaves = tuple(
            replace(leaf, shape=s, stride=row_major(s)) if leaf.dtype is not None else leaf
            for leaf, s in zip(self.leaves, shapes, strict=True)
        )
        return replace(self, leaves=leaves)

    def _is_small(self) -> bool:
        from torch._subclasses.fake_tensor import FakeTensorMode

        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                shapes = [x.numel() for x in _pytree.tree_leaves(self._draw(0, "cpu")[0]) if isinstance(x, torch.Tensor)]
            if any(n > SMALL_ELEMENTS for n in shapes):
                return False
            inputs = self.inputs(0)
            with torch.no_grad():
                self.module()(*inputs)
        except Exception:  # a smaller size that the model refuses is no error, just not this one
            return False
        return True

    def check(self) -> None:
        """Validate the spec at reduced size.

        Raises:
            SpecError: the module fails on its inputs, returns no tensor, or changes its inputs.
        """
        small = self.reduced()
        module, inputs = small.module(), small.inputs(0)
        tensors = [x for x in _pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in tensors]
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        try:
            with torch.no_grad():
                outputs = module(*inputs)
        except Exception as error:  # whatever a user's forward raises
            raise SpecError(
                f"{self.name}: the module fails on its own inputs (shapes {shapes}): {type(error).__name__}: {error}"
            ) from error
        if not any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(outputs)):
            raise SpecError(f"{self.name}: the module returns no tensor")
        for i, (x, y) in enumerate(zip(tensors, before, strict=True)):
            if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
                raise SpecError(f"{self.name}: the module changes its input number {i} in place; clone it first")

    # -- travel

    def to_bytes(self) -> bytes:
        """The spec for another process."""
        import cloudpickle

        data: bytes = cloudpickle.dumps(self)
        return data

    @staticmethod
    def from_bytes(data: bytes) -> KernelSpec:
        """The spec that `to_bytes` wrote."""
        import cloudpickle

        spec: KernelSpec = cloudpickle.loads(data)
        return spec
