"""Removes, reads and writes folders that untrusted code has filled.

Deals in names and open folders; nothing is followed out of a folder. Folders may be nested deeper than paths or the
stack allow, and names may hold any bytes. Neither may stop the removal. Knows nothing about the content.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
MOST_FILES = 4096
"""Files that are read of one folder."""


def remove_folder(folder: str | Path) -> None:
    """Remove `folder` with all that is in it, as far as that can be done; nothing is followed out of it.

    A folder in it is moved up beside the others before it is emptied, so that none is ever deeper than two.
    """
    try:
        top = os.open(folder, _FOLDER)
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
                inner = os.open(name, _FOLDER, dir_fd=top)
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


def read_folder(folder: str | Path, most_bytes: int) -> dict[str, bytes]:
    """The files in the folders of `folder`, ``inner/name`` to content; links and all that is no file are left out.

    Args:
        folder: whose folders are read; files beside them are not.
        most_bytes: of all files.

    Raises:
        OSError: there is no such folder, or the files are too many or too large.
    """
    found: dict[str, bytes] = {}
    top = os.open(folder, _FOLDER)
    try:
        for inner in sorted(os.listdir(top)):
            try:
                opened = os.open(inner, _FOLDER, dir_fd=top)
            except OSError:  # a file, or a link
                continue
            try:
                for name in sorted(os.listdir(opened)):
                    data = _content(name, opened, most_bytes)
                    if data is not None:
                        found[f"{inner}/{name}"] = data
                        most_bytes -= len(data)
                    if len(found) > MOST_FILES:
                        raise OSError(f"more than {MOST_FILES} files in {folder}")
            finally:
                os.close(opened)
    finally:
        os.close(top)
    return found


def write_folder(folder: str | Path, files: Mapping[str, bytes]) -> None:
    """Write files as `read_folder` gives them into `folder`, each whole or not at all.

    Args:
        folder: in a folder of our own; it is made where it is not there, and others may have filled it.
        files: ``inner/name`` to content; the caller has checked that both are plain names.

    Raises:
        OSError: something else is in the way, such as a link.
    """
    os.makedirs(folder, exist_ok=True)
    top = os.open(folder, _FOLDER)
    try:
        for path, data in files.items():
            inner, _, name = path.partition("/")
            with suppress(FileExistsError):
                os.mkdir(inner, 0o700, dir_fd=top)
            opened = os.open(inner, _FOLDER, dir_fd=top)
            try:
                draft = f"tmp.{secrets.token_hex(8)}"
                handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700, dir_fd=opened)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.rename(draft, name, src_dir_fd=opened, dst_dir_fd=opened)
            finally:
                os.close(opened)
    finally:
        os.close(top)


def _content(name: str, folder: int, most_bytes: int) -> bytes | None:
    """Content of a file in an open folder; None where it is a link, or has another name elsewhere, or is no file."""
    try:
        handle = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
            return None
        if facts.st_size > most_bytes:
            raise OSError(f"{name} has {facts.st_size} bytes, {most_bytes} are left")
        return file.read(most_bytes)


__all__ = ["read_folder", "remove_folder", "write_folder"]
