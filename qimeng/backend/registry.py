"""The registered backends: those of this package, and those of installed packages.

Deals in names, and in faults of other packages' backends. Knows nothing about what a backend does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from qimeng.backend.base import Backend, Capabilities
from qimeng.backend.compiled import Compiled
from qimeng.backend.load import HEADER
from qimeng.errors import BackendError
from qimeng.plugins import Installed, Problem, anything, guard, returns, where
from qimeng.program.implementation import Implementation

GROUP = "qimeng.backends"
"""Entry points of this group name a `Backend`, a class of one, or a function without arguments that makes one."""

_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> Backend:
    """Add a backend. From now on its calls raise nothing but `BackendError`, which names it.

    Raises:
        ValueError: it is no `Backend`, lacks its title or capabilities, or its language is no identifier, means
            PyTorch, or has a backend already.
    """
    if not isinstance(backend, Backend):
        raise ValueError(f"a backend must extend qimeng.backend.base.Backend, {type(backend).__qualname__} does not")
    language = getattr(backend, "language", None)
    if not isinstance(language, str) or not language.isidentifier():
        raise ValueError(f"a backend's language must be an identifier, {type(backend).__qualname__} has {language!r}")
    if language in ("torch", "library"):
        raise ValueError(f"the language {language!r} means calls of PyTorch, which need no backend")
    if language in _BACKENDS:
        known = type(_BACKENDS[language]).__module__
        raise ValueError(f"the language {language!r} has a backend already ({known})")
    title, capabilities = getattr(backend, "title", None), getattr(backend, "capabilities", None)
    if not isinstance(title, str) or not isinstance(capabilities, Capabilities):
        raise ValueError(f"the backend for {language!r} needs a title, a text, and capabilities, a Capabilities")
    _BACKENDS[language] = _guarded(backend)
    return backend


def _guarded(backend: Backend) -> Backend:
    """`backend`, its calls replaced by ones that raise nothing but `BackendError`, and return what they should."""
    text = returns(str)
    calls: dict[str, Problem] = {
        "compile": returns(Compiled),
        "load": returns(ModuleType),
        "kernel_names": _names,
        "missing": lambda found: "" if found is None else text(found),
        "tools": text,
        "targets": returns(bool),
        "refusal": lambda found: "" if found is None else text(found),
        "program_header": text,
        "program_runtime": text,
        "warm_up": anything,
        "adopt": anything,
    }

    def fault(said: str) -> BackendError:
        return BackendError(f"the backend for {backend.language!r} ({where(backend)}) is at fault: {said}")

    for name, problem in calls.items():
        guard(backend, name, problem, fault, BackendError)
    return backend


def _names(found: Any) -> str:
    listed = isinstance(found, (tuple, list)) and all(isinstance(name, str) for name in found)
    return "" if listed else f"returned {found!r}, not a list of names"


def unregister_backend(language: str) -> None:
    """Take a backend out again (for tests and notebooks)."""
    _BACKENDS.pop(language, None)


def backends() -> dict[str, Backend]:
    """Every backend by language; those of installed packages (entry points) are loaded at the first call.

    Raises:
        QimengError: an installed package's backend cannot be loaded or registered; the message names the package.
    """
    from qimeng.backend.cuda import CudaCpp
    from qimeng.backend.triton import Triton

    for own in (Triton(), CudaCpp()):
        _BACKENDS.setdefault(own.language, own)
    _installed.take()
    return dict(_BACKENDS)


def backend_named(language: str) -> Backend:
    """The backend for `language`.

    Raises:
        BackendError: there is none; the message lists the languages.
    """
    found = backends().get(language)
    if found is None:
        raise BackendError(f"no backend for the language {language!r}; known: {', '.join(sorted(backends()))}")
    return found


def implementation_source(implementation: Implementation) -> str:
    """The text of one implementation as a file of its own, below the header of its language."""
    header = backend_named(implementation.language).header if implementation.generated else HEADER
    return header + implementation.source


def _take(found: Any) -> None:
    register_backend(found if isinstance(found, Backend) else found())


_installed = Installed(GROUP, "backend", _take)


__all__ = [
    "GROUP",
    "backend_named",
    "backends",
    "implementation_source",
    "register_backend",
    "unregister_backend",
]
