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
from qimeng.device import DEVICES, Device, target_device
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.steps.setup import make_task
from qimeng.errors import QimengError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import EvaluationRequest, Evaluator
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.testing import FakeEvaluator

WALKS = 8
"""Through each spec; a walk has some ten programs."""
FAKE_S = 0.2
"""Seconds of an evaluation that is only played."""


@dataclass(frozen=True)
class Work:
    """One spec and the programs that are evaluated for it.

    Attributes:
        spec: the spec.
        programs: without repetition, in an order by chance, so that any part of them is like the whole.
        fake: whether evaluations are only played (`qimeng.testing`), to try a script without a GPU.
    """

    spec: KernelSpec
    programs: tuple[Program, ...]
    fake: bool

    @property
    def requests(self) -> list[EvaluationRequest]:
        """As a search asks: is it right, and how fast."""
        return [EvaluationRequest(program) for program in self.programs]

    @property
    def make(self) -> partial[tuple[Evaluator, OpGraph]]:
        """Makes the judge, in the process that it works in."""
        return partial(_fake_of if self.fake else _judge_of, self.spec.to_bytes())

    @property
    def kind(self) -> type[Evaluator]:
        """The judge's class."""
        return FakeEvaluator if self.fake else GpuEvaluator


def _judge_of(spec: bytes) -> tuple[Evaluator, OpGraph]:
    task = make_task(KernelSpec.from_bytes(spec), device="cuda")
    return task.evaluator, task.start.graph


def _fake_of(spec: bytes) -> tuple[Evaluator, OpGraph]:
    return FakeEvaluator(device_of(True), delay=FAKE_S), capture_spec(KernelSpec.from_bytes(spec))


def device_of(fake: bool) -> Device:
    """The device that kernels are written for."""
    return DEVICES["h100"] if fake else target_device()


def make_work(numbers: Sequence[int], seed: int, fake: bool, processes: int, walks: int = WALKS) -> list[Work]:
    """The work of these specs of a sequence; one that cannot be captured is left out.

    Args:
        numbers: of the specs.
        seed: of the sequence.
        fake: see `Work`; inputs are small then.
        processes: that write programs.
        walks: through each spec.
    """
    found: dict[int, tuple[KernelSpec, dict[str, Program]]] = {}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = {pool.submit(_walk, seed, n, fake, walk): n for walk in range(walks) for n in numbers}
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
        works.append(Work(spec, tuple(known[digest] for digest in order), fake))
    return works


def _walk(seed: int, number: int, fake: bool, walk: int) -> tuple[KernelSpec, tuple[Program, ...]]:
    return programs_along(seed, number, LITTLE if fake else LEVEL_2, device_of(fake), FAMILIES, walk)


__all__ = ["FAKE_S", "WALKS", "Work", "device_of", "make_work"]
