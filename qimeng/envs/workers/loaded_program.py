"""The program that a worker has loaded: its module, its parameters, its inputs, and the seal around foreign code.

Deals in one specification. Knows nothing about what a program is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from qimeng.backend.load import load_kernels
from qimeng.envs.workers.call_batch import Batch
from qimeng.envs.workers.poison import fenced
from qimeng.envs.workers.region_alternatives import RegionAlternatives
from qimeng.envs.workers.sampled_output import OutputSampler
from qimeng.envs.workers.service import Refused
from qimeng.envs.workers.stopwatch import Stopwatch
from qimeng.envs.workers.tamper_check import Seal, shadowed, unlike
from qimeng.envs.workers.worker_inputs import with_fences
from qimeng.envs.workers.worker_setup import Draw, Parameters
from qimeng.spec import KernelSpec
from qimeng.spec.kept import take_state
from qimeng.spec.layers import flatten_parameters


class LoadedProgram:
    """A program, or the reference itself, with the reference's parameters, and the seal that is checked around it.

    Args:
        spec: the specification.
        device: that programs run on.
        compiled: see `Setup.compiled`.
    """

    def __init__(self, spec: KernelSpec, device: torch.device, compiled: str = ""):
        self.spec, self.device, self.compiled = spec, device, compiled
        self.stopwatch = Stopwatch(device)
        self._stopwatch_before = dict(vars(self.stopwatch))
        self.seal = Seal()
        self.reused: tuple[Any, ...] = ()
        self.parameters = Parameters(spec, device)
        self.module: ModuleType | None = None
        self.model: torch.nn.Module = self.parameters.module
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.sampler = OutputSampler()
        self.batch: Batch | None = None
        self.region = RegionAlternatives()

    def load(self, source: str, digests: Sequence[str] = ()) -> None:
        """Make the program's model with the reference's parameters; an empty source means the reference itself.

        Args:
            source: the program's text.
            digests: of its generated implementations.
        """
        self._find_compiled(digests)
        self.kept.clear()
        self.sampler = OutputSampler()
        self.module, self.model = None, torch.nn.Module()
        state = self.parameters.set(None)
        if not source:
            self.model = self.parameters.module
            return
        self.module = load_kernels(source, os.getcwd())
        with torch.device(self.device):
            self.model = self.module.Model()
        self._check_seal()
        self.model.to(self.device)
        for held in (*self.model.parameters(), *self.model.buffers()):
            held.data = fenced(held.data)
        flatten_parameters(self.model)
        take_state(self.model, state)

    def _find_compiled(self, digests: Sequence[str]) -> None:
        if self.compiled:
            from qimeng.envs.workers.compiled_cache import read_compiled  # loads Triton

            read_compiled([os.path.join(self.compiled, digest) for digest in digests])

    def _inputs(self, draw: Draw) -> tuple[Any, ...]:
        return self.spec.inputs(draw.seed, str(self.device), draw.distribution)

    def _fenced(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """`inputs` with a fence around each, where there is memory for a copy."""
        if not self.stopwatch.has_room(inputs):
            return inputs
        return with_fences(inputs)

    def _set_parameters(self, seed: int | None) -> Mapping[str, torch.Tensor]:
        state = self.parameters.set(seed)
        if self.model is not self.parameters.module:
            take_state(self.model, state)
        return state

    def _prepared(self) -> Sequence[Any]:
        """The program's prepared buffers (see the runtime part of an emitted program)."""
        return getattr(self.model, "_qimeng_prepared", ())

    def _check_seal(self) -> None:
        broken = self.seal.broken() + [
            name for it in (self, self.stopwatch, self.parameters, self.sampler, self.region) for name in shadowed(it)
        ]
        broken += unlike(self.stopwatch, self._stopwatch_before)
        if broken:
            raise tampered(broken)

    def _collect(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def tampered(names: Sequence[str]) -> Refused:
    """The refusal of a candidate that changed these names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return Refused("tampered", f"the candidate changed {', '.join(names[:5])}{more}")


__all__ = ["LoadedProgram", "tampered"]
