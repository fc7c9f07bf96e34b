"""`KernelSpec`: what to compute.

Deals in the one object that everything else starts from: it makes modules and inputs, in any dtype, on any device.
Knows nothing about graphs, kernels or how results are judged.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.errors import SpecError
from qimeng.spec.distributions import redistribute
from qimeng.spec.fake import fake_tensors
from qimeng.spec.leaf import DOMAINS, infer_domain
from qimeng.spec.origin import ExampleOrigin, FunctionModule, Origin, SourceOrigin, cast, examples, in_mode

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64,
}  # fmt: skip
MODES = ("default", "highest", "high")
"""As PyTorch ships (fp32 matmul, TF32 cuDNN convolutions); no TF32 anywhere; TF32 or better everywhere."""


@dataclass(frozen=True)
class Tolerances:
    """How far a result may be from the float64 reference, relative to what PyTorch eager reaches.

    Attributes:
        max_factor: times eager's maximum error.
        rms_factor: times eager's root-mean-square error.
        floor_ulp: floor, in units of the output dtype's last place; a quarter of it for half types.
        kernelbench: rtol and atol of KernelBench's own rule; None for its default (1e-4, half types 1e-2).
    """

    max_factor: float = 4.0
    rms_factor: float = 2.0
    floor_ulp: float = 16.0
    kernelbench: float | None = None


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """A computation to make faster: a reference module, how to make its inputs, and what counts as right.

    Make one with `from_file`, `from_source`, `from_module`, `from_function`, `of` for any of these, or `from_text`. Two
    specs are equal where their digests are.

    Attributes:
        name: for people; nothing is decided by it.
        origin: where the module and its inputs come from.
        dtype: floating dtype of inputs and parameters.
        mode: precision mode, one of `MODES`.
        training: whether the module runs in training mode; that of the given module by default. Nobody calls ``eval()``
            on a file's module (KernelBench never does), so that it is True unless the file's own constructor did.
        seed: seed of the weights.
        declared: domain of each flattened input, where the user says so; empty where they are inferred.
        tolerances: how far a result may be off.
    """

    name: str
    origin: Origin = field(repr=False)
    dtype: str = "float32"
    mode: str = "default"
    training: bool = True
    seed: int = 42
    declared: tuple[str, ...] = ()
    tolerances: Tolerances = Tolerances()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SpecError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", str(DTYPES[self.dtype]).removeprefix("torch."))
        if self.mode not in MODES:
            raise SpecError(f"unknown precision mode {self.mode!r}; known: {', '.join(MODES)}")
        unknown = [d for d in self.declared if d not in DOMAINS]
        if unknown:
            raise SpecError(f"unknown input domain {unknown[0]!r}; known: {', '.join(DOMAINS)}")

    # ---- making one

    @classmethod
    def from_file(
        cls, path: str | Path, *, dtype: str | None = None, mode: str | None = None, **options: Any
    ) -> KernelSpec:
        """The computation of a KernelBench-style file: `Model`, `get_inputs`, `get_init_inputs`.

        Raises:
            SpecError: the file is missing or no text, does not load, or lacks one of the names.
        """
        path = Path(path)
        if not path.is_file():
            raise SpecError(f"no such file: {path}")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"cannot read {path} as Python: {error}") from error
        return cls.from_source(text, options.pop("name", path.stem), dtype=dtype, mode=mode, **options)

    @classmethod
    def from_source(
        cls,
        text: str,
        name: str = "source",
        *,
        dtype: str | None = None,
        mode: str | None = None,
        domains: tuple[str, ...] = (),
        **options: Any,
    ) -> KernelSpec:
        """The same from the text of such a file.

        Raises:
            SpecError: the text does not load, or lacks one of the names.
        """
        origin = SourceOrigin(text, name)
        origin.load()
        options.setdefault("training", origin.training)
        return cls(name, origin, dtype or "float32", mode or "default", declared=tuple(domains), **options)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        example_inputs: tuple[Any, ...],
        *,
        name: str | None = None,
        dtype: str | None = None,
        mode: str | None = None,
        domains: tuple[str, ...] = (),
        **options: Any,
    ) -> KernelSpec:
        """The computation of a live module on inputs like the examples (held by reference, its weights included)."""
        if not isinstance(module, torch.nn.Module):
            raise SpecError(f"from_module takes a torch.nn.Module, got {type(module).__name__}")
        origin = examples(module, example_inputs, shrinkable=isinstance(module, FunctionModule))
        native = str(origin.native).removeprefix("torch.")
        options.setdefault("training", module.training)
        return cls(
            name or type(module).__name__,
            origin,
            dtype or native,
            mode or "default",
            declared=tuple(domains),
            **options,
        )

    @classmethod
    def from_function(cls, function: Callable[..., Any], example_inputs: tuple[Any, ...], **options: Any) -> KernelSpec:
        """The computation of a plain function of positional inputs like the examples."""
        if not callable(function):
            raise SpecError(f"from_function takes a function, got {type(function).__name__}")
        if options.get("name") is None:
            options["name"] = getattr(function, "__name__", type(function).__name__)
        options.setdefault("training", False)
        return cls.from_module(FunctionModule(function), example_inputs, **options)

    @classmethod
    def from_text(cls, words: str, *, coder: Any, **options: Any) -> KernelSpec:
        """The computation that `words` describe, written by the language model of `coder` as a file to read and edit.

        ``KernelSpec.from_text("batched matrix product of A and B, batch 32, fp16, 512 x 512", coder="openai:MODEL")``;
        see `qimeng.spec_from_text`, which this is, for the options and errors.
        """
        from qimeng import spec_from_text  # the package's face: what writes and tries it knows specs, not this one them

        return spec_from_text(words, coder=coder, **options)

    @classmethod
    def of(cls, thing: Any, inputs: tuple[Any, ...] | None = None, **options: Any) -> KernelSpec:
        """A spec from whatever `thing` is: a path, a file's text, a module, a function, or a spec.

        Args:
            thing: text with a line break is taken as a file's text, other text as a path.
            inputs: example inputs, for a module or function.
            options: as for the other constructors; those that are None are left out.
        """
        options = {k: v for k, v in options.items() if v is not None}
        if isinstance(thing, KernelSpec):
            return thing.with_(**options) if options else thing
        if isinstance(thing, str) and "\n" in thing:
            return cls.from_source(thing, **options)
        if isinstance(thing, (str, Path)):
            return cls.from_file(thing, **options)
        if not callable(thing):
            raise SpecError(f"a spec is made from a file, a module or a function, not from {type(thing).__name__}")
        if inputs is None:
            raise SpecError(f"example inputs are needed for {type(thing).__name__}: KernelSpec.of(it, (x, y))")
        make = cls.from_module if isinstance(thing, torch.nn.Module) else cls.from_function
        return make(thing, inputs, **options)

    def with_(self, **changes: Any) -> KernelSpec:
        """A variant: ``spec.with_(dtype="bfloat16", mode="high")``."""
        if "domains" in changes:
            changes["declared"] = tuple(changes.pop("domains"))
        try:
            return replace(self, **changes)
        except TypeError as error:
            raise SpecError(f"a spec has no {', '.join(changes)}: {error}") from error

    # ---- what it makes

    @property
    def source(self) -> str:
        """Text of the KernelBench-style file it came from; empty for modules and functions."""
        return self.origin.text if isinstance(self.origin, SourceOrigin) else ""

    def module(self, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.nn.Module:
        """A fresh reference module on `device`, its weights rounded to the spec's dtype.

        Args:
            device: where it is made; its weights are drawn there.
            dtype: cast all floating parameters and buffers to this afterwards (float64 for the reference result).
        """
        module = self.origin.module(self.seed, device)
        module.requires_grad_(False)
        target, native = DTYPES[self.dtype], self.origin.native
        if target is not native:
            cast(module, target, only=native)
        if dtype is not None:
            cast(module, dtype)
        return in_mode(module, self.training)

    def inputs(
        self, seed: int, device: str = "cpu", distribution: str = "given", dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        """Positional inputs, the same for the same seed and device type, rounded to the spec's dtype.

        Args:
            seed: other seeds give other values.
            device: where they are made; nothing passes the host.
            distribution: one of `DISTRIBUTIONS`; it applies to floating inputs whose domain allows it.
            dtype: cast all floating inputs to this afterwards.
        """
        made = self.origin.inputs(seed, device)
        leaves, tree = _pytree.tree_flatten(made)
        target, native = DTYPES[self.dtype], self.origin.native
        for i, x in enumerate(leaves):
            if not isinstance(x, torch.Tensor):
                continue
            if x.dtype is native and target is not native:
                x = x.to(target)
            if distribution != "given" and x.is_floating_point():
                x = redistribute(x, self.domains[i], distribution, seed + i)
            if dtype is not None and x.is_floating_point():
                x = x.to(dtype)
            leaves[i] = x
        return tuple(_pytree.tree_unflatten(leaves, tree))

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Domain of each flattened input: declared, or inferred from the inputs of two seeds at reduced size."""
        if isinstance(self.origin, ExampleOrigin):
            inferred = tuple(leaf.domain for leaf in self.origin.leaves)
        else:
            small = self.reduced()
            with contextlib.nullcontext() if small.is_small else fake_tensors():
                seen = [[infer_domain(x) for x in _pytree.tree_leaves(small.origin.inputs(n, "cpu"))] for n in (1, 2)]
            inferred = tuple(a if a == b else "real" for a, b in zip(*seen, strict=True))
        if self.declared and len(self.declared) != len(inferred):
            raise SpecError(f"{self.name}: {len(self.declared)} domains declared for {len(inferred)} flattened inputs")
        return self.declared or inferred

    # ---- smaller, elsewhere, named

    def reduced(self) -> KernelSpec:
        """The same computation on smaller inputs (no tensor above about 64k elements), itself where none is found."""
        return self._reduced

    @cached_property
    def _reduced(self) -> KernelSpec:
        from qimeng.spec.reduce import reduce_origin

        origin = reduce_origin(self.origin, self.training)
        return self if origin is self.origin else replace(self, origin=origin)

    @cached_property
    def is_small(self) -> bool:
        """Whether a run on the CPU takes seconds at most."""
        from qimeng.spec.reduce import RUNNABLE, elements

        return elements(self.origin, self.training) <= RUNNABLE

    def check(self) -> None:
        """Run the computation once and refuse what cannot be optimized.

        It runs at reduced size; where that is still large, without values.

        Raises:
            SpecError: it fails on its own inputs, changes its inputs, or returns no tensor.
        """
        from qimeng.spec.check import check

        check(self)

    @cached_property
    def digest(self) -> str:
        """Hash of what is computed, on which shapes, in which dtype, mode and training state; not of the name."""
        parts = (self.origin.content, self.dtype, self.mode, self.training, self.declared, self.tolerances)
        return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, Any]:
        state = {n: getattr(self, n) for n in self.__dataclass_fields__}
        if "domains" in self.__dict__:  # inferring them again would cost every worker half a second
            state["domains"] = self.domains
        return state

    def to_bytes(self) -> bytes:
        """Itself as bytes, for another process; classes and functions of the user's own code travel by value."""
        from qimeng.spec.travel import pack

        return pack(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> KernelSpec:
        """The spec that `to_bytes` wrote."""
        from qimeng.spec.travel import unpack

        return unpack(data)
