"""The loop in a worker that answers the judge's commands, and the classes of its failures.

Deals in commands (a name and arguments), answers (JSON, open files) and exceptions. Knows nothing about what the
commands do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qimeng.envs.workers.channel import Channel, Closed, pack_reply, unpack
from qimeng.errors import in_words

_ILLEGAL = (
    "illegal memory access",
    "misaligned address",
    "device-side assert",
    "illegal instruction",
    "unspecified launch failure",
)
_MEMORY = ("out of memory", "can't allocate memory")


@dataclass(frozen=True)
class Answer:
    """An answer with open files beside its data; they are closed once sent."""

    data: Any
    files: tuple[int, ...] = ()


class Refused(Exception):
    """A refused command: the class of the failure and why, in words."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def serve(channel: Channel, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer commands until the judge goes.

    Each command has a number that its answer repeats, so an answer prepared in advance is not accepted. An exception
    becomes an answer with its class (see `classify`). The loop continues, because the judge decides whether the process
    is still usable.
    """
    while True:
        try:
            body, files = channel.receive()
        except Closed:
            return
        for fd in files:
            os.close(fd)
        name, arguments, number = unpack(body)
        try:
            result = commands[name](**arguments)
        except BaseException as error:  # noqa: BLE001  a candidate may raise anything, SystemExit included
            result = Answer({"failed": classify(error), "error": explain(error)})
        else:
            if isinstance(result, Answer):
                result = Answer({"ok": result.data}, result.files)
            else:
                result = Answer({"ok": result})
        try:
            channel.send(pack_reply({**result.data, "to": number}), result.files)
        except Closed:
            return
        finally:
            for fd in result.files:
                os.close(fd)


def classify(error: BaseException) -> str:
    """The class of a failure: ``"exit"``, ``"memory"``, ``"illegal-access"``, ``"error"``, or a `Refused`'s own.

    >>> classify(SystemExit(0)), classify(MemoryError()), classify(ValueError("no"))
    ('exit', 'memory', 'error')
    """
    import torch

    text = str(error)
    if isinstance(error, Refused):
        return error.kind
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in _MEMORY):
        return "memory"
    if any(words in text for words in _ILLEGAL):
        return "illegal-access"
    return "error"


def explain(error: BaseException, limit: int = 1500) -> str:
    """The error in words, with the line of foreign code that raised it.

    >>> explain(ValueError("no"))
    'ValueError: no'
    """
    if isinstance(error, Refused):
        return str(error)[:limit]
    return in_words(error, limit)


__all__ = ["Answer", "Refused", "classify", "explain", "serve"]
