"""The registered backends: those of this package, and those of installed packages.

Deals in names. Knows nothing about what a backend does.
"""

from __future__ import annotations

from typing import Any

from qimeng.backend.base import Backend
from qimeng.errors import QimengError
from qimeng.plugins import Installed

GROUP = "qimeng.backends"
"""Entry points of this group name a `Backend`, a class of one, or a function without arguments that makes one."""

_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> Backend:
    """Add a backend.

    Raises:
        ValueError: its language is no identifier, means PyTorch, or has a backend already.
    """
    language = getattr(backend, "language", None)
    if not isinstance(language, str) or not language.isidentifier():
        raise ValueError(f"a backend's language must be an identifier, {type(backend).__qualname__} has {language!r}")
    if language in ("torch", "library"):
        raise ValueError(f"the language {language!r} means calls of PyTorch, which need no backend")
    if language in _BACKENDS:
        known = type(_BACKENDS[language]).__module__
        raise ValueError(f"the language {language!r} has a backend already ({known})")
    _BACKENDS[language] = backend
    return backend


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
        QimengError: there is none; the message lists the languages.
    """
    found = backends().get(language)
    if found is None:
        raise QimengError(f"no backend for the language {language!r}; known: {', '.join(sorted(backends()))}")
    return found


def _take(found: Any) -> None:
    register_backend(found if isinstance(found, Backend) else found())


_installed = Installed(GROUP, "backend", _take)


__all__ = ["GROUP", "backend_named", "backends", "register_backend", "unregister_backend"]
