"""Regions that TorchInductor compiles at their first call: compiled ahead, beside what the judge does meanwhile.

Deals in one process for each implementation, and in the file that it leaves
(`qimeng.envs.judge.library_compile_process`). Only texts that the library itself prints are compiled here. Every worker
that runs such a text takes the file over, so that it is compiled once for the search and the final verification. Where
that fails, a worker compiles by itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qimeng.envs.judge.torch_compile import CACHE, compile_server
from qimeng.envs.workers.compile import job_of
from qimeng.envs.workers.forkserver import START_S, Process, WorkerFailed
from qimeng.graph.ops import LAYERS
from qimeng.graph.region import Region
from qimeng.library import call_of, compiles
from qimeng.library.base import heavy
from qimeng.library.inductor import Inductor
from qimeng.program.program import Implementation, Program

LEAST = 8
"""Operators of a region from which on it is compiled here. A worker compiles less by itself, once for each process, and
holds the device meanwhile: others that wait to measure wait for it. A process of its own takes seconds to start."""
FILE = "torchinductor"
"""Name of the file, in a folder named by the implementation's digest."""


class LibraryCompilers:
    """Compiles what TorchInductor compiles, each implementation once.

    TorchInductor's own cache lies beside the files: a worker looks there for the configuration that was chosen for each
    kernel, and compiles all anew where it may not read it.

    Args:
        mode: of precision.
        device: PyTorch's name of the device.
        folder: where the files are kept; made, for workers to read.
        threads: compiler processes for one implementation.
        lock: path of the device's lock; empty without one.
    """

    def __init__(self, mode: str, device: str, folder: Path, threads: int, lock: str):
        self._mode, self._device, self.folder, self._threads, self._lock = mode, device, folder, threads, lock
        folder.mkdir(parents=True)
        self._running: dict[str, threading.Thread] = {}
        self._began: dict[str, float] = {}
        self._processes: list[Process] = []
        self._made: set[str] = set()
        self._closed = False

    def begin(self, programs: Iterable[Program]) -> None:
        """Compile in the background what calls of `programs` would compile."""
        for program in programs:
            for digest, (region, implementation, call) in _compiled(program).items():
                if digest not in self._running and not self._closed:
                    asked = {
                        "job": job_of(region, implementation),
                        "parameters": parameters_of(region),
                        "options": call.options,
                        "threads": self._threads,
                        "lock": self._lock,
                        "path": str(self.folder / digest / FILE),
                    }
                    thread = threading.Thread(target=self._compile, args=(digest, asked), daemon=True)
                    self._running[digest], self._began[digest] = thread, time.monotonic()
                    thread.start()

    def wait(self, program: Program, seconds: float) -> bool:
        """Whether what calls of `program` would compile was compiled, or has failed, within `seconds` from now.

        What was not is compiled on in the background.
        """
        self.begin([program])
        until = time.monotonic() + seconds
        threads = [self._running[digest] for digest in _compiled(program) if digest in self._running]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def worked_s(self, program: Program) -> float:
        """Seconds since the first of what calls of `program` would compile was begun; 0 where nothing was."""
        return max((time.monotonic() - self._began[d] for d in _compiled(program) if d in self._began), default=0.0)

    def files(self, program: Program) -> list[str]:
        """What workers that run `program` take over: paths of the files that are there by now."""
        return [str(self.folder / digest / FILE) for digest in _compiled(program) if digest in self._made]

    def close(self) -> None:
        """End the processes; what is still compiled is given up."""
        self._closed = True
        for process in self._processes:
            process.kill(wait=False)
        for thread in self._running.values():
            thread.join()

    def _compile(self, digest: str, asked: Mapping[str, Any]) -> None:
        process: Process | None = None
        try:
            server, main = compile_server(), "qimeng.envs.judge.library_compile_process:main"
            process = server.start(main, self._mode, self._device, environment={CACHE: str(self.folder / "inductor")})
            self._processes.append(process)
            if self._closed:
                process.kill(wait=False)
            process.call("ready", START_S)
            made, _ = process.call("compile", math.inf, **asked)  # until this is closed
            if made:
                self._made.add(digest)
        except WorkerFailed:
            pass  # a worker compiles by itself, and what is wrong shows there
        finally:
            if process is not None:
                process.kill()


def parameters_of(region: Region) -> list[int]:
    """Numbers of the inputs of `region` that are parameters."""
    return [i for i, v in enumerate(region.inputs) if region.graph.nodes[v.node].kind == "parameter"]


def _compiled(program: Program) -> dict[str, tuple[Region, Implementation, Inductor]]:
    """What is compiled here of `program`, by the implementation's digest: what the library itself printed."""
    found: dict[str, tuple[Region, Implementation, Inductor]] = {}
    for region in () if program.fallback else program.called:
        implementation = program.implementation(region)
        if not compiles(implementation):
            continue
        if isinstance(call := call_of(region, implementation), Inductor) and _takes_long(region, call):
            found[implementation.digest] = region, implementation, call
    return found


def _takes_long(region: Region, call: Inductor) -> bool:
    """Whether TorchInductor takes more than a few seconds: many kernels, loops that it unrolls, candidates to time."""
    return len(heavy(region)) >= LEAST or bool(call.mode) or any(node.packet in LAYERS for node in region.ops)


__all__ = ["LibraryCompilers", "parameters_of"]
