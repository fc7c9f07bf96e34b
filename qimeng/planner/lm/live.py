"""Live judges for training: started on first use, a few open at a time, counted against a budget.

Deals in evaluators around evaluators. Knows nothing about how a program is judged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from qimeng.device import Device
from qimeng.envs.steps.caching import UNKNOWN, CachingEvaluator, subject_of
from qimeng.envs.steps.setup import conditions_of, evaluator_kind, make_coder, make_evaluator, make_task
from qimeng.envs.steps.task import Task
from qimeng.errors import QimengError
from qimeng.interfaces import Coder, Evaluation, EvaluationRequest, Evaluator, SerialEvaluator, Ticket
from qimeng.planner.lm.stored import StoredTask
from qimeng.spec import KernelSpec
from qimeng.store import Store

OPEN = 8
"""Judges that are open at once, each with processes of its own."""


class OpenJudges:
    """Judges in the order of their last use; the one used longest ago is closed where another needs its place.

    Args:
        limit: how many are open at most.
    """

    def __init__(self, limit: int = OPEN):
        self.limit = limit
        self._open: OrderedDict[str, Evaluator] = OrderedDict()

    def __call__(self, key: str, make: Callable[[], Evaluator]) -> Evaluator:
        """The judge called `key`, made where it is not open."""
        if key not in self._open:
            while len(self._open) >= self.limit:
                self._open.popitem(last=False)[1].close()
            self._open[key] = make()
        self._open.move_to_end(key)
        return self._open[key]

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._open.popitem()[1].close()


class LateJudge(SerialEvaluator):
    """The judge that `make` makes, once it is asked.

    Args:
        key: names it among `judges`.
        make: makes it.
        judges: keeps it open.
        kind: its class, whose name, version and kind of times it goes by.
    """

    def __init__(self, key: str, make: Callable[[], Evaluator], judges: OpenJudges, kind: type[Evaluator]):
        self.key, self.make, self.judges = key, make, judges
        self._name, self.version, self.estimated = kind.__name__, kind.version, kind.estimated

    @property
    def name(self) -> str:
        """That of the judge."""
        return self._name

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """What the judge says."""
        return self.judges(self.key, self.make).ask(request)


@dataclass
class Meter:
    """A budget of evaluations. A program counts once, at its first request, whatever the source of the answer.

    Attributes:
        limit: how many; 0 for no limit.
        asked: what was asked.
    """

    limit: int = 0
    asked: set[str] = field(default_factory=set)

    @property
    def used(self) -> int:
        """Evaluations so far."""
        return len(self.asked)

    def over(self) -> bool:
        """Whether the budget is used up."""
        return 0 < self.limit <= self.used


class MeteredEvaluator(Evaluator):
    """Another evaluator, counted.

    Args:
        evaluator: answers.
        meter: counts.
        key: tells this computation's programs from others'.
    """

    def __init__(self, evaluator: Evaluator, meter: Meter, key: str):
        self.evaluator, self.meter, self.key = evaluator, meter, key

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Count the request and pass it on."""
        self.meter.asked.add(f"{self.key} {subject_of(request.program, request.patch)}")
        return self.evaluator.submit(request)

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """What the other says."""
        return self.evaluator.gather(tickets, timeout)

    def close(self) -> None:
        """Close the other."""
        self.evaluator.close()


class FirstStored(SerialEvaluator):
    """Answers from what is stored; asks the judge what is not.

    Args:
        stored: replays; what it does not know is a failure of class ``"unknown"``.
        judge: is asked then.
    """

    def __init__(self, stored: Evaluator, judge: Evaluator):
        self.stored, self.judge = stored, judge

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """The stored answer, or a new one."""
        found = self.stored.ask(request)
        if found.failure != UNKNOWN:
            return found
        return self.judge.ask(replace(request, spec=""))  # a tree may know the specification by an older digest

    def close(self) -> None:
        """Close the judge."""
        self.judge.close()


def live_tasks(
    specs: Iterable[KernelSpec],
    device: Device,
    store: Store,
    meter: Meter,
    judges: OpenJudges,
    coder: str | Coder = "template",
) -> Iterator[Task]:
    """A task for each spec that can be captured, judged on this machine, each program once.

    Specs with the structure of a problem that planners are judged on are left out.
    """
    from qimeng.planner.data.overlap import reserved
    from qimeng.planner.data.signature import structure

    for spec in specs:
        try:
            task = make_task(
                spec, coder=coder, evaluator=LateJudge("", _never, judges, evaluator_kind(device)), device=device
            )
        except QimengError:
            continue
        if task.start.fallback or structure(task.start.graph) in reserved():
            continue
        cached = CachingEvaluator(_late(spec, task, judges), store, task.conditions)
        yield replace(task, evaluator=MeteredEvaluator(cached, meter, task.conditions.digest))


def mixed_task(
    stored: StoredTask, device: Device, store: Store, meter: Meter, judges: OpenJudges, coder: str | Coder = "template"
) -> Task:
    """The task of a tree; this machine's judge answers what the tree lacks, and the answers go to `store`.

    Today's coder writes the patches: one that differs from the tree's is judged like any other new one.

    Raises:
        ValueError: the judge's times are not of the tree's kind (another device, or estimates beside measured ones).
    """
    spec, tree = stored.tree.spec(), stored.task.conditions
    task = replace(stored.task, context=replace(stored.task.context, device=device, coder=make_coder(coder)))
    judge = _late(spec, task, judges)
    live = conditions_of(spec, judge, device)
    if (live.device, live.estimated) != (tree.device, tree.estimated):
        kinds = [f"{c.device}, {'estimated' if c.estimated else 'measured'}" for c in (tree, live)]
        raise ValueError(f"the tree of {stored.tree.name} has times of {kinds[0]}; here they would be of {kinds[1]}")
    cached = CachingEvaluator(judge, store, live)
    return replace(task, evaluator=FirstStored(task.evaluator, MeteredEvaluator(cached, meter, live.digest)))


def _late(spec: KernelSpec, task: Task, judges: OpenJudges) -> LateJudge:
    make, device = partial(make_evaluator, spec, task.start, task.context), task.context.device
    return LateJudge(f"{spec.digest} {device.name} {task.context.mode}", make, judges, evaluator_kind(device))


def _never() -> Evaluator:
    raise AssertionError("stands in until the computation is captured")


__all__ = [
    "OPEN",
    "FirstStored",
    "LateJudge",
    "Meter",
    "MeteredEvaluator",
    "OpenJudges",
    "live_tasks",
    "mixed_task",
]
