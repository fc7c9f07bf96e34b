"""What a final verification compiles anew may be begun before, for the program that it will verify."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from qimeng.envs.judge import gpu_evaluator
from qimeng.envs.judge.gpu_evaluator import SPARE_CORES, GpuEvaluator
from qimeng.envs.workers.compile import Compilers
from qimeng.interfaces import Asked, EvaluationRequest
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


class Noted(Compilers):
    """Says which programs it was given, and whether it was closed."""

    made: list[Noted] = []

    def __init__(self, *arguments: object):
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.given: list[str] = []
        self.closed = False
        Noted.made.append(self)

    def begin(self, programs: Sequence[Program]) -> None:
        self.given += [p.digest for p in programs]
        super().begin(programs)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_it_is_taken_over_for_the_same_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_function(lambda x: torch.relu(x) * 2, (torch.randn(8, 16),))
    graph = capture_spec(spec)
    start = Program.start(graph)
    other = start.with_regions((start.fusions.merged(*(r.id for r in start.regions)),))
    monkeypatch.setattr(gpu_evaluator, "Compilers", Noted)
    Noted.made.clear()
    judge = GpuEvaluator(spec, graph, torch_device="cpu", compile_threads=SPARE_CORES)
    try:
        for program in (other, start, start):
            judge.prepare(EvaluationRequest(program, asked=Asked.FINAL))
        first, second = Noted.made
        assert (first.given, second.given) == ([other.digest], [start.digest]) and first.closed and not second.closed
        assert judge.evaluate(start, asked=Asked.FINAL).ok and second.closed, "used, and given up after it"
        assert judge.evaluate(start, asked=Asked.FINAL).ok and len(Noted.made) == 3
    finally:
        judge.close()
