"""The judge's verdict on whole programs, without their times.

Deals in the parts of the real evaluator: its references, its judge, its workers. Where there is a GPU, programs run
there; else in Triton's interpreter. Knows nothing about mutants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qimeng.envs.estimate.interpret import PRELOAD, gpu_arithmetic
from qimeng.envs.estimate.interpreter import ENVIRONMENT
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.trials import SEARCH_TRIALS
from qimeng.envs.judge.verdicts import Judge, Verdict
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.workers.forkserver import START_S, Process, WorkerFailed
from qimeng.envs.workers.shared_server import shared_server
from qimeng.envs.workers.worker_setup import Setup
from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program
from qimeng.spec import KernelSpec
from qimeng.spec.modes import precision

CALL_S = 60.0
"""Seconds after which a call counts as hung."""


@dataclass(frozen=True)
class Judged:
    """What became of a program.

    Attributes:
        search: the verdict of an evaluation in a search.
        final: that of the final verification, in a fresh process on every distribution; None where the first refused.
    """

    search: Verdict
    final: Verdict | None

    @property
    def ok(self) -> bool:
        """Whether it passed both."""
        return self.final is not None and self.final.ok


class Verdicts:
    """Judges programs for one specification; close it when done.

    Args:
        spec: the specification.
        graph: its graph.
        device: ``"cpu"`` (Triton's interpreter) or ``"cuda"``.
        sandbox: level of the workers' sandbox.
    """

    def __init__(self, spec: KernelSpec, graph: OpGraph, device: str, sandbox: str = DEFAULT):
        self.device, self.sandbox = device, sandbox
        interpreted = device == "cpu"
        self._server = shared_server(PRELOAD) if interpreted else shared_server()
        self._target = "qimeng.envs.estimate.interpreter:main" if interpreted else "qimeng.envs.workers.worker:main"
        place = torch.device("cpu") if interpreted else torch.device(device, 0)
        self._setup = Setup(spec.to_bytes(), spec.mode, str(place))
        arithmetic = gpu_arithmetic if interpreted else precision
        self.references = References(spec, graph, place, arithmetic=arithmetic)
        self._judge = Judge(self.references, lambda: CALL_S)

    def close(self) -> None:
        """Give the memory back."""
        self.references.release()

    def judge(self, program: Program) -> Judged:
        """The verdict on `program`: as in a search, and if that is good as in the final verification."""
        search = self._one(program, final=False)
        return Judged(search, self._one(program, final=True) if search.ok else None)

    def _one(self, program: Program, final: bool) -> Verdict:
        worker: Process | None = None
        try:
            environment = ENVIRONMENT if self.device == "cpu" else {}
            worker = self._server.start(self._target, self._setup, environment=environment, sandbox=self.sandbox)
            worker.call("ready", START_S)
            worker.call("load", CALL_S, source=program.source)
            references = self.references
            return self._judge.check(
                worker, references.every_distribution() if final else references.trials(SEARCH_TRIALS)
            )
        except WorkerFailed as failed:
            return Verdict(failure=failed.kind, error=str(failed))
        finally:
            if worker is not None:
                worker.kill()


__all__ = ["Judged", "Verdicts"]
