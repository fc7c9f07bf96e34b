"""Weights that a spec declares to be stored in fewer bits: what a form is, where forms are registered.

A declaration such as ``weights="int8"`` changes what is computed: each `torch.nn.Linear` multiplies by the values that
the stored form of its weight gives back. Parameters and state_dict stay as they are. Deals in modules. Knows nothing
about any one form, nor about graphs or kernels.
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


Maker = Callable[[str], WeightForm]
"""Makes a form from what follows the colon of a declaration; empty without one. Raises `SpecError`."""

_MAKERS: dict[str, Maker] = {}


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


class DeclaredLinear(torch.nn.Linear):
    """A linear layer whose weight is read through a form.

    Where it runs for its values, what the form gives is kept until the weight changes: PyTorch's time is that of a
    plain linear layer on such weights. torch.compile is given the kept tensor as well. Where it is traced to a graph,
    the form's operators are part of the graph.
    """

    form: WeightForm
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
        return torch.nn.functional.linear(input, weight, self.bias)

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


def declare(module: torch.nn.Module, form: WeightForm) -> None:
    """Have every plain `torch.nn.Linear` of `module` read its weight through `form`, in place.

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
        vars(layer).update(form=form, kept=None, made_of=None)


_installed = Installed(GROUP, "form of weights", lambda found: found())


__all__ = [
    "ALLOWED",
    "GROUP",
    "DeclaredLinear",
    "Maker",
    "WeightForm",
    "declare",
    "read_declared",
    "register_weights",
    "unregister_weights",
    "weight_form",
]
