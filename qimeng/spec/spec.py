"""`KernelSpec`: what to compute.

Deals in the one object that everything else starts from: it makes modules and inputs, in any dtype, on any device.
Knows nothing about graphs, kernels or how results are judged.
"""

from __future__ import annotations

import contextlib
import hashlib
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from qimeng.errors import SpecError
from qimeng.spec.attributes import as_buffers, has_tensors, stateful
from qimeng.spec.call import Call, arranged, with_keywords
from qimeng.spec.declared import activation_form, own_code, own_makers, take_makers, weight_form
from qimeng.spec.declared_linear import declare
from qimeng.spec.distributions import EXAMPLES, redistribute
from qimeng.spec.fake import fake_tensors
from qimeng.spec.kept import forget_fakes, make_state
from qimeng.spec.layers import flatten_parameters
from qimeng.spec.leaf import DOMAINS, Leaf, domain_of
from qimeng.spec.origin import ExampleOrigin, FunctionModule, Origin, SourceOrigin, cast, examples, in_mode, made_from
from qimeng.spec.together import TOGETHER, redistribute_together

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64,
}  # fmt: skip
"""Names of the dtypes that a computation may have, short ones too."""
FEW = 1 << 23
"""Elements of inputs up to which their values are looked at without making them smaller."""
MODES = ("default", "highest", "high")
"""As PyTorch ships (fp32 matmul, TF32 cuDNN convolutions); no TF32 anywhere; TF32 or better everywhere."""


@dataclass(frozen=True)
class Tolerances:
    """How far a result may be from the float64 reference, relative to what PyTorch eager reaches.

    Attributes:
        max_factor: times eager's maximum error.
        rms_factor: times eager's root-mean-square error, of an output of at least 256 elements.
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
        updated: names of buffers outside the state_dict that forward updates: where results are held against the
            module's, they are state like any other.
        accepts_any: whether the module is known to accept any values of its inputs' domains, so that none are tried
            beforehand on the CPU.
        weights: how the weights of linear layers may be stored, such as ``"int8"`` or ``"int4:64"``. That is part of
            the computation: its reference and PyTorch multiply by such weights too. Empty where they are as they are.
        activations: how the inputs of linear layers are read, such as ``"int8"``, beside weights of that form. Part of
            the computation too. Empty where they are as they are.
        deterministic: whether results must have the same bits in every call on the same inputs. Kernels that add in an
            order which changes from call to call are then refused.
    """

    name: str
    origin: Origin = field(repr=False)
    dtype: str = "float32"
    mode: str = "default"
    training: bool = True
    seed: int = 42
    declared: tuple[str, ...] = ()
    tolerances: Tolerances = Tolerances()
    accepts_any: bool = False
    updated: tuple[str, ...] = ()
    weights: str = ""
    activations: str = ""
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SpecError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        object.__setattr__(self, "dtype", str(DTYPES[self.dtype]).removeprefix("torch."))
        check_mode(self.mode)
        unknown = [d for d in self.declared if d not in DOMAINS]
        if unknown:
            raise SpecError(f"unknown input domain {unknown[0]!r}; known: {', '.join(DOMAINS)}")
        for name in ("weights", "activations"):  # None declares nothing, as an empty text does
            object.__setattr__(self, name, getattr(self, name) or "")
        if self.weights:
            object.__setattr__(self, "weights", weight_form(self.weights).text)
        if self.activations:
            object.__setattr__(self, "activations", activation_form(self.activations, self.weights).text)

    @property
    def declaration(self) -> str:
        """What is declared of weights and activations, in words; empty where nothing is.

        >>> KernelSpec.from_module(torch.nn.Linear(8, 8), (torch.ones(4, 8),), weights="int8").declaration
        'weights int8'
        """
        words = {"weights": self.weights, "activations": self.activations}
        return ", ".join(f"{name} {text}" for name, text in words.items() if text)

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
        if path.is_dir():
            raise SpecError(f"{path} is a folder; name a file in it")
        if not path.is_file():
            raise SpecError(f"no such file: {path}")
        try:
            with tokenize.open(path) as file:  # in the encoding that it declares, without a byte order mark
                text = file.read()
        except (OSError, UnicodeDecodeError, SyntaxError) as error:
            raise SpecError(f"cannot read {path} as Python: {error}") from error
        return cls.from_source(text, options.pop("name", path.stem), dtype=dtype, mode=mode, file=path.name, **options)

    @classmethod
    def from_source(
        cls,
        text: str,
        name: str = "source",
        *,
        dtype: str | None = None,
        mode: str | None = None,
        domains: tuple[str, ...] = (),
        file: str = "",
        **options: Any,
    ) -> KernelSpec:
        """The same from the text of such a file.

        Args:
            text: of the file.
            name: for people.
            dtype: floating dtype of inputs and parameters.
            mode: precision mode.
            domains: domain of each flattened input, where it is not to be inferred.
            file: its name, for messages that show a line.
            options: further fields of a spec.

        Raises:
            SpecError: the text does not load, or lacks one of the names.
        """
        origin = SourceOrigin(text, name, file)
        origin.load()
        options.setdefault("training", origin.training)
        return cls(name, origin, dtype or "float32", mode or "default", declared=tuple(domains), **options)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        example_inputs: tuple[Any, ...] | Mapping[str, Any] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        dtype: str | None = None,
        mode: str | None = None,
        domains: tuple[str, ...] = (),
        **options: Any,
    ) -> KernelSpec:
        """The computation of a live module on inputs like the examples (held by reference, its weights included).

        Args:
            module: the module; for a program (`Result.module`) the module that it was made from is taken.
            example_inputs: the positional ones, as a tuple; a dict stands for `kwargs`.
            kwargs: those that are given by keyword.
            name: for people; the class's by default.
            dtype: floating dtype of inputs and parameters; that of the parameters by default.
            mode: precision mode; ``"default"`` by default.
            domains: domain of each flattened input (positional ones first), where it is not to be inferred.
            options: further fields of a spec.
        """
        if not isinstance(module, torch.nn.Module):
            raise SpecError(f"from_module takes a torch.nn.Module, got {type(module).__name__}")
        if isinstance(example_inputs, Mapping):
            kwargs, example_inputs = {**example_inputs, **(kwargs or {})}, ()
        module = made_from(module)
        options.setdefault("training", module.training)
        name = name or type(module).__name__
        if kwargs:
            example_inputs, keywords = arranged(module, example_inputs, kwargs)
            module = with_keywords(module, keywords, len(example_inputs))
        origin = examples(module, example_inputs, shrinkable=isinstance(module, FunctionModule))
        native = str(origin.native).removeprefix("torch.")
        return cls(
            name,
            origin,
            dtype or native,
            mode or "default",
            declared=tuple(domains),
            **options,
        )

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], example_inputs: tuple[Any, ...] | Mapping[str, Any] = (), **options: Any
    ) -> KernelSpec:
        """The computation of a plain function on inputs like the examples; see `from_module` for the arguments."""
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
        options = {k: v for k, v in options.items() if v is not None and not (k == "kwargs" and not v)}
        if "kwargs" in options and isinstance(thing, (KernelSpec, str, Path)):
            raise SpecError("kwargs are for a module or a function; a file's inputs are those of its get_inputs()")
        if inputs is not None and isinstance(thing, (KernelSpec, str, Path)):
            raise SpecError("example inputs are for a module or a function; a file or a spec has its own")
        if isinstance(thing, KernelSpec):
            return thing.with_(**options) if options else thing
        if isinstance(thing, str) and "\n" in thing:
            return cls.from_source(thing, **options)
        if isinstance(thing, (str, Path)):
            return cls.from_file(thing, **options)
        if isinstance(thing, type) and issubclass(thing, torch.nn.Module):
            raise SpecError(f"{thing.__name__} is a class: give a module that it makes, {thing.__name__}(…)")
        if not callable(thing):
            raise SpecError(f"a spec is made from a file, a module or a function, not from {type(thing).__name__}")
        if inputs is None and not options.get("kwargs"):
            raise SpecError(f"example inputs are needed for {type(thing).__name__}: give them as a tuple, (x, y)")
        make = cls.from_module if isinstance(thing, torch.nn.Module) else cls.from_function
        return make(thing, () if inputs is None else inputs, **options)

    def with_(self, **changes: Any) -> KernelSpec:
        """A variant: ``spec.with_(dtype="bfloat16", mode="high")``."""
        if "domains" in changes:
            changes["declared"] = tuple(changes.pop("domains"))
        try:
            return replace(self, **changes)
        except TypeError as error:
            raise SpecError(f"a spec has no {', '.join(changes)}: {error}") from error

    # ---- what it makes

    def call(self, count: int) -> Call:
        """What a user may write in a call of the module, which has `count` positional inputs."""
        origin: Any = self.origin
        return Call.of(origin.held if isinstance(origin, ExampleOrigin) else origin.namespace.Model, count)

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
        if has_tensors(module):
            as_buffers(module, self.stateful)
        else:
            self.__dict__.setdefault("stateful", ())  # without another look
        make_state(module, self.updated)
        target, native = DTYPES[self.dtype], self.origin.native
        if target is not native:
            cast(module, target, only=native)
        if self.weights:
            inputs = activation_form(self.activations, self.weights) if self.activations else None
            declare(module, weight_form(self.weights), inputs)
        if dtype is not None:
            cast(module, dtype)
        flatten_parameters(module)
        return in_mode(module, self.training)

    @cached_property
    def stateful(self) -> tuple[str, ...]:
        """Names of the buffers that `module` makes of state that plain attributes carry from call to call."""
        found = stateful(
            lambda: in_mode(self.origin.module(self.seed, "cpu"), self.training),
            lambda: self.origin.examples(self.seed, "cpu"),
        )
        if isinstance(self.origin, ExampleOrigin):
            forget_fakes(self.origin.held)  # a hook of the user's may have kept some
        return found

    def inputs(
        self, seed: int, device: str = "cpu", distribution: str = "given", dtype: torch.dtype | None = None
    ) -> tuple[Any, ...]:
        """Positional inputs, the same for the same seed and device type, rounded to the spec's dtype.

        Args:
            seed: other seeds give other values.
            device: where they are made; nothing passes the host.
            distribution: one of `DISTRIBUTIONS`, which apply to floating inputs whose domain allows it, or `EXAMPLES`
                for the user's own values, whatever the seed: the example inputs, or what `get_inputs()` of a file
                returns under the spec's seed.
            dtype: cast all floating inputs to this afterwards.
        """
        if distribution == EXAMPLES:
            return self._valued(self.origin.examples(self.seed, device), dtype)
        origin = self._declared_origin
        if not isinstance(origin, ExampleOrigin):
            return self._valued(origin.inputs(seed, device), dtype, distribution, seed)
        ways = () if isinstance(torch.empty(0), FakeTensor) else self.ways
        return self._valued(origin.inputs(seed, device, ways), dtype, distribution, seed)

    def _valued(
        self, made: tuple[Any, ...], dtype: torch.dtype | None = None, distribution: str = "given", seed: int = 0
    ) -> tuple[Any, ...]:
        """`made` in the spec's dtype, its floating tensors in `distribution`."""
        leaves, tree = _pytree.tree_flatten(made)
        target, native = DTYPES[self.dtype], self.origin.native
        for i, x in enumerate(leaves):
            if not isinstance(x, torch.Tensor):
                continue
            if x.dtype is native and target is not native:
                x = x.to(target)
            if distribution != "given" and x.is_floating_point():
                number = self.origin.same[i] if isinstance(self.origin, ExampleOrigin) else i
                x = redistribute(x, self.domains[i], distribution, seed + number)
            leaves[i] = x
        if distribution in TOGETHER:
            same = self.origin.same if isinstance(self.origin, ExampleOrigin) else ()
            leaves = redistribute_together(leaves, self.domains, distribution, seed, same)
        if dtype is not None:
            leaves = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        return tuple(_pytree.tree_unflatten(leaves, tree))

    def redrawn(self, seed: int, ways: tuple[int, ...]) -> tuple[Any, ...]:
        """Inputs on the CPU, each redrawn in the given one of its ways (`qimeng.spec.valid`)."""
        origin = self._declared_origin
        assert isinstance(origin, ExampleOrigin)
        return self._valued(origin.inputs(seed, "cpu", ways))

    @cached_property
    def _declared_origin(self) -> Origin:
        """The origin, its inputs redrawn as the declared domains say."""
        origin = self.origin
        if not isinstance(origin, ExampleOrigin) or len(self.declared) != len(origin.leaves):
            return origin
        pairs = zip(origin.leaves, self.declared, strict=True)
        return replace(origin, leaves=tuple(x if x.domain == d else Leaf.of(x.value, d) for x, d in pairs))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What is known of each flattened example input; empty for a file."""
        origin = self._declared_origin
        return origin.leaves if isinstance(origin, ExampleOrigin) else ()

    @cached_property
    def ways(self) -> tuple[int, ...]:
        """For each flattened example input, the index of the way of `Leaf.ways` that the module accepts.

        One past the last if the input stays as given. Found by running the module, once.
        """
        from qimeng.spec.valid import choose_ways

        return (0,) * len(self.leaves) if self.accepts_any else choose_ways(self)

    @cached_property
    def never_changed(self) -> tuple[int, ...]:
        """Flattened example inputs that keep their given values in every trial although they are not constants."""
        from qimeng.spec.valid import never_changed

        return never_changed(self)

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Domain of each flattened input: declared, or inferred from the inputs of two seeds.

        Those are inputs at reduced size; of a long computation at their own, where they are few.
        """
        if isinstance(self.origin, ExampleOrigin):
            inferred = tuple(leaf.domain for leaf in self.origin.leaves)
        else:
            few = self.is_long and self._has_few_inputs
            small = self if few else self.reduced()
            with contextlib.nullcontext() if few or small.is_small else fake_tensors():
                seen = [[domain_of(x) for x in _pytree.tree_leaves(small.origin.inputs(n, "cpu"))] for n in (1, 2)]
            inferred = tuple(a if a == b else "real" for a, b in zip(*seen, strict=True))
        if self.declared and len(self.declared) != len(inferred):
            raise SpecError(f"{self.name}: {len(self.declared)} domains declared for {len(inferred)} flattened inputs")
        return self.declared or inferred

    @property
    def _has_few_inputs(self) -> bool:
        """Whether all values of the inputs are quickly looked at."""
        with fake_tensors():
            made = _pytree.tree_leaves(self.origin.inputs(1, "cpu"))
        return sum(x.numel() for x in made if isinstance(x, torch.Tensor)) <= FEW

    # ---- smaller, elsewhere, named

    def reduced(self) -> KernelSpec:
        """The same computation on smaller inputs (no tensor above about 64k elements), itself where none is found."""
        return self._reduced

    @cached_property
    def _reduced(self) -> KernelSpec:
        from qimeng.spec.reduce import reduce_origin

        origin, count = reduce_origin(self.origin, self.training)
        small = self if origin is self.origin else replace(self, origin=origin)
        if count is not None:
            small.__dict__["elements"] = count  # without another run
        return small

    def tried_on(self, device: str) -> KernelSpec:
        """The computation at the size at which it is tried on `device` before use.

        That is `reduced()`; on a GPU it is itself where a call is long, so that no smaller size has to be found.
        """
        return self if device == "cuda" and self.is_long else self.reduced()

    @cached_property
    def is_long(self) -> bool:
        """Whether a call runs many operators (`spec.reduce.LONG`)."""
        from qimeng.spec.reduce import is_long

        return is_long(self.origin, self.training)

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors of a run; where they are many, those of a part of it (`spec.reduce.elements`)."""
        from qimeng.spec.reduce import elements

        return elements(self.origin, self.training)

    @property
    def is_small(self) -> bool:
        """Whether a run on the CPU takes seconds at most."""
        from qimeng.spec.reduce import RUNNABLE

        return self.elements <= RUNNABLE

    def check(self, device: str = "cpu") -> None:
        """Run the computation once and refuse what cannot be optimized.

        It runs at reduced size; where that is still large, without values. A long computation that is for a GPU runs
        without values. Where the CPU lacks an operator, it runs on a GPU.

        Args:
            device: where it will run, ``"cpu"`` or ``"cuda"``.

        Raises:
            SpecError: it fails on its own inputs, or needs a GPU where there is none; it changes its inputs, or returns
                no tensor; autocast is on, or the default dtype is not float32.
        """
        from qimeng.spec.check import check

        check(self, device)

    @cached_property
    def digest(self) -> str:
        """Hash of what is computed, on which inputs, in which dtype, mode and training state; not of the name.

        The values of example inputs count, because a program is checked on them. The values of weights do not. Seed
        random examples, so that they are the same in the next run.
        """
        parts = [self.origin.content, self.dtype, self.mode, self.training, self.declared, self.tolerances]
        parts += [self.weights] if self.weights else []
        parts += [f"activations {self.activations}"] if self.activations else []
        parts += ["deterministic"] if self.deterministic else []
        return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=8).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, Any]:
        state = {n: getattr(self, n) for n in self.__dataclass_fields__}
        if self.leaves:
            state["ways"] = self.ways  # every process draws the same
        if "domains" in self.__dict__:  # inferring them again would cost every worker half a second
            state["domains"] = self.domains
        if "stateful" in self.__dict__:
            state["stateful"] = self.stateful
        if makers := own_makers(self.weights, self.activations):
            state["makers"] = makers  # what a user's own script registers, another process does not know
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_makers(state.pop("makers", {}))
        self.__dict__.update(state)

    def to_bytes(self) -> bytes:
        """Itself as bytes, for another process; classes and functions of the user's own code travel by value."""
        from qimeng.spec.travel import pack

        return pack(self, own_code(self.weights, self.activations))

    @classmethod
    def from_bytes(cls, data: bytes) -> KernelSpec:
        """The spec that `to_bytes` wrote."""
        from qimeng.spec.travel import unpack

        spec: KernelSpec = unpack(data)
        return spec


def check_mode(mode: str | None) -> None:
    """Refuse what is no precision mode; None stands for a spec's own.

    Raises:
        SpecError: the message lists the modes.
    """
    if mode is not None and mode not in MODES:
        raise SpecError(f"unknown precision mode {mode!r}; known: {', '.join(MODES)}")


__all__ = ["DTYPES", "MODES", "KernelSpec", "Tolerances", "check_mode"]
