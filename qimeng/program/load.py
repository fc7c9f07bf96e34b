"""Source text as a Python module.

Deals in files and modules. Knows nothing about what the text computes.
"""

from __future__ import annotations

import hashlib
from types import ModuleType


def load_source(source: str, name: str = "qimeng_program", folder: str | None = None) -> ModuleType:
    """Execute `source` as a module with a real file, which Triton needs to read its kernels' text.

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
    return module


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


__all__ = ["load_source"]
