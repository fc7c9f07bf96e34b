"""Linear layers whose weights, and inputs, are read through declared forms.

A declaration such as ``weights="int8"`` changes what is computed: each `torch.nn.Linear` multiplies by the values that
the stored form of its weight gives back; with ``activations="int8"`` its input is read in such a way too. Parameters
and state_dict stay as they are. Deals in modules. Knows nothing about any one form, nor about graphs or kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from qimeng.errors import SpecError
from qimeng.plugins import where
from qimeng.spec.declared import ActivationForm, WeightForm

ALLOWED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that may be declared to be stored otherwise."""


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
            weight = _like(self.weight, self.form.declared(self.weight), self.form)
        else:
            weight = self.known()
        return torch.nn.functional.linear(self.read(input), weight, self.bias)

    def read(self, input: torch.Tensor) -> torch.Tensor:
        """What multiplies in place of the input."""
        if self.activations is None:
            return input
        if torch.compiler.is_compiling() or isinstance(input, FakeTensor):
            return _like(input, self.activations.declared(input), self.activations)
        with _disable_current_modes():  # fp32 means fp32 in a float64 reference too
            return _like(input, self.activations.declared(input), self.activations)

    def known(self) -> torch.Tensor:
        """What the form gives for the present weight."""
        w = self.weight
        now = (w._version, w.data_ptr(), w.dtype, w.device)
        if self.kept is None or self.made_of != now:
            with _disable_current_modes(), torch.no_grad():  # fp32 means fp32 in a float64 reference too
                self.kept, self.made_of = _like(w, self.form.declared(w.detach()), self.form), now
        return self.kept


def _like(given: torch.Tensor, found: Any, form: WeightForm | ActivationForm) -> torch.Tensor:
    """`found`, what `form` gave for `given`, once it has its shape and dtype.

    Raises:
        SpecError: it has not.
    """
    if isinstance(found, torch.Tensor) and found.shape == given.shape and found.dtype == given.dtype:
        return found
    got = _in_words(found) if isinstance(found, torch.Tensor) else type(found).__name__
    raise SpecError(
        f"the form {form.text!r} ({where(form)}) is at fault: its declared returned {got} for {_in_words(given)}; "
        "return a tensor of the same shape and dtype"
    )


def _in_words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


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
        SpecError: there is none, or a weight is of a dtype or has values that are not stored so.
    """
    layers = {name: m for name, m in module.named_modules() if type(m) is torch.nn.Linear}
    if not layers:
        raise SpecError(f"weights={form.text!r}: {type(module).__name__} has no torch.nn.Linear")
    for name, layer in layers.items():
        if layer.weight.dtype not in ALLOWED:
            raise SpecError(f"weights={form.text!r}: a weight of {layer.weight.dtype}; it must be fp32, fp16 or bf16")
        if not (isinstance(layer.weight, FakeTensor) or layer.weight.is_meta or layer.weight.isfinite().all()):
            key = f"{name}.weight".removeprefix(".")
            raise SpecError(
                f"weights={form.text!r}: {key} holds NaN or infinity; declared weights must be finite: give such, "
                "or leave the declaration out"
            )
        layer.__class__ = DeclaredLinear
        vars(layer).update(form=form, activations=activations, kept=None, made_of=None)


__all__ = ["ALLOWED", "DeclaredLinear", "declare", "read_declared"]
