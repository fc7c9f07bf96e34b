"""PyTorch's own times: eager, in a process that never sees a candidate.

Deals in one specification, timed on request. The judge's side is `Baseline`, the process's side `main`, which serves
torch.compile as well (see `qimeng.envs.torch_compile`). Knows nothing about programs or verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qimeng.envs.channel import Channel
from qimeng.envs.forkserver import FEW_QUEUES, START_S, ForkServer, Process
from qimeng.envs.modes import set_mode
from qimeng.envs.service import serve
from qimeng.envs.timing import Effort, Samples, Stopwatch
from qimeng.envs.worker import Setup, open_device
from qimeng.spec import KernelSpec

EAGER = "eager"


class Baseline:
    """The process in which eager runs.

    Args:
        server: starts the process.
        setup: the specification, the mode and the device.
        draw_seed: source of the inputs' seeds.
        timeout_s: seconds that one request may take.
    """

    def __init__(self, server: ForkServer, setup: Setup, draw_seed: Callable[[], int], timeout_s: float):
        self._server, self._setup, self._draw_seed, self._timeout_s = server, setup, draw_seed, timeout_s
        self._process: Process | None = None
        self._ready = False
        self._eager: Samples | None = None
        self._peak: int | None = None
        self.start()

    def start(self) -> None:
        """Start the process unless it runs; it becomes ready by itself."""
        if self._process is None or not self._process.alive:
            process = self._server.start("qimeng.envs.baseline:main", self._setup, environment=FEW_QUEUES)
            self._process, self._ready = process, False
            self._process.send("ready")

    def wait(self) -> None:
        """Wait until the process is ready.

        Raises:
            WorkerFailed: it cannot be started.
        """
        if not self._ready:
            assert self._process is not None
            self._process.answer(START_S)
            self._ready = True

    def time(self, effort: Effort) -> Samples:
        """Times on fresh inputs; the judge is alone on the device."""
        self._eager = ask_times(self._running(), self._draw_seed, self._timeout_s, effort)
        return self._eager

    @property
    def eager_ms(self) -> float | None:
        """Eager's device milliseconds as measured last; None before that."""
        return None if self._eager is None else self._eager.timing().device_ms

    def peak(self) -> int | None:
        """Bytes that a call of eager holds at most beyond inputs and parameters; None on the CPU."""
        if self._peak is None:
            self._peak = self._running().call("peak", self._timeout_s, seed=self._draw_seed())[0]
        return self._peak

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()

    def _running(self) -> Process:
        self.start()
        self.wait()
        assert self._process is not None
        return self._process


def ask_times(process: Process, draw_seed: Callable[[], int], timeout_s: float, effort: Effort) -> Samples:
    """Times of the process's program on fresh inputs."""
    data, _ = process.call("time", timeout_s, seed=draw_seed(), effort=effort)
    return Samples(tuple(data["device_ms"]), tuple(data["wall_ms"]))


# -- in the process


def main(channel: Channel, setup: Setup) -> None:
    """Answer `ready`, `compile`, `time` and `peak`."""
    set_mode(setup.mode)
    device = torch.device(setup.device)
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
        self.call: Callable[..., Any] = self.module

    def compile(self, mode: str, seed: int, threads: int, lock: str) -> None:
        """Time what torch.compile makes of the module in `mode` from now on."""
        from qimeng.envs.torch_compile import compile_module

        self.call = compile_module(self.module, mode, self._inputs(seed), threads, lock)
        self._tidy()

    def time(self, seed: int, effort: Effort) -> dict[str, Any]:
        samples = self.stopwatch.measure(self.call, self._inputs, seed, effort)
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


__all__ = ["EAGER", "Baseline", "ask_times", "main"]
