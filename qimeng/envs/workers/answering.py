"""What a process does that judges for others: it makes one evaluator and answers requests as JSON.

Deals in one evaluator for the life of the process, and in whose fault it is where that evaluator raises. Knows nothing
about who asks, or how it is judged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.errors import DeviceError, in_words
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import EngineReport, Evaluation, EvaluationRequest, Evaluator, Gate
from qimeng.interfaces.faults import JUDGE_FAILED, MACHINE_FAILED

Make = Callable[[], tuple[Evaluator, OpGraph]]
"""Makes an evaluator, in the process that it works in, and the graph of the specification that it judges."""

_MACHINE = (OSError, MemoryError, WorkerFailed, DeviceError, torch.AcceleratorError, torch.OutOfMemoryError)
"""What is raised where a file, memory, a process or a device is not what it should be."""

_engines: list[tuple[Evaluator, OpGraph]] = []
"""The evaluator of this process, once it was asked."""


def answer(make: Make, text: str) -> tuple[str, EngineReport]:
    """The answer to a request, both as JSON, and what the evaluator says about its work.

    What it raises becomes an answer as well, which is no verdict on the program.
    """
    try:
        if not _engines:
            _engines.append(make())
        engine, graph = _engines[0]
        found = engine.ask(EvaluationRequest.from_json(text, graph))
    except Exception as error:  # noqa: BLE001  (another package's engine may raise anything)
        found = no_verdict(in_words(error), failure_of(error))
    return found.to_json(), _engines[0][0].report if _engines else EngineReport()


def no_verdict(why: str, failure: str = MACHINE_FAILED) -> Evaluation:
    """The evaluation where the judge could not go on, which says nothing about the program."""
    return Evaluation(Gate.PROGRAM, f"the judge could not go on: {why}", failure)


def failure_of(error: Exception) -> str:
    """The class of failure of what an evaluator raised: the machine's, or the judge's own.

    >>> failure_of(OSError("no space left")), failure_of(KeyError("x"))
    ('machine', 'judge')
    """
    of_driver = isinstance(error, RuntimeError) and "CUDA" in str(error)
    return MACHINE_FAILED if of_driver or isinstance(error, _MACHINE) else JUDGE_FAILED


__all__ = ["Make", "answer", "failure_of", "no_verdict"]
