"""Weights and activations that a spec declares to be in fewer bits: what a form is, where forms are registered.

Deals in words, in functions that make forms, and in how other processes come by those of a user's own script. Knows
nothing about any one form, nor about modules (`qimeng.spec.declared_linear`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from qimeng.errors import SpecError
from qimeng.plugins import Installed, is_shared

GROUP = "qimeng.weights"
"""Entry-point group through which other packages add forms."""


class WeightForm(ABC):
    """One way to store the weight of a linear layer; a pure function of the weight.

    It computes in fp32 whatever the weight's dtype, so that the float64 reference multiplies by the same values.

    Attributes:
        text: the declaration, such as ``"int4:128"``.
        prunes: whether it sets weights to zero that kernels skip, also where they would meet an infinity.
    """

    text: str
    prunes: ClassVar[bool] = False

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

Form = TypeVar("Form", WeightForm, ActivationForm)

Makers = dict[str, dict[str, Callable[[str], Any]]]
"""What makes forms, by ``"weights"`` or ``"activations"`` and by word."""

_MAKERS: dict[str, Maker] = {}
_EXAMPLES: dict[str, str] = {}
_ACTIVATIONS: dict[str, ActivationMaker] = {}
_FOUND_ANYWHERE: set[tuple[str, str]] = set()
"""Kinds and words of the forms that every process finds: those of the library and of installed packages."""


def register_weights(word: str, make: Maker, example: str = "") -> None:
    """Add a form of stored weights.

    Args:
        word: the declaration up to its colon.
        make: makes the form.
        example: a declaration as users write it, for messages; the word alone by default.

    Raises:
        ValueError: the word is neither an identifier nor a number, or taken; what makes the form is no function.
    """
    if not (word.isidentifier() or word.isdecimal()) or word in _MAKERS:
        raise ValueError(f"a form of weights needs an identifier of its own, not {word!r}")
    _MAKERS[word], _EXAMPLES[word] = _function("weights", word, make), example or word


def unregister_weights(word: str) -> None:
    """Take a form away again (for tests and notebooks)."""
    _MAKERS.pop(word, None)
    _EXAMPLES.pop(word, None)
    _FOUND_ANYWHERE.discard(("weights", word))


def register_activations(word: str, make: ActivationMaker) -> None:
    """Add a form of activations; the form of weights of the same word is declared beside it.

    Args:
        word: the declaration up to its colon.
        make: makes the form.

    Raises:
        ValueError: the word is no identifier, or taken; what makes the form is no function.
    """
    if not word.isidentifier() or word in _ACTIVATIONS:
        raise ValueError(f"a form of activations needs an identifier of its own, not {word!r}")
    _ACTIVATIONS[word] = _function("activations", word, make)


def weight_form(text: str) -> WeightForm:
    """The form that a declaration names.

    Raises:
        SpecError: there is none, or what follows the colon is wrong.
    """
    word, _, rest = str(text).partition(":")
    _take_installed()
    if word not in _MAKERS:
        known = ", ".join(_EXAMPLES.get(word, word) for word in sorted(_MAKERS))
        raise SpecError(f"weights={text!r}: no such form of weights; known: {known}")
    return _made("weights", word, rest, _MAKERS[word], WeightForm)


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
    _take_installed()
    if word not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise SpecError(f"activations={text!r}: no such form of activations; known: {known}")
    if weights.partition(":")[0] != word:
        raise SpecError(f"activations={text!r} needs weights={word!r} beside it, not weights={weights!r}")
    return _made("activations", word, rest, _ACTIVATIONS[word], ActivationForm)


def _function(noun: str, word: str, make: Any) -> Any:
    if not callable(make):
        raise ValueError(f"the form {word!r} of {noun} needs a function that makes it from a text, not {make!r}")
    return make


def _made(noun: str, word: str, rest: str, make: Callable[[str], Form], kind: type) -> Form:
    """The form that `make` makes, once it is one.

    Raises:
        SpecError: the declaration is wrong, or the form is at fault.
    """
    try:
        form = make(rest)
    except SpecError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise SpecError(
            f"the form {word!r} of {noun} is at fault: making it raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(form, kind):
        made = f"the class {form.__qualname__}" if isinstance(form, type) else type(form).__name__
        raise SpecError(
            f"the form {word!r} of {noun} is at fault: it is made as {made}, not an object of {kind.__name__}"
        )
    text = getattr(form, "text", None)
    if not isinstance(text, str) or text.partition(":")[0] != word:
        raise SpecError(f"the form {word!r} of {noun} is at fault: its text is {text!r}; it must begin with its word")
    return form


def own_makers(weights: str, activations: str) -> Makers:
    """What makes the declared forms, where no other process would find it by itself.

    That is what a user's own script registers. Forms of the library and of installed packages are left out.
    """
    found: Makers = {}
    for noun, text, makers in (("weights", weights, _MAKERS), ("activations", activations, _ACTIVATIONS)):
        word = text.partition(":")[0]
        if word in makers and (noun, word) not in _FOUND_ANYWHERE:
            found[noun] = {word: makers[word]}
    return found


def own_code(weights: str, activations: str) -> list[Any]:
    """The functions of `own_makers` and the classes of the forms that they make."""
    found: list[Any] = []
    for noun, makers in own_makers(weights, activations).items():
        form = weight_form(weights) if noun == "weights" else activation_form(activations, weights)
        found += [*makers.values(), *type(form).__mro__]
    return found


def take_makers(found: Makers) -> None:
    """Register in this process what `own_makers` gave in another; what is known here stays."""
    _take_installed()
    for noun, makers in (("weights", _MAKERS), ("activations", _ACTIVATIONS)):
        for word, make in found.get(noun, {}).items():
            makers.setdefault(word, make)


def _take_installed() -> None:
    """Have the library and installed packages register their forms; every process finds those that it can import."""
    before = _words()
    _installed.take()
    for noun, word in _words() - before:
        make = _MAKERS[word] if noun == "weights" else _ACTIVATIONS[word]
        if is_shared(sys.modules[make.__module__]):
            _FOUND_ANYWHERE.add((noun, word))


def _words() -> set[tuple[str, str]]:
    return {("weights", word) for word in _MAKERS} | {("activations", word) for word in _ACTIVATIONS}


_installed = Installed(GROUP, "form of weights", lambda found: found())


__all__ = [
    "GROUP", "ActivationForm", "ActivationMaker", "Maker", "Makers", "WeightForm",
    "activation_form", "own_code", "own_makers", "register_activations", "register_weights", "take_makers",
    "unregister_weights", "weight_form",
]  # fmt: skip
