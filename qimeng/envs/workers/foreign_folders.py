"""Removes folders that untrusted code has filled.

Deals in names and open folders. Folders may be nested deeper than paths or the stack allow, and names may hold any
bytes. Neither may stop the removal. Knows nothing about the content.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def remove_folder(folder: str | Path) -> None:
    """Remove `folder` with all that is in it, as far as that can be done; nothing is followed out of it.

    A folder in it is moved up beside the others before it is emptied, so that none is ever deeper than two.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        top = os.open(folder, flags)
    except OSError:  # it is not there, or is no folder
        return
    try:
        number, mark = 0, secrets.token_hex(8)  # a name that nobody in there has thought of
        waiting = _empty(top)
        while waiting:
            name = waiting.pop()
            try:
                with suppress(OSError):
                    os.chmod(name, 0o700, dir_fd=top)
                inner = os.open(name, flags, dir_fd=top)
            except OSError:  # it has gone meanwhile, or is not ours
                continue
            try:
                for below in _empty(inner):
                    number += 1
                    up = f"{mark}.{number}"
                    with suppress(OSError):
                        os.rename(below, up, src_dir_fd=inner, dst_dir_fd=top)
                        waiting.append(up)
            finally:
                os.close(inner)
            with suppress(OSError):
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with suppress(OSError):
        os.rmdir(folder)


def _empty(folder: int) -> list[bytes | str]:
    """Remove what is no folder in an open folder; the names of the folders in it."""
    folders: list[bytes | str] = []
    with os.scandir(folder) as entries:
        found = [(os.fsencode(e.name), e.is_dir(follow_symlinks=False)) for e in entries]
    for name, is_folder in found:
        if is_folder:
            folders.append(name)
        else:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
    return folders


__all__ = ["remove_folder"]
