"""PyTorch's own times: eager and torch.compile, in a process that never sees a candidate.

Deals in one specification, timed on request. The judge's side is `Baselines`, the process's side `main`. Knows nothing
about programs or verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qimeng.envs.channel import Channel
from qimeng.envs.forkserver import START_S, ForkServer, Process, WorkerFailed
from qimeng.envs.modes import set_mode
from qimeng.envs.service import serve
from qimeng.envs.timing import Effort, Samples, Stopwatch
from qimeng.envs.worker import Setup, alone_on, open_device
from qimeng.spec import KernelSpec

EAGER = "eager"
STALE_S = 60.0
"""Seconds after which eager is timed again during a search."""


def compiled_name(mode: str) -> str:
    """The baseline's name for torch.compile in `mode`.

    >>> compiled_name("default"), compiled_name("reduce-overhead")
    ('compile', 'compile-reduce-overhead')
    """
    return "compile" if mode == "default" else f"compile-{mode}"


class Baselines:
    """The baseline process of one specification.

    Args:
        server: starts the process.
        setup: the specification, the mode and the device.
        draw_seed: source of the inputs' seeds.
        timeout_s: seconds that one request may take; compiling may take five times as long.

    Attributes:
        ready: names of the baselines that can be timed.
        failed: names of those that cannot be, with the reason.
    """

    def __init__(self, server: ForkServer, setup: Setup, draw_seed: Callable[[], int], timeout_s: float):
        self._server, self._setup, self._draw_seed, self._timeout_s = server, setup, draw_seed, timeout_s
        self._process: Process | None = None
        self._eager: Samples | None = None
        self._eager_at = 0.0
        self._peak: int | None = None
        self.ready: list[str] = []
        self.failed: dict[str, str] = {}
        self.start()

    def start(self, locked: bool = False) -> None:
        """Start the process unless it runs; it becomes ready by itself.

        Args:
            locked: whether the judge holds the device's lock for it.
        """
        if self._process is None or not self._process.alive:
            setup = replace(self._setup, lock="") if locked else self._setup
            folder = {"TORCHINDUCTOR_CACHE_DIR": str(Path(self._server.folder) / "inductor")}
            self._process = self._server.start("qimeng.envs.baseline:main", setup, environment=folder)
            self._process.send("ready")
            self.ready = []

    def wait(self) -> None:
        """Wait until the process is ready.

        Raises:
            WorkerFailed: it cannot be started.
        """
        if not self.ready:
            assert self._process is not None
            self._process.answer(START_S)
            self.ready = [EAGER]

    def compile(self, mode: str = "default") -> bool:
        """Make torch.compile in `mode` ready; False where it fails (see `failed`)."""
        name = compiled_name(mode)
        self.start()
        self.wait()
        assert self._process is not None
        if name not in self.ready and name not in self.failed:
            try:
                self._process.call("compile", 5 * self._timeout_s, name=name, mode=mode, seed=self._draw_seed())
                self.ready.append(name)
            except WorkerFailed as error:
                self.failed[name] = str(error)
        return name in self.ready

    def time(self, name: str, effort: Effort) -> Samples:
        """Times of one baseline on fresh inputs; the judge holds the device's lock."""
        self.start(locked=True)
        self.wait()
        assert self._process is not None
        seeds = [self._draw_seed() for _ in range(3)]
        data, _ = self._process.call("time", self._timeout_s, name=name, seeds=seeds, effort=effort)
        samples = Samples(tuple(data["device_ms"]), tuple(data["wall_ms"]))
        if name == EAGER:
            self._eager, self._eager_at = samples, time.monotonic()
        return samples

    def eager(self, effort: Effort) -> Samples:
        """Eager's times, measured again where the last ones are older than `STALE_S`."""
        if self._eager is None or time.monotonic() - self._eager_at > STALE_S:
            return self.time(EAGER, effort)
        return self._eager

    @property
    def eager_ms(self) -> float | None:
        """Eager's device milliseconds as measured last; None before that."""
        return None if self._eager is None else self._eager.timing().device_ms

    def peak(self) -> int | None:
        """Bytes that a call of eager holds at most beyond inputs and parameters; None on the CPU."""
        if self._peak is None:
            self.start(locked=True)
            self.wait()
            assert self._process is not None
            self._peak = self._process.call("peak", self._timeout_s, seed=self._draw_seed())[0]
        return self._peak

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()


# -- in the baseline process


def main(channel: Channel, setup: Setup) -> None:
    """Answer `ready`, `compile`, `time` and `peak`."""
    set_mode(setup.mode)
    device = torch.device(setup.device)
    with alone_on(setup.lock):
        open_device(device)
        bench = _Bench(KernelSpec.from_bytes(setup.spec), device)
        bench.stopwatch.synchronize()
    commands: dict[str, Callable[..., Any]] = {
        "ready": lambda: None,
        "compile": bench.compile,
        "time": bench.time,
        "peak": bench.peak,
    }
    with torch.no_grad():
        serve(channel, commands)


class _Bench:
    def __init__(self, spec: KernelSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.stopwatch = Stopwatch(device)
        self.module = spec.module(str(device))
        self.calls: dict[str, Callable[..., Any]] = {EAGER: self.module}

    def compile(self, name: str, mode: str, seed: int) -> None:
        call = torch.compile(self.module, mode=None if mode == "default" else mode)
        inputs = self._inputs(seed)
        for _ in range(3):  # CUDA graphs are recorded in the second or third call
            call(*inputs)
        self.calls[name] = call
        self._tidy()

    def time(self, name: str, seeds: Sequence[int], effort: Effort) -> dict[str, Any]:
        samples = self.stopwatch.measure(self.calls[name], self._inputs, seeds, effort)
        self._tidy()
        return {"device_ms": samples.device_ms, "wall_ms": samples.wall_ms}

    def peak(self, seed: int) -> int | None:
        if self.device.type != "cuda":
            return None
        inputs = self._inputs(seed)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = self.module(*inputs)
        torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated()) - before
        del output, inputs
        self._tidy()
        return peak

    def _inputs(self, seed: int) -> tuple[Any, ...]:
        return self.spec.inputs(seed, str(self.device))

    def _tidy(self) -> None:
        """Between measurements the memory belongs to others."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


__all__ = ["EAGER", "Baselines", "compiled_name", "main"]
