"""What runs in a process that times torch.compile: compiling a module, while the device is held for its measurements.

Deals in one module and one mode. Knows nothing about who asks for its times (`qimeng.envs.judge.torch_compile`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from qimeng.device_lock import DeviceLock

KEPT_S = 0.1
"""Seconds for which the device is kept after a measurement: the next one may follow."""


def compile_module(
    module: torch.nn.Module, mode: str, inputs: Sequence[Any], threads: int, lock: str
) -> Callable[..., Any]:
    """What torch.compile makes of `module`, called until nothing is left to compile or record.

    Args:
        module: what is compiled.
        mode: of torch.compile.
        inputs: of the first calls.
        threads: compiler processes; 1 compiles in this one, which is quickest for a few kernels.
        lock: path of the device's lock, held while TorchInductor measures which of its candidates is fastest, so that
            it neither disturbs the times of others nor is misled by them; empty without one.
    """
    import torch._inductor.config

    torch._inductor.config.compile_threads = threads
    if lock:
        measure_alone(DeviceLock(lock))
    call = torch.compile(module, mode=None if mode == "default" else mode)
    for _ in range(3):  # CUDA graphs are recorded in the second or third call
        call(*inputs)
    return call


def measure_alone(lock: DeviceLock) -> None:
    """Hold `lock` in TorchInductor's measurements: of one candidate, or of all configurations of a Triton kernel."""
    from torch._inductor.runtime import benchmarking, triton_heuristics

    turn = _Turn(lock)
    for name in ("benchmark", "benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
        if hasattr(benchmarking.benchmarker, name):
            setattr(benchmarking.benchmarker, name, turn.around(getattr(benchmarking.benchmarker, name)))
    tuner = triton_heuristics.CachingAutotuner
    if hasattr(tuner, "benchmark_all_configs"):
        tuner.benchmark_all_configs = turn.around(tuner.benchmark_all_configs)


class _Turn:
    """A lock that may be asked for again inside, and is kept from one measurement to the next.

    A network has a hundred kernels, measured one right after the other. If each waited for its own turn, most of the
    time would be spent on waiting for the checks that others began meanwhile.
    """

    def __init__(self, lock: DeviceLock):
        self._lock, self._mine = lock, threading.RLock()
        self._depth, self._kept = 0, ExitStack()
        self._ending: threading.Timer | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, alone on the device."""

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with self._taken():
                return function(*arguments, **options)

        return call

    @contextmanager
    def _taken(self) -> Iterator[None]:
        with self._mine:
            if self._depth:
                yield
                return
            if self._ending is not None:
                self._ending.cancel()
            else:
                self._kept.enter_context(self._lock.alone())
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._ending = threading.Timer(KEPT_S, self._end, ())
                self._ending.daemon = True
                self._ending.start()

    def _end(self) -> None:
        """Give the lock back, unless it is used again by now."""
        with self._mine:
            if self._ending is threading.current_thread():
                self._ending = None
                self._kept.close()


__all__ = ["compile_module", "measure_alone"]
