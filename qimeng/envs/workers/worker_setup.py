"""What a process begins with: a specification, a device that is ready, parameters, and the seeds of a draw.

Deals in one specification. Workers, baselines and the judge's own reference have these in common. Knows nothing about
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qimeng.envs.workers.poison import perturb_malloc
from qimeng.envs.workers.small_tensors import copied_state, copy_state
from qimeng.spec import KernelSpec, perturb_parameters

KEPT_BYTES = 1 << 28
"""Bytes of parameters above which what a seed made of them is not kept (256 MiB)."""


@dataclass(frozen=True)
class Setup:
    """The settings of a worker, sent before it starts.

    Attributes:
        spec: the specification's bytes.
        mode: precision mode.
        device: PyTorch's name of the device.
        compiled: folder in which each implementation was compiled into one of its own, named by its digest; empty where
            all were compiled into this process's own cache.
    """

    spec: bytes
    mode: str
    device: str
    compiled: str = ""


@dataclass(frozen=True)
class Draw:
    """The seeds of inputs and parameters.

    Attributes:
        seed: of the inputs.
        distribution: of the inputs.
        parameter_seed: of the change to the parameters; None leaves them as the spec makes them.
    """

    seed: int
    distribution: str = "given"
    parameter_seed: int | None = None


def open_device(device: torch.device) -> None:
    """Make the device ready, so that none of that is part of a measurement: on a GPU, a context and cuBLAS.

    Memory is mapped in small pages that stay mapped (PyTorch's expandable segments). Large blocks of `cudaMalloc` come
    fast or 11 % slower to stream through, by what was freed before (measured on an H200): that would be luck, not a
    property of the program.
    """
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(device)
        x = torch.ones(16, 16, device=device)
        torch.mm(x, x)
        torch.cuda.synchronize()
    else:
        torch.set_num_threads(1)  # several processes share the cores, and OpenMP's threads spin
        perturb_malloc()


class Parameters:
    """The reference module's parameters and buffers, as the spec makes them or changed by a seed.

    What the last seed made of them is kept, so that the next call with this seed copies it.
    """

    def __init__(self, spec: KernelSpec, device: torch.device):
        self.module = spec.module(str(device))
        self._base = copied_state(self.module.state_dict())
        self._small = sum(v.nbytes for v in self._base.values()) <= KEPT_BYTES
        self._changed: tuple[int, dict[str, torch.Tensor]] | None = None

    def set(self, seed: int | None) -> dict[str, torch.Tensor]:
        """The state after `load`ing the base and changing it by `seed`; the module's own tensors."""
        known = self._changed if self._changed and self._changed[0] == seed else None
        copy_state(known[1] if known else self._base, self.module.state_dict())
        if seed is not None and known is None:
            self._changed = None
            perturb_parameters(self.module, seed)
            if self._small:
                self._changed = seed, copied_state(self.module.state_dict())
        return self.module.state_dict()


__all__ = ["Draw", "Parameters", "Setup", "open_device"]
