"""What a backend is: one language that kernels are written in, with what it can do declared.

Deals in implementations (text) and the results of compiling them. Knows nothing about how any language is compiled, or
about whether a kernel is right or fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from qimeng.backend.compiled import Compiled
from qimeng.backend.load import load_kernels
from qimeng.device import Device

if TYPE_CHECKING:
    from qimeng.graph.opgraph import Meta
    from qimeng.program.implementation import Implementation


@dataclass(frozen=True)
class Capabilities:
    """What a backend declares.

    Attributes:
        kinds: kinds of devices that it compiles for (`Device.kind`).
        interpreter: its kernels can be run on a CPU, so that they are checked without a GPU.
        cross_compiles: it compiles for a device that is not in this machine, with no driver.
        sanitizer: compute-sanitizer watches its kernels.
    """

    kinds: frozenset[str]
    interpreter: bool = False
    cross_compiles: bool = False
    sanitizer: bool = False


class Backend(ABC):
    """One language for kernels. Register a subclass by the entry-point group ``qimeng.backends``.

    Attributes:
        language: what an `Implementation` in it says (`Implementation.language`); an identifier.
        title: the language as people write it.
        capabilities: what it can do.
        header: Python text that every implementation finds above its own text, for its names.
        program_needs: what a standalone program with a kernel in this language needs beside torch and triton, as lines
            of its docstring.
        program_guard: text of a function ``_check_<language>(device)`` that a program calls before its first kernel,
            and that raises ValueError for a device that the language cannot reach; empty for none.
    """

    language: str
    title: str
    capabilities: Capabilities
    header: str = "import torch\n\n\n"
    program_needs: str = ""
    program_guard: str = ""

    @abstractmethod
    def compile(
        self, implementation: Implementation, inputs: Sequence[Meta | None], device: Device, folder: str | None = None
    ) -> Compiled:
        """Compile every kernel that `implementation` launches, in this process, which may be changed by it for good.

        Args:
            implementation: whose kernels.
            inputs: shape, strides and dtype of each input; None for a Python number.
            device: what to compile for.
            folder: where to write the text; a new temporary folder by default.

        Returns:
            The kernels with their registers, spilled bytes and shared memory, or the error with the line.
        """

    def load(self, source: str, folder: str | None = None) -> ModuleType:
        """`source`, text with its header, as a module."""
        return load_kernels(source, folder)

    @abstractmethod
    def kernel_names(self, source: str) -> list[str]:
        """Names of the kernels in the text of an implementation, each once, as a profiler shows them."""

    def missing(self) -> str | None:
        """What has to be installed before it can compile; None where nothing is missing."""
        return None

    def tools(self, device: Device) -> str:
        """Versions of what compiles for `device` here: where they are equal, so is what comes of it.

        A cluster compiles on machines without a GPU that have equal ones. Empty where they are not known: then it is
        compiled on the machine where it runs.
        """
        return ""

    def targets(self, device: Device) -> bool:
        """Whether it compiles for `device`."""
        return device.kind in self.capabilities.kinds

    def refusal(self, device: Device) -> str | None:
        """Why it does not compile for `device` on this machine; None where it does."""
        if not self.targets(device):
            kinds = ", ".join(sorted(self.capabilities.kinds))
            return (
                f"{self.title} is compiled for devices of the kind {kinds}; {device.name} is of the kind {device.kind}"
            )
        if not (device.measured or self.capabilities.cross_compiles):
            return f"{self.title} is compiled only where the device is, and {device.name} is not in this machine"
        return None

    def program_header(self) -> str:
        """Imports of a standalone program with a kernel in this language, beside torch."""
        return ""

    def program_runtime(self) -> str:
        """Functions that a standalone program with a kernel in this language needs."""
        return ""

    def warm_up(self, folder: str) -> None:  # noqa: B027  (nothing to do for most)
        """Do once, in the server that processes are forked from, what each of them would do again.

        Args:
            folder: readable by all of them.
        """

    def adopt(self, folder: str) -> None:  # noqa: B027
        """Take over, in a process that was forked, what `warm_up` left in `folder`."""


__all__ = ["Backend", "Capabilities"]
