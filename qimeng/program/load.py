"""Source text as a Python module.

Deals in files and modules. Knows nothing about what the text computes.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
from types import ModuleType
from typing import Any

OWN = "_qimeng_"
"""How names of attributes begin that a program's model keeps between calls, and that copies of it do without."""


def load_source(source: str, name: str = "qimeng_program", folder: str | None = None) -> ModuleType:
    """Execute `source` as a module with a real file, which Triton needs to read its kernels' text.

    Its class `Model` can be copied and pickled: its text goes along.

    Args:
        source: Python text.
        name: module name.
        folder: where to write the file; by default a temporary folder that goes when this process ends.
    """
    import importlib.util
    import sys
    from pathlib import Path

    key = hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
    path = Path(folder or _temporary_folder()) / f"{name}_{key}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if isinstance(model := vars(module).get("Model"), type):
        copyreg.pickle(model, functools.partial(_reduced, source))
    return module


def _reduced(source: str, model: Any) -> tuple[Any, ...]:
    """What `copy` and `pickle` take: a new model from the text, and its state."""
    return _model_of, (source,), {key: value for key, value in vars(model).items() if not key.startswith(OWN)}


def _model_of(source: str) -> Any:
    return load_source(source).Model()


def _temporary_folder() -> str:
    """A folder that this process, but no fork of it, removes at its end."""
    import atexit
    import os
    import shutil
    import tempfile

    folder, owner = tempfile.mkdtemp(prefix="qimeng_"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


__all__ = ["OWN", "load_source"]
