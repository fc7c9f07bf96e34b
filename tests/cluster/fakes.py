"""Evaluators that need no GPU, and do what the text of a program says."""

from __future__ import annotations

import os
from pathlib import Path

from qimeng.bench.collect import Assignment
from qimeng.bench.explore import Explored
from qimeng.cluster.supervisor import TASK_FOLDER
from qimeng.device import Card
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, SerialEvaluator
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.testing import FakeEvaluator
from tests.cluster.light import here, verdict

NOTHING = OpGraph({}, ())


def request(text: str, seconds: float | None = None) -> EvaluationRequest:
    return EvaluationRequest(Program(NOTHING, (), {}, text), seconds=seconds)


class Measuring(SerialEvaluator):
    """Its times follow from the program's text; its card is the GPU that Ray gave the process."""

    version, estimated = 7, False

    def answer(self, request: EvaluationRequest) -> Evaluation:
        return verdict(request.to_json(), Card(here()))


def measuring() -> tuple[Evaluator, OpGraph]:
    return Measuring(), NOTHING


def fake_judge_of(spec: bytes, device: str | None, coder: str) -> tuple[Evaluator, OpGraph]:
    """In place of `qimeng.envs.steps.setup.judge_of`."""
    return FakeEvaluator(estimated=True), capture_spec(KernelSpec.from_bytes(spec))


def explore_there(assignment: Assignment, delay: float = 0.0) -> Explored:
    """At a GPU of a cluster: explore a spec with fakes, into the folder of the task."""
    from tests.bench import collecting

    return collecting.work(assignment, Path(os.environ[TASK_FOLDER]), delay)
