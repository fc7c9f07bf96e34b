"""Detects with NVML whether heat or power throttled a GPU during a measurement.

Deals in NVML's throttle reasons, polled by a thread while the judge is idle. It uses ctypes, since the library comes
with the driver. Knows nothing about the measurement or its consequences.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType

import torch

SLOWED = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bit to why clocks are lower than they should be (`nvmlClocksEventReasons`, nvml.h); measuring again may help."""
POWER_CAP = 0x04
"""Clocks are lower because the board reached its power limit. Heavy kernels always cause this, eager's too."""
_READERS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""The function's name, and its name before driver 535."""

LAST_S = 0.05
"""Seconds that the end of a measurement waits for the last reading. Some drivers take a second for one, while nobody
else may use the GPU."""

Reader = Callable[[], int]


def reader_for(device: torch.device) -> Reader | str:
    """A function that reads the throttle reasons of `device`, or why there is none, in a few words."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        read = next(getattr(library, name) for name in _READERS if hasattr(library, name))
        uuid = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}".encode()
    except OSError:
        return "no NVML"
    except (AttributeError, StopIteration):
        return "an NVML or PyTorch that is too old"
    handle = ctypes.c_void_p()
    status = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    if status:
        return f"NVML answers with error {status}"

    def reasons() -> int:
        bits = ctypes.c_ulonglong()
        return 0 if read(handle, ctypes.byref(bits)) else bits.value

    return reasons


class Watch:
    """Reads the reasons in the block, and once more at its end where that is quick (`LAST_S`).

    Args:
        read: gives the bits; None to watch nothing.
        period_s: seconds between readings.

    Attributes:
        seen: the bits that were set in any reading.
    """

    def __init__(self, read: Reader | None, period_s: float = 0.1):
        self._read, self._period_s = read, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen = 0

    def __enter__(self) -> Watch:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._read is not None:
            self._thread.join(LAST_S)

    @property
    def slowed(self) -> str:
        """Why the GPU was throttled, in words; empty if it was not."""
        return ", ".join(text for bit, text in SLOWED.items() if self.seen & bit)

    def _watch(self) -> None:
        assert self._read is not None
        while True:
            last = self._stop.wait(self._period_s)
            self.seen |= self._read()
            if last:
                return


__all__ = ["POWER_CAP", "SLOWED", "Reader", "Watch", "reader_for"]
