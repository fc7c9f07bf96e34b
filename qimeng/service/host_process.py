"""The process that has a stranger's reference: it captures that, and judges candidates for it.

It is in a sandbox of its own from before the reference is loaded, for its whole life, and serves one reference. The
candidates run in processes that it starts, each in a sandbox in this one. Deals in one task of the library's usual
judge; knows nothing about HTTP, queues or who asks.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from qimeng.coder.llm.chat import ChatError
from qimeng.device_lock import DeviceLock, lock_path
from qimeng.envs.judge.device_memory import DeviceMemory
from qimeng.envs.sandbox import entered_here
from qimeng.envs.steps.setup import make_task
from qimeng.envs.workers.answering import failure_of, no_verdict
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.service import serve
from qimeng.errors import QimengError, SpecError
from qimeng.interfaces import Asked, Evaluation, FinalOptions, Gate
from qimeng.service.candidates import NoProgram, program_of
from qimeng.service.messages import Candidate, Options, Reference
from qimeng.spec import KernelSpec


def main(channel: Channel) -> None:
    """Answer the commands of `qimeng.service.hosting`."""
    _print_nothing()
    _stay_importable()
    opened = _Opened()
    serve(channel, {"ready": _ready, "open": opened.open, "judge": opened.judge})


class _Opened:
    """The reference of this process, once it is opened."""

    def open(self, reference: Reference, device: str) -> None:
        """Load, check and capture the reference, and make its judge.

        Raises:
            SpecError: it cannot be judged; the message says why.
        """
        spec = KernelSpec.from_source(reference.source, "reference", dtype=reference.dtype, mode=reference.mode)
        if reference.training is not None:
            spec = spec.with_(training=reference.training)
        task = make_task(spec, device=device or None, by_region=False)
        if task.start.fallback:
            raise SpecError(task.reason)
        self._spec, self._task = spec, task

    def judge(self, candidate: Candidate, options: Options, compile_seconds: float) -> Any:
        """The evaluation of a candidate, as data for JSON."""
        return _finite(json.loads(self._evaluation(candidate, options, compile_seconds).to_json()))

    def _evaluation(self, candidate: Candidate, options: Options, compile_seconds: float) -> Evaluation:
        try:
            program = program_of(candidate, self._task.start.graph, self._spec)
        except NoProgram as error:
            return Evaluation(Gate.WRITE, str(error), error.failure)
        except (ChatError, SyntaxError, ValueError, RecursionError) as error:
            return Evaluation(Gate.WRITE, str(error)[:2000], "coder")
        final = FinalOptions(options.compile_modes, compile_seconds)
        try:
            return replace(self._task, options=final).judged(program, asked=Asked(options.asked))
        except QimengError as error:  # the judge refuses the request; whatever else it raises is an answer already
            return no_verdict(str(error), failure_of(error))


def lock_files(channel: Channel) -> None:
    """In a process that no stranger's text reaches: make the files by which judges share this machine's GPU."""
    serve(channel, {"ready": _ready, "make": _make_lock_files})


def _make_lock_files() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    path = lock_path(torch.device("cuda", 0))
    DeviceLock(path).close()
    DeviceMemory(path).close()
    return [path, f"{path}.gate", f"{path}.memory", f"{path}.memory.gate", f"{path}.users"]


def _ready() -> dict[str, Any]:
    return {"pid": os.getpid(), "sandbox": list(entered_here().entered)}


def _finite(item: Any) -> Any:
    """`item` with the largest number in place of errors that are not finite, which JSON has no word for."""
    if isinstance(item, float) and not math.isfinite(item):
        return sys.float_info.max
    if isinstance(item, list):
        return [_finite(x) for x in item]
    return {key: _finite(value) for key, value in item.items()} if isinstance(item, dict) else item


def _print_nothing() -> None:
    """Drop what the reference prints: it would fill memory."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def _stay_importable() -> None:
    """Let processes that this one starts find this library, where the sandbox hides the folder that it lies in.

    A folder that may not be listed cannot be searched for packages; a link in this process's own folder can.
    """
    package = Path(__file__).resolve().parents[1]
    try:
        os.listdir(package.parent)
    except PermissionError:
        links = Path.cwd() / "packages"
        links.mkdir()
        (links / package.name).symlink_to(package, target_is_directory=True)
        sys.path.insert(0, str(links))


__all__ = ["lock_files", "main"]
