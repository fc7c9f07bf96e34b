"""What came of compiling one implementation.

Deals in plain data that passes between processes. Knows nothing about languages or compilers.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.backend.facts import KernelFacts


@dataclass(frozen=True)
class Compiled:
    """What came of compiling one implementation.

    Attributes:
        kernels: the compiled kernels in the order of their launches, up to the first failure.
        error: why not all of them were; None where they were.
        failure: class of that: ``"compile"`` (the text does not load, or the compiler refuses a kernel), ``"error"``
            (the Python code around the kernels raised), ``"meta"`` (that code needs a tensor's values or a real GPU),
            ``"setup"`` (the compiler is not installed here), or what became of the process (``"timeout"``, ``"crash"``,
            ``"memory"`` …).
        kernel: the kernel that the compiler refuses.
        line: line within that kernel's text; None where unknown.
        seconds: wall seconds it took.
    """

    kernels: tuple[KernelFacts, ...] = ()
    error: str | None = None
    failure: str | None = None
    kernel: str = ""
    line: int | None = None
    seconds: float = 0.0

    @property
    def host(self) -> bool:
        """True where the code around the kernels stopped: in a real launch, with real tensors, it may not."""
        return self.failure in ("error", "meta")


__all__ = ["Compiled"]
