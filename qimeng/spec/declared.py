"""Weights and activations that a spec declares to be in fewer bits: what a form is, where forms are registered.

A declaration such as ``weights="int8"`` changes what is computed: each `torch.nn.Linear` multiplies by the values that
the stored form of its weight gives back; with ``activations="int8"`` its input is read in such a way too. Parameters
and state_dict stay as they are. Deals in modules. Knows nothing about any one form, nor about graphs or kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from qimeng.errors import SpecError
from qimeng.plugins import Installed

GROUP = "qimeng.weights"
"""Entry-point group through which other packages add forms."""

ALLOWED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that may be declared to be stored otherwise."""


class WeightForm(ABC):
    """One way to store the weight of a linear layer; a pure function of the weight.

    It computes in fp32 whatever the weight's dtype, so that the float64 reference multiplies by the same values.

    Attributes:
        text: the declaration, such as ``"int4:128"``.
    """

    text: str

    @abstractmethod
    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """What multiplies in place of `weight`, of its shape (rows are outputs), strides, dtype and device."""


class ActivationForm(ABC):
    """One way to read the input of a linear layer in fewer bits; a pure function of the input.

    It computes in fp32 whatever the input's dtype, so that the float64 reference multiplies by the same values where
    it has the same input.

    Attributes:
        text: the declaration, such as ``"int8"``.
    """

    text: str

    @abstractmethod
    def declared(self, x: torch.Tensor) -> torch.Tensor:
        """What multiplies in place of the input `x` [..., K], of its shape, dtype and device."""


Maker = Callable[[str], WeightForm]
"""Makes a form from what follows the colon of a declaration; empty without one. Raises `SpecError`."""

ActivationMaker = Callable[[str], ActivationForm]
"""The same for activations."""

_MAKERS: dict[str, Maker] = {}
_ACTIVATIONS: dict[str, ActivationMaker] = {}


def register_weights(word: str, make: Maker) -> None:
    """Add a form of stored weights.

    Args:
        word: the declaration up to its colon.
        make: makes the form.

    Raises:
        ValueError: the word is neither an identifier nor a number, or taken.
    """
    if not (word.isidentifier() or word.isdecimal()) or word in _MAKERS:
        raise ValueError(f"a form of weights needs an identifier of its own, not {word!r}")
    _MAKERS[word] = make


def unregister_weights(word: str) -> None:
    """Take a form away again (for tests and notebooks)."""
    _MAKERS.pop(word, None)


def register_activations(word: str, make: ActivationMaker) -> None:
    """Add a form of activations; the form of weights of the same word is declared beside it.

    Args:
        word: the declaration up to its colon.
        make: makes the form.

    Raises:
        ValueError: the word is no identifier, or taken.
    """
    if not word.isidentifier() or word in _ACTIVATIONS:
        raise ValueError(f"a form of activations needs an identifier of its own, not {word!r}")
    _ACTIVATIONS[word] = make


def unregister_activations(word: str) -> None:
    """Take a form away again (for tests and notebooks)."""
    _ACTIVATIONS.pop(word, None)


def weight_form(text: str) -> WeightForm:
    """The form that a declaration names.

    Raises:
        SpecError: there is none, or what follows the colon is wrong.
    """
    word, _, rest = str(text).partition(":")
    _installed.take()
    if word not in _MAKERS:
        known = ", ".join(f"{word}:…" if word.isdecimal() else word for word in sorted(_MAKERS))
        raise SpecError(f"weights={text!r}: no such form of weights; known: {known}")
    return _MAKERS[word](rest)


def activation_form(text: str, weights: str) -> ActivationForm:
    """The form that a declaration of activations names.

    Args:
        text: the declaration.
        weights: that of the weights beside it.

    Raises:
        SpecError: there is none, what follows the colon is wrong, or weights are declared otherwise: a product reads
            codes of one kind on both sides.
    """
    word, _, rest = str(text).partition(":")
    _installed.take()
    if word not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise SpecError(f"activations={text!r}: no such form of activations; known: {known}")
    if weights.partition(":")[0] != word:
        raise SpecError(f"activations={text!r} needs weights={word!r} beside it, not weights={weights!r}")
    return _ACTIVATIONS[word](rest)


class DeclaredLinear(torch.nn.Linear):
    """A linear layer whose weight is read through a form, and its input where one is declared for it.

    Where it runs for its values, what the form gives is kept until the weight changes: PyTorch's time is that of a
    plain linear layer on such weights. torch.compile is given the kept tensor as well. Where it is traced to a graph,
    the form's operators are part of the graph.
    """

    form: WeightForm
    activations: ActivationForm | None
    kept: torch.Tensor | None
    made_of: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As a linear layer."""
        if torch.compiler.is_dynamo_compiling() and self.kept is not None:
            weight = self.kept
        elif torch.compiler.is_compiling() or isinstance(self.weight, FakeTensor):
            weight = self.form.declared(self.weight)
        else:
            weight = self.known()
        return torch.nn.functional.linear(self.read(input), weight, self.bias)

    def read(self, input: torch.Tensor) -> torch.Tensor:
        """What multiplies in place of the input."""
        if self.activations is None:
            return input
        if torch.compiler.is_compiling() or isinstance(input, FakeTensor):
            return self.activations.declared(input)
        with _disable_current_modes():  # fp32 means fp32 in a float64 reference too
            return self.activations.declared(input)

    def known(self) -> torch.Tensor:
        """What the form gives for the present weight."""
        w = self.weight
        now = (w._version, w.data_ptr(), w.dtype, w.device)
        if self.kept is None or self.made_of != now:
            with _disable_current_modes(), torch.no_grad():  # fp32 means fp32 in a float64 reference too
                self.kept, self.made_of = self.form.declared(w.detach()), now
        return self.kept


def read_declared(module: torch.nn.Module) -> None:
    """Make what the forms of `module` give where that is not known, so that the next call takes no time for it."""
    for layer in module.modules():
        if isinstance(layer, DeclaredLinear):
            layer.known()


def declare(module: torch.nn.Module, form: WeightForm, activations: ActivationForm | None = None) -> None:
    """Have every plain `torch.nn.Linear` of `module` read its weight through `form`, in place.

    Args:
        module: the module.
        form: of the weights.
        activations: the form of the layers' inputs; None where they stay as they are.

    Raises:
        SpecError: there is none, or a weight is of a dtype that is not stored so.
    """
    layers = [m for m in module.modules() if type(m) is torch.nn.Linear]
    if not layers:
        raise SpecError(f"weights={form.text!r}: {type(module).__name__} has no torch.nn.Linear")
    for layer in layers:
        if layer.weight.dtype not in ALLOWED:
            raise SpecError(f"weights={form.text!r}: a weight of {layer.weight.dtype}; it must be fp32, fp16 or bf16")
        layer.__class__ = DeclaredLinear
        vars(layer).update(form=form, activations=activations, kept=None, made_of=None)


_installed = Installed(GROUP, "form of weights", lambda found: found())


__all__ = [
    "ALLOWED", "GROUP", "ActivationForm", "ActivationMaker", "DeclaredLinear", "Maker", "WeightForm",
    "activation_form", "declare", "read_declared", "register_activations", "register_weights",
    "unregister_activations", "unregister_weights", "weight_form",
]  # fmt: skip
