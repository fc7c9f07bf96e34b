"""Programs of torch.compile for one specification, compiled in the background and timed on request.

Deals in modes of torch.compile: a process for each, so that one that takes too long can be ended without the others.
Compiling itself is `qimeng.envs.judge.torch_compile_process`. Knows nothing about candidates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from qimeng.envs.errors.accuracy import Error
from qimeng.envs.judge.baseline import ask_times
from qimeng.envs.workers.forkserver import START_S, ForkServer, Process, WorkerFailed
from qimeng.envs.workers.shared_server import shared_server
from qimeng.envs.workers.stopwatch import Effort, Samples
from qimeng.envs.workers.worker_setup import Setup

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""What torch.compile knows (its documentation of `mode`)."""

PRELOAD = ("torch", "qimeng.envs.judge.baseline", "qimeng.envs.judge.torch_compile_process")
"""Modules that the compiling processes share. TorchInductor is not among them: importing it opens CUDA, after which no
forked process can (seen with torch 2.11 on an H200)."""


CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder of TorchInductor's cache."""


def check_modes(modes: Sequence[str]) -> None:
    """Refuse what torch.compile does not know.

    Raises:
        ValueError: the message lists the modes.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"torch.compile has no mode {', '.join(unknown)}; known: {', '.join(MODES)}")


def compiled_name(mode: str) -> str:
    """What torch.compile in `mode` is called among the baselines.

    >>> compiled_name("default"), compiled_name("reduce-overhead")
    ('compile', 'compile-reduce-overhead')
    """
    return "compile" if mode == "default" else f"compile-{mode}"


def compile_server() -> ForkServer:
    """The fork server of the compiling processes, with TorchInductor loaded; it ends with this process."""
    return shared_server(PRELOAD)


def cache_folder(server: ForkServer) -> dict[str, str]:
    """The variable by which the compiling processes of `server` share TorchInductor's cache."""
    return {CACHE: str(Path(server.folder) / "inductor")}


class TorchCompile:
    """torch.compile in several modes, one after the other in a thread, each in a process of its own.

    Args:
        setup: the specification, the mode of precision and the device.
        draw_seed: source of the inputs' seeds.
        timeout_s: seconds that one request may take.
        threads: compiler processes at a time, for many kernels or many candidates.
        lock: path of the device's lock, which is held while the compiler times its own candidates; empty without one.
        many: whether it has many kernels.

    Attributes:
        begun: modes that were asked for.
        ready: modes that can be timed, in the order asked for.
        failed: modes that cannot be, with the reason.
    """

    def __init__(
        self,
        setup: Setup,
        draw_seed: Callable[[], int],
        timeout_s: float,
        threads: int,
        lock: str,
        many: bool = False,
    ):
        self._setup, self._draw_seed, self._timeout_s = setup, draw_seed, timeout_s
        self._threads, self._lock, self._many = threads, lock, many
        self._thread: threading.Thread | None = None
        self._processes: dict[str, Process] = {}
        self._closed = False
        self.begun: set[str] = set()
        self.ready: list[str] = []
        self.failed: dict[str, str] = {}

    def begin(self, modes: Sequence[str], limit_s: float) -> None:
        """Make the program of each mode ready, in the background.

        Args:
            modes: in this order.
            limit_s: seconds that one mode may take; then it is ended and `failed` says so.

        Raises:
            ValueError: torch.compile has no such mode.
        """
        check_modes(modes)
        self.wait()
        self.begun.update(modes)
        self._thread = threading.Thread(target=self._make_ready, args=(tuple(modes), limit_s), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until every mode is ready or has failed."""
        if self._thread is not None:
            self._thread.join()

    def time(self, mode: str, effort: Effort) -> Samples:
        """Times of a mode that is ready, on fresh inputs; the judge is alone on the device.

        Raises:
            WorkerFailed: its process failed.
        """
        return ask_times(self._processes[mode], self._draw_seed, self._timeout_s, effort)

    def errors(self, mode: str, mutated: Sequence[str] = ()) -> list[Error]:
        """How far each output of floats is from eager's on fresh inputs as given, of a mode that is ready.

        Likewise each such buffer among `mutated`, which a call updates.

        Raises:
            WorkerFailed: its process failed.
        """
        found, _ = self._processes[mode].call("differ", self._timeout_s, seed=self._draw_seed(), mutated=list(mutated))
        return [Error(*figures) for figures in found]

    def give_up(self, mode: str, reason: str) -> None:
        """A mode that was ready cannot be timed."""
        self.ready.remove(mode)
        self.failed[mode] = reason

    def close(self) -> None:
        """End the processes; what is still compiled is given up."""
        self._closed = True
        for process in list(self._processes.values()):
            process.kill(wait=False)
        self.wait()
        for process in self._processes.values():
            process.kill()
        self._processes.clear()

    def _make_ready(self, modes: Sequence[str], limit_s: float) -> None:
        for mode in modes:
            if self._closed:
                return
            try:
                self._start(mode, limit_s)
                self.ready.append(mode)
            except WorkerFailed as failed:
                cut = f"cut off: not compiled within {limit_s:g} s"
                self.failed[mode] = cut if failed.kind == "timeout" else str(failed)

    def _start(self, mode: str, limit_s: float) -> None:
        """Start the process of `mode` and wait until its program runs."""
        server = compile_server()
        process = server.start("qimeng.envs.judge.baseline:main", self._setup, environment=cache_folder(server))
        self._processes[mode] = process
        if self._closed:
            process.kill(wait=False)
        process.call("ready", START_S)
        threads = self._threads if self._many or mode.startswith("max-autotune") else 1
        seed = self._draw_seed()
        process.call("compile", limit_s, mode=mode, seed=seed, threads=threads, lock=self._lock)


__all__ = ["CACHE", "MODES", "TorchCompile", "cache_folder", "check_modes", "compile_server", "compiled_name"]
