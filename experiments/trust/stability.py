"""How steady the judge's times are: one program evaluated again and again.

Deals in a few kernels, sized to take a wanted time, each in a fresh worker for every evaluation. Knows nothing about
files of rows or tables.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.trust.journal import Data, Journal
from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.interfaces import Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

TIMES_US = (10, 30, 100, 300, 1000)
"""What the kernels should take, roughly."""
ONE_CORE = (8.0, 0.05)
"""GB/s and TFLOP/s of one core of a CPU, roughly."""
FP32_TFLOPS = 100.0
"""What products of fp32 reach on an H200 in planes of half precision, roughly."""
WIDTH = 4096
"""Columns of what is streamed."""

_TEXT = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.randn({rows}, {columns})]


def get_init_inputs():
    return []
"""

KERNELS = {
    "pointwise": "torch.relu(x) + 1.0",
    "softmax": "torch.softmax(x, -1)",
    "sum": "torch.sum(x * x, -1)",
    "product": "x @ x.t()",
}
"""Forward of each."""


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
        kernel: one of `KERNELS`.
        wanted_us: what it should take, roughly.
    """

    kernel: str
    wanted_us: int

    @property
    def key(self) -> str:
        """Beginning of the keys of its rows."""
        return f"{self.kernel}-{self.wanted_us}us"

    def spec(self, bandwidth_gbs: float, tflops: float) -> KernelSpec:
        """The specification, sized by what a device reads and writes, or for the product by what it multiplies."""
        seconds = self.wanted_us * 1e-6
        if self.kernel == "product":  # 2 rows^2 columns operations
            rows, columns = max(128, round((seconds * tflops * 1e12 / 2 / 1024) ** 0.5 / 128) * 128), 1024
        else:
            moved = 4 * WIDTH * (1 if self.kernel == "sum" else 2)
            rows, columns = max(8, round(0.85 * seconds * bandwidth_gbs * 1e9 / moved / 8) * 8), WIDTH
        return KernelSpec.from_source(
            _TEXT.format(forward=KERNELS[self.kernel], rows=rows, columns=columns), f"{self.kernel} {rows}x{columns}"
        )


def cases() -> list[Case]:
    """Every kernel at every size."""
    return [Case(kernel, wanted) for wanted in TIMES_US for kernel in KERNELS]


def repeat(
    case: Case, journal: Journal, times: int, device: Device, torch_device: str, sandbox: str = "full"
) -> Iterator[Data]:
    """Evaluate the kernel until there are `times` rows of it or no time is left; the new rows as they come.

    Args:
        case: which kernel.
        journal: where the rows go.
        times: how often in all.
        device: the table row of the device.
        torch_device: ``"cuda"``, or ``"cpu"`` for PyTorch's own operators on the wall clock.
        sandbox: level of the workers' sandbox.
    """
    left = journal.pending(f"{case.key}-{number}" for number in range(times))
    if not left or journal.seconds_left <= 0:
        return
    spec = case.spec(*(ONE_CORE if torch_device == "cpu" else (device.bandwidth_gbs, FP32_TFLOPS)))
    graph = capture_spec(spec, device=torch_device)
    program = Program.start(graph) if torch_device == "cpu" else lowered(Program.start(graph), device)
    evaluator = GpuEvaluator(spec, graph, torch_device=torch_device, sandbox=sandbox)
    try:
        for key in left:
            if journal.seconds_left <= 0:
                return
            began = time.monotonic()
            found = evaluator.evaluate(program)
            yield journal.add(
                key,
                what="evaluation",
                device=torch_device,
                kernel=case.kernel,
                wanted_us=case.wanted_us,
                spec=spec.name,
                gate=found.gate.value,
                error=(found.error or "")[:300],
                ms=found.ms,
                spread=found.timing.spread if found.timing else None,
                calls=found.timing.calls if found.timing else None,
                eager_ms=found.eager.device_ms if found.eager else None,
                notes=found.notes,
                seconds=round(time.monotonic() - began, 3),
            )
    finally:
        evaluator.close()


def lowered(program: Program, device: Device) -> Program:
    """`program` with all regions fused as far as they may be, and our coder's default kernel for each."""
    coder = TemplateCoder()
    for kind in ("fusion", "lowering"):
        while True:
            legal = [a for a in legal_actions(program, Context(device, coder)) if (a.kind, a.param) == (kind, "")]
            if not legal:
                break
            program = coder.write(Request(program, legal[0], device)).apply(program)
    return program


__all__ = ["KERNELS", "TIMES_US", "Case", "cases", "lowered", "repeat"]
