"""Evaluators that need no GPU, and do what the text of a program says."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from qimeng.bench.collect import Assignment
from qimeng.bench.explore import Explored
from qimeng.cluster.supervisor import TASK_FOLDER
from qimeng.device import Card
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, Gate, SerialEvaluator, Timing
from qimeng.interfaces.faults import MACHINE_FAILED
from qimeng.program.program import Program

NOTHING = OpGraph({}, ())


def request(text: str, seconds: float | None = None) -> EvaluationRequest:
    return EvaluationRequest(Program(NOTHING, (), {}, text), seconds=seconds)


class Measuring(SerialEvaluator):
    """Its times follow from the program's text; its card is the GPU that Ray gave the process."""

    version, estimated = 7, False

    def answer(self, request: EvaluationRequest) -> Evaluation:
        text = request.program.fallback
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
        return of_text(text, Card(here()))


def of_text(text: str, card: Card) -> Evaluation:
    """What is to be said of a program with this text."""
    if text.startswith("wrong"):
        return Evaluation(Gate.PROGRAM, "other values", "wrong")
    if text.startswith("busy"):
        return Evaluation(Gate.TIMING, "too busy", "not-timed")
    if text.startswith("broken"):
        return Evaluation(Gate.PROGRAM, "it fell off the bus", MACHINE_FAILED)
    ms = 1 + int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 2**24
    return Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(2.0), card=card)


def verdict(asked: str, card: Card) -> Evaluation:
    """The answer to a request in JSON; nothing is waited for."""
    return of_text(json.loads(asked)["fallback"], card)


def here() -> str:
    return f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES')} of {os.getppid()}"


def measuring() -> tuple[Evaluator, OpGraph]:
    return Measuring(), NOTHING


def explore_there(assignment: Assignment, delay: float = 0.0) -> Explored:
    """At a GPU of a cluster: explore a spec with fakes, into the folder of the task."""
    from tests.bench import collecting

    return collecting.work(assignment, Path(os.environ[TASK_FOLDER]), delay)
