"""Fakes of the three roles, so that searches, environments and planners can be tried without GPU, LLM or clock.

Deals in deterministic answers. Knows nothing about real kernels: `FakeCoder`'s "kernels" are PyTorch calls under
another name, `FakeEvaluator`'s times come from a formula. Nothing here may be used to report a speed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from qimeng.actions import MAX_ALTERNATIVES, Context, ScheduleKind, each_lowered, kind_named, rewritten
from qimeng.device import DEVICES, Device
from qimeng.envs.steps.formula import FormulaEvaluator
from qimeng.envs.steps.task import Task
from qimeng.errors import CoderError, IllegalAction
from qimeng.family import Unsupported, covering
from qimeng.graph.loops.loop import is_loop
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.interfaces import (
    Action,
    Asked,
    Coder,
    Evaluation,
    EvaluationRequest,
    Evaluator,
    Gate,
    Observation,
    Patch,
    Planner,
    Request,
)
from qimeng.program.program import Implementation, Program
from qimeng.program.schedule import Schedule
from qimeng.store import Conditions


class FakeEvaluator(FormulaEvaluator):
    """Judges by a formula that depends on the program's content alone (`FormulaEvaluator`).

    Args:
        device: whose bandwidth and rates count.
        wrong: says why a program is wrong, or None; by default every program is right.
        delay: seconds that an evaluation takes.
        spread: relative spread of every time.
        estimated: what `Timing.estimated` says.

    Attributes:
        calls: digests of the programs judged, in order; the chosen one where there was a choice.
    """

    def __init__(
        self,
        device: Device = DEVICES["h200"],
        wrong: Callable[[Program], str | None] = lambda program: None,
        delay: float = 0.0,
        spread: float = 0.002,
        estimated: bool = False,
    ):
        super().__init__(device, spread, estimated)
        self.wrong, self.delay = wrong, delay
        self.calls: list[str] = []

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Judge by `verify` for a final verification, else by `judge`: fakes of fakes replace one of the two."""
        if request.asked is Asked.FINAL:
            return self.verify(request.program)
        return self.judge(request.program, request.patch)

    def verify(self, program: Program) -> Evaluation:
        """The same as `judge`."""
        return self.judge(program)

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Judge the fastest of the alternatives that is right."""
        if self.delay:
            time.sleep(self.delay)
        found = super().judge(program, patch)
        self.calls.append((program if patch is None else patch.apply(program, found.chosen)).digest)
        return found

    def judged(self, program: Program, chosen: int = 0, count: int = 1) -> Evaluation:
        """The same by the formula, or wrong."""
        reason = self.wrong(program)
        if reason is not None:
            return Evaluation(Gate.REGION, reason, "wrong", chosen=chosen, configurations=count)
        found = super().judged(program, chosen, count)
        return replace(found, seconds={**found.seconds, "time": self.delay})


class FakeCoder(Coder):
    """Carries every action out with PyTorch calls that pass for Triton: its programs run and are right on a CPU.

    Args:
        repairs: how many times it rewrites a refused patch (with another comment) before it gives up.
    """

    schedules = True

    def __init__(self, repairs: int = 0):
        self.repairs = repairs

    def write(self, request: Request) -> Patch:
        """The patch for `request.action`.

        Raises:
            IllegalAction: the action does not apply.
            CoderError: on repair, after `repairs` attempts.
        """
        rewrite, kind, attempt = rewritten(request, self), kind_named(request.action.kind), 0
        if request.failed is not None:
            attempt = _attempt_of(request.failed) + 1
            if attempt > self.repairs:
                raise CoderError(f"given up after {self.repairs} repairs: {request.reason}")
        if rewrite.each:
            return each_lowered(request, rewrite, self)
        if rewrite.to_write is None:
            return rewrite.patch()
        region, context = rewrite.to_write, Context(request.device, self, request.mode)
        choices: Sequence[Schedule | None]
        if isinstance(kind, ScheduleKind):
            choices = kind.schedules(request.program, request.action, context)[:MAX_ALTERNATIVES]
        else:
            choices = [self._plain(region, request)]
        return rewrite.patch([fake_kernel(region, s, attempt) for s in choices], str(choices[0]))

    def _plain(self, region: Region, request: Request) -> Schedule | None:
        """The default schedule of the family that covers `region`; None where none does."""
        try:
            family, plan = covering(region)
        except Unsupported:
            return None
        found: Schedule = family.default(plan, request.device, request.mode)
        return found

    def can_implement(self, region: Region) -> str | None:
        """Anything but random and unknown operators, and at most one matrix product a region."""
        families = [category(n) for n in region.ops if not is_loop(n)]
        odd = [f for f in families if f in ("random", "other", "convolution")]
        if odd:
            return f"{odd[0]} operator"
        return "two matrix products" if families.count("gemm") > 1 else None


class ScriptedCoder(FakeCoder):
    """Answers from a script, then like `FakeCoder`.

    Args:
        answers: patches to return or errors to raise, in order.

    Attributes:
        requests: every request, in order.
    """

    def __init__(self, answers: Sequence[Patch | CoderError | IllegalAction] = (), repairs: int = 0):
        super().__init__(repairs)
        self._answers = list(answers)
        self.requests: list[Request] = []

    def write(self, request: Request) -> Patch:
        """The next answer of the script."""
        self.requests.append(request)
        if not self._answers:
            return super().write(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Patch):
            return answer
        raise answer


class ScriptedPlanner(Planner):
    """Chooses by a script, and stops after its last entry.

    An entry is an action, or the beginning of an action's text (``"fusion"``, ``"tiling taller"``); one that nothing
    fits is passed over.

    Args:
        script: the choices, in order.
    """

    def __init__(self, script: Sequence[Action | str]):
        self._script = list(script)

    def choose(self, observation: Observation) -> Action:
        """The first offered action that fits the next entry."""
        while self._script:
            entry = self._script.pop(0)
            for action in observation.actions:
                if action == entry or (isinstance(entry, str) and str(action).startswith(entry)):
                    return action
        return Action("stop")


@cache
def sample_graph() -> OpGraph:
    """The graph of ``softmax(relu(linear(x)) * 2 + 1)``, x of 4096 x 512: five operators of three families."""
    import torch

    from qimeng.graph.capture import capture

    class Sample(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(torch.relu(self.linear(x)) * 2 + 1, -1)

    return capture(Sample, lambda: (torch.empty(4096, 512),))


def fake_task(
    graph: OpGraph,
    evaluator: Evaluator | None = None,
    coder: Coder | None = None,
    device: Device = DEVICES["h200"],
    mode: str = "default",
) -> Task:
    """A task on `graph` with `FakeCoder` and `FakeEvaluator`, or with those given."""
    context = Context(device, coder or FakeCoder(), mode)
    conditions = Conditions("sample", device.name, mode, versions=(("evaluator", "fake"),))
    return Task(Program.start(graph), context, evaluator or FakeEvaluator(device), conditions, "sample")


class FakeClock:
    """A clock that goes on by `tick` seconds each time it is read."""

    def __init__(self, tick: float = 0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        """Seconds since it was made."""
        self.now += self.tick
        return self.now


def fake_kernel(region: Region, schedule: Schedule | None, attempt: int = 0) -> Implementation:
    """PyTorch calls that pass for a generated kernel under `schedule`."""
    key = hashlib.blake2b(f"{schedule} {attempt}".encode(), digest_size=4).hexdigest()
    entry = f"fake_{region.signature}_{key}"
    return Implementation(
        "triton", f"# {schedule}, attempt {attempt}\n{region.function(entry)}", entry, schedule=schedule
    )


def _attempt_of(patch: Patch) -> int:
    first = patch.alternatives[0].source.splitlines()[0] if patch.alternatives else ""
    number = first.rpartition("attempt ")[2]
    return int(number) if number.isdigit() else 0


__all__ = [
    "FakeClock",
    "FakeCoder",
    "FakeEvaluator",
    "ScriptedCoder",
    "ScriptedPlanner",
    "fake_kernel",
    "fake_task",
    "sample_graph",
]
