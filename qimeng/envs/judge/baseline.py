"""PyTorch's own times: eager, in a process that never sees a candidate.

Deals in one specification, timed on request. The judge's side is `Baseline`, the process's side `main`, which serves
torch.compile as well (see `qimeng.envs.judge.torch_compile`). Knows nothing about programs or verdicts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qimeng.envs.errors import accuracy
from qimeng.envs.errors.float64 import tensors_in
from qimeng.envs.workers.call_batch import Batch
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.forkserver import FEW_QUEUES, ForkServer, Process
from qimeng.envs.workers.service import Answer, serve
from qimeng.envs.workers.shared_buffers import Layout
from qimeng.envs.workers.stopwatch import Effort, Samples, Stopwatch
from qimeng.envs.workers.worker_setup import Draw, Setup, open_device
from qimeng.interfaces import Timing
from qimeng.spec import KernelSpec, perturb_parameters
from qimeng.spec.declared_linear import read_declared
from qimeng.spec.modes import set_mode

EAGER = "eager"
SLOWER, SLOWER_MS = 1.25, 0.005
"""Eager may take this many times its fastest time, plus this many milliseconds, while a candidate stands still. If it
takes longer, work that the candidate left on the device may still be running, or the host has become busy."""


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
        self._fastest: Timing | None = None
        self._peak: int | None = None
        self.start()

    def start(self) -> None:
        """Start the process unless it runs; it becomes ready by itself."""
        if self._process is None or not self._process.alive:
            process = self._server.start("qimeng.envs.judge.baseline:main", self._setup, environment=FEW_QUEUES)
            self._process, self._ready = process, False
            self._process.send("ready")

    def wait(self) -> None:
        """Wait until the process is ready.

        Raises:
            WorkerFailed: it cannot be started.
        """
        if not self._ready:
            assert self._process is not None
            self._process.await_ready()
            self._ready = True

    def time(self, effort: Effort) -> Samples:
        """Times on fresh inputs; the judge is alone on the device."""
        self._eager = ask_times(self.running(), self._draw_seed, self._timeout_s, effort)
        timing = self._eager.timing()
        if self._fastest is None or timing.device_ms < self._fastest.device_ms:
            self._fastest = timing
        return self._eager

    def faster_before(self, eager: Timing) -> Timing | None:
        """Eager's shortest time so far, where `eager` is too long to be its time alone on the device; else None."""
        before = self._fastest
        if self._setup.device == "cpu" or before is None:
            return None
        return before if eager.device_ms > SLOWER * before.device_ms + SLOWER_MS else None

    @property
    def eager_ms(self) -> float | None:
        """Eager's device milliseconds as measured last; None before that."""
        return None if self._eager is None else self._eager.timing().device_ms

    def peak(self) -> int | None:
        """Bytes that a call of eager holds at most beyond inputs and parameters; None on the CPU."""
        if self._peak is None:
            self._peak = self.running().call("peak", self._timeout_s, seed=self._draw_seed())[0]
        return self._peak

    def call(self, command: str, **arguments: Any) -> tuple[Any, list[int]]:
        """Ask the process for something, once it is ready.

        Raises:
            WorkerFailed: it cannot do it.
        """
        return self.running().call(command, self._timeout_s, **arguments)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()

    def running(self) -> Process:
        """The process, ready."""
        self.start()
        self.wait()
        assert self._process is not None
        return self._process


def ask_times(process: Process, draw_seed: Callable[[], int], timeout_s: float, effort: Effort) -> Samples:
    """Times of the process's program on fresh inputs."""
    data, _ = process.call("time", timeout_s, seed=draw_seed(), effort=effort)
    return Samples(tuple(data["device_ms"]), tuple(data["wall_ms"]), tuple(data.get("late_ms", ())))


# -- in the process


def main(channel: Channel, setup: Setup) -> None:
    """Answer `ready`, `compile`, `differ`, `time`, `peak`, and what the judge asks to time batches itself."""
    set_mode(setup.mode)
    device = torch.device(setup.device)
    open_device(device)
    bench = _Bench(KernelSpec.from_bytes(setup.spec), device)
    bench.stopwatch.synchronize()
    commands: dict[str, Callable[..., Any]] = {
        "ready": lambda: {"pid": os.getpid()},
        "compile": bench.compile,
        "differ": bench.differ,
        "time": bench.time,
        "peak": bench.peak,
        "arm": bench.arm,
        "fire": bench.fire,
        "queue": bench.queue,
        "finish": bench.stopwatch.synchronize,
        "release": bench.release,
    }
    with torch.no_grad():
        serve(channel, commands)


class _Bench:
    def __init__(self, spec: KernelSpec, device: torch.device):
        self.spec, self.device = spec, device
        self.stopwatch = Stopwatch(device)
        self.module = spec.module(str(device))
        read_declared(self.module)
        self.call: Callable[..., Any] = self.module
        self.batch: Batch | None = None
        self._own: dict[str, torch.Tensor] = {}

    def compile(self, mode: str, seed: int, threads: int, lock: str) -> None:
        """Time what torch.compile makes of the module in `mode` from now on."""
        from qimeng.envs.judge.torch_compile_process import compile_module

        self.call = compile_module(self.module, mode, self._inputs(seed), threads, lock)
        self._tidy()

    def differ(self, seed: int, mutated: Sequence[str] = ()) -> list[tuple[float, ...]]:
        """The figures of the error of what is timed here, beside eager on the same inputs.

        Of each output of floats, then of each such buffer among `mutated`, which a call updates as it was made.
        """
        try:
            return self._errors(seed, mutated)
        finally:
            self._tidy()

    def time(self, seed: int, effort: Effort) -> dict[str, Any]:
        samples = self.stopwatch.measure(self.call, self._inputs, seed, effort)
        self._tidy()
        return {"device_ms": samples.device_ms, "wall_ms": samples.wall_ms, "late_ms": samples.late_ms}

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

    def arm(self, warm_up: Draw, layout: Layout, mutated: Sequence[str] = ()) -> Answer:
        """As `Worker.arm` (`qimeng.envs.workers.worker`) does; `release` brings the spec's own parameters back."""
        self._own = {key: value.clone() for key, value in self.module.state_dict().items()}
        if warm_up.parameter_seed is not None:
            perturb_parameters(self.module, warm_up.parameter_seed)
        state = self.module.state_dict()
        self.batch = Batch(self.device, self.module, lambda: self._inputs(warm_up.seed), layout, state, mutated)
        self.stopwatch.synchronize()
        return self.batch.answer

    def fire(
        self, nothing: bool, seeds: Sequence[int] = (), others: Sequence[Sequence[tuple[int, Any]]] = ()
    ) -> list[Any]:
        """As a worker does; with `nothing`, each call returns what was computed before."""
        assert self.batch is not None
        facts = self.batch.run(self._called(nothing), seeds, others)
        self.stopwatch.synchronize()
        return facts

    def queue(self, nothing: bool, value: int) -> list[Any]:
        """As a worker does; `nothing` as for `fire`."""
        assert self.batch is not None
        return self.batch.queue(value, self._called(nothing))

    def release(self, tidy: bool = True) -> None:
        """Give up the batch, and the memory in any case."""
        state = self.module.state_dict()
        for key, value in self._own.items():
            state[key].copy_(value)
        self.batch, self._own = None, {}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
        self._tidy()

    def _errors(self, seed: int, mutated: Sequence[str]) -> list[tuple[float, ...]]:
        made = self.spec.module(str(self.device)).state_dict() if mutated else {}
        own = {key: made[key] for key in mutated}
        del made  # the parameters need no memory twice
        state = self.module.state_dict()
        before = {key: state[key].clone() for key in mutated}

        def results(call: Callable[..., Any]) -> list[torch.Tensor]:
            for key in mutated:
                state[key].copy_(own[key])
            return [*tensors_in(call(*self._inputs(seed))), *(state[key].clone() for key in mutated)]

        try:
            pairs = zip(results(self.call), results(self.module), strict=True)
            return [accuracy.measure(y, r).figures for y, r in pairs if accuracy.is_float(r)]
        finally:
            for key, value in before.items():
                state[key].copy_(value)

    def _called(self, nothing: bool) -> Callable[..., Any]:
        assert self.batch is not None
        made = self.batch.first
        return (lambda *_: made) if nothing else self.module

    def _inputs(self, seed: int) -> tuple[Any, ...]:
        return self.spec.inputs(seed, str(self.device))

    def _tidy(self) -> None:
        """Between measurements the memory belongs to others."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


__all__ = ["EAGER", "Baseline", "ask_times", "main"]
