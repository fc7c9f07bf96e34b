"""What an evaluation costs: its seconds by part, and how many there are in an hour.

Deals in drawn specs of the size of KernelBench's level 2, several programs for each, and what the evaluator says of its
own time. Knows nothing about files of rows or tables.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.trust.journal import Data
from experiments.trust.programs import make_subject
from qimeng.device import Device
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.errors import QimengError
from qimeng.planner.data.generate import Bytes
from qimeng.program.program import Program

FAMILIES = ("product", "gated", "block")
"""Families that level 2 consists of: products with an epilogue, and chains."""
LEVEL_2 = Bytes(64 << 20, 512 << 20)
"""Bytes of inputs and parameters: 1024 x 8192 by 8192 x 8192 in fp32, a size of level 2, are 320 MiB."""
LITTLE = Bytes(1 << 16, 1 << 20)
"""Where only the judge itself is tried, on the CPU."""


@dataclass(frozen=True)
class Plan:
    """What is evaluated.

    Attributes:
        device: ``"cpu"`` (programs on PyTorch only, which tries the judge and says nothing of a GPU) or ``"cuda"``.
        target: the device that kernels are printed for.
        seed: of the specs and programs.
        programs: evaluated for each spec.
        sandbox: level of the workers' sandbox.
    """

    device: str
    target: Device
    seed: int = 0
    programs: int = 6
    sandbox: str = "full"

    @property
    def sizes(self) -> Bytes:
        """Bytes of a spec's inputs and parameters."""
        return LITTLE if self.device == "cpu" else LEVEL_2


def spec_key(plan: Plan, number: int) -> str:
    """Key of the row of spec `number`."""
    return f"{plan.seed}-{number}"


def evaluate_spec(plan: Plan, number: int) -> list[Data]:
    """The rows of one spec: one for each evaluation, then one for the making of its evaluator."""
    key = spec_key(plan, number)
    own: Data = {"key": key, "what": "spec", "device": plan.device, "began": time.time()}
    try:
        rows = list(_evaluations(plan, number, own))
    except QimengError as error:
        return [{**own, "left_out": str(error)[:300], "ended": time.time()}]
    return [*rows, {**own, "ended": time.time()}]


def _evaluations(plan: Plan, number: int, own: Data) -> Iterator[Data]:
    first = make_subject(plan.seed, number, plan.sizes, plan.target, FAMILIES)
    own |= {"spec": first.spec.name, "family": first.family, "dtype": first.spec.dtype, "mode": first.spec.mode}
    own["bytes"] = sum(m.bytes for n in first.graph.nodes.values() if n.kind != "op" for m in n.metas if m)
    began = time.monotonic()
    evaluator = GpuEvaluator(first.spec, first.graph, torch_device=plan.device, sandbox=plan.sandbox)
    own["setup_s"] = round(time.monotonic() - began, 3)
    try:
        for place in range(plan.programs):
            program = Program.start(first.graph)
            if plan.device == "cuda" and place:
                program = make_subject(plan.seed, number, plan.sizes, plan.target, FAMILIES, place).program
            began = time.monotonic()
            found = evaluator.evaluate(program)
            yield {
                "key": f"{spec_key(plan, number)}-{place}",
                "what": "evaluation",
                "device": plan.device,
                "spec": first.spec.name,
                "start": place == 0,
                "gate": found.gate.value,
                "failure": found.failure,
                "error": (found.error or "")[:400],
                "ms": found.ms,
                "eager_ms": found.eager.device_ms if found.eager else None,
                "parts": {part: round(s, 4) for part, s in found.seconds.items()},
                "seconds": round(time.monotonic() - began, 3),
                "sandbox": found.sandbox,
            }
    finally:
        evaluator.close()


__all__ = ["FAMILIES", "LEVEL_2", "Plan", "evaluate_spec", "spec_key"]
