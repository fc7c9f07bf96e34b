"""What is evaluated: specs of the size of KernelBench's level 2 and programs of the template coder, and their judge.

Deals in seeds: the same seed gives the same specs and programs. Knows nothing about pools or GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from experiments.trust.cost import FAMILIES, LEVEL_2, LITTLE
from experiments.trust.programs import programs_along
from qimeng.device import target_device
from qimeng.envs.steps.setup import make_task
from qimeng.errors import QimengError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import EvaluationRequest, Evaluator
from qimeng.program.program import Program
from qimeng.spec import KernelSpec

WALKS = 8
"""Through each spec; a walk has some ten programs."""
ESTIMATED = "h100"
"""The device that times are estimated for where there is no GPU."""


@dataclass(frozen=True)
class Work:
    """One spec and the programs that are evaluated for it.

    Attributes:
        spec: the spec.
        programs: without repetition, in an order by chance, so that any part of them is like the whole.
        estimated: whether there is no GPU, and times come from a model.
    """

    spec: KernelSpec
    programs: tuple[Program, ...]
    estimated: bool

    @property
    def requests(self) -> list[EvaluationRequest]:
        """As a search asks: is it right, and how fast."""
        return [EvaluationRequest(program) for program in self.programs]

    @property
    def make(self) -> partial[tuple[Evaluator, OpGraph]]:
        """Makes the judge, in the process that it works in."""
        return partial(_judge_of, self.spec.to_bytes(), ESTIMATED if self.estimated else None)


def _judge_of(spec: bytes, device: str | None) -> tuple[Evaluator, OpGraph]:
    task = make_task(KernelSpec.from_bytes(spec), device=device)
    return task.evaluator, task.start.graph


def make_work(numbers: Sequence[int], seed: int, estimated: bool, processes: int, walks: int = WALKS) -> list[Work]:
    """The work of these specs of a sequence; one that cannot be captured is left out.

    Args:
        numbers: of the specs.
        seed: of the sequence.
        estimated: see `Work`; inputs are small then.
        processes: that write programs.
        walks: through each spec.
    """
    found: dict[int, tuple[KernelSpec, dict[str, Program]]] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = {pool.submit(_walk, seed, n, estimated, walk): n for walk in range(walks) for n in numbers}
        for done in as_completed(jobs):
            try:
                spec, programs = done.result()
            except QimengError as error:
                print(f"spec {jobs[done]} is left out: {error}", flush=True)
                continue
            _, known = found.setdefault(jobs[done], (spec, {}))
            known |= {program.digest: program for program in programs}
    works = []
    for n in sorted(found):
        spec, known = found[n]
        order = sorted(known)
        random.Random(f"{seed}/{n}/order").shuffle(order)
        works.append(Work(spec, tuple(known[digest] for digest in order), estimated))
    return works


def _walk(seed: int, number: int, estimated: bool, walk: int) -> tuple[KernelSpec, tuple[Program, ...]]:
    device = target_device(ESTIMATED if estimated else None)
    return programs_along(seed, number, LITTLE if estimated else LEVEL_2, device, FAMILIES, walk)


__all__ = ["ESTIMATED", "WALKS", "Work", "make_work"]
