"""Running an implementation's Python code with tensors that have no data, so that launches can be compiled.

Deals in the order of things and in the classes of failure. Knows nothing about languages: a recorder turns each launch
into a compilation and keeps the result.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.errors import in_words
from qimeng.graph.opgraph import Meta

if TYPE_CHECKING:
    from qimeng.program.implementation import Implementation


@dataclass(frozen=True)
class CompileFailure:
    """Why a compiler refuses a kernel.

    Attributes:
        kernel: its name.
        message: in words, with the line.
        line: in the kernel's text; None where unknown.
        failure: class of the failure, as in `Compiled`.
    """

    kernel: str
    message: str
    line: int | None
    failure: str = "compile"


class Recorder(ABC):
    """Stands between an implementation's launches and the GPU.

    Attributes:
        prepares: whether buffers are being prepared.
    """

    prepares: bool = False

    @abstractmethod
    def refused(self, error: Exception) -> CompileFailure | None:
        """What the compiler said, where `error` comes from it; None where the code around the kernels raised it."""

    @abstractmethod
    def facts(self) -> tuple[KernelFacts, ...]:
        """What was launched, in order."""


def dry_run(
    implementation: Implementation,
    inputs: Sequence[Meta | None],
    recorder: Recorder,
    load: Callable[[], ModuleType],
) -> Compiled:
    """Load `implementation` and call it once on tensors without data.

    Args:
        implementation: what is called.
        inputs: shape, strides and dtype of each input; None for a Python number.
        recorder: meets the launches.
        load: gives the implementation's module.
    """
    began = time.perf_counter()
    found = Compiled()
    try:
        module = load()
        entry = getattr(module, implementation.entry)
    except Exception as error:  # noqa: BLE001  the text may raise anything
        return Compiled(error=f"the source does not load: {short(error)}", failure="compile")
    try:
        arguments = [0.5 if x is None else _without_data(x) for x in inputs]
        with torch.no_grad():
            buffers: Sequence[Any] = ()
            if implementation.prepare:
                recorder.prepares = True
                chosen = [arguments[i] for i in implementation.prepare_inputs]
                buffers = getattr(module, implementation.prepare)(*chosen)
                recorder.prepares = False
            entry(*arguments, *buffers)
    except Exception as error:  # noqa: BLE001  so may the code around the kernels
        refusal = recorder.refused(error)
        if refusal is not None:
            found = Compiled(error=refusal.message, failure=refusal.failure, kernel=refusal.kernel, line=refusal.line)
        else:
            found = Compiled(error=short(error), failure="meta" if _needs_values(error) else "error")
    return replace(found, kernels=recorder.facts(), seconds=time.perf_counter() - began)


def short(error: Exception) -> str:
    """The error in words, with the line of the candidate's text that it is about."""
    if isinstance(error, SyntaxError) and error.text:
        return f"{type(error).__name__}: {error.msg}: {error.text.strip()[:200]}"
    return in_words(error, 2000)


def _without_data(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device="meta")


_NEEDS_VALUES = ("meta tensor", "Meta tensor", "meta device", "not compiled with CUDA", "No CUDA GPUs", "NVIDIA driver")


def _needs_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NEEDS_VALUES)


__all__ = ["CompileFailure", "Recorder", "dry_run", "short"]
