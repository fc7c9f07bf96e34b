"""Triton's view of a device that is not there.

Deals in what Triton's launcher and autotuner ask of a driver before anything runs. Knows nothing about what is
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qimeng.device import Device


class NoDriver:
    """Stands for `device`: ``triton.runtime.driver.set_active(NoDriver(device))``."""

    def __init__(self, device: Device):
        from triton.backends.compiler import GPUTarget

        self._target, self._device = GPUTarget(device.kind, device.arch, device.warp_size), device
        self.utils = self

    def get_current_target(self) -> Any:
        """The target that is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors have no data."""
        return torch.device("meta")

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The device's row, in Triton's words."""
        return {
            "max_shared_mem": self._device.shared_per_block,
            "multiprocessor_count": self._device.sms,
            "max_num_regs": self._device.registers_per_sm,
            "warpSize": self._device.warp_size,
        }

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """For autotuners: every configuration is compiled and takes as long as every other."""

        def compile_only(call: Callable[[], Any], quantiles: Sequence[float] = (), **unused: Any) -> list[float]:
            call()
            return [1.0] * max(len(quantiles), 1)

        return compile_only

    def get_empty_cache_for_benchmark(self) -> None:
        """Nothing is timed."""

    def clear_cache(self, cache: Any) -> None:
        """Nothing is timed."""


__all__ = ["NoDriver"]
