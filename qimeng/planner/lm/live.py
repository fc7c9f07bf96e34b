"""Live judges for training: started on first use, a few open at a time, counted against a budget.

Deals in evaluators around evaluators. Knows nothing about how a program is judged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from qimeng.device import Device
from qimeng.envs.steps.caching import UNKNOWN, CachingEvaluator, subject_of
from qimeng.envs.steps.setup import conditions_of, evaluator_kind, make_coder, make_evaluator, make_task
from qimeng.envs.steps.task import Task
from qimeng.errors import QimengError
from qimeng.interfaces import Coder, Evaluation, EvaluationRequest, Evaluator, Ticket
from qimeng.planner.lm.stored import StoredTask
from qimeng.spec import KernelSpec
from qimeng.store import Conditions, Store

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


class LateJudge(Evaluator):
    """The judge that `make` makes, once it is asked. What was asked of one that was closed meanwhile is asked again.

    Args:
        key: names it among `judges`.
        make: makes it.
        judges: keeps it open.
        kind: its class, whose name, version and kind of times it goes by.
        at_once: see `Evaluator`.
    """

    def __init__(
        self, key: str, make: Callable[[], Evaluator], judges: OpenJudges, kind: type[Evaluator], at_once: int = 1
    ):
        self.key, self.make, self.judges = key, make, judges
        self._name, self.version, self.estimated, self.at_once = kind.__name__, kind.version, kind.estimated, at_once
        self._asked: dict[Ticket, tuple[Evaluator, Ticket]] = {}

    @property
    def name(self) -> str:
        """That of the judge."""
        return self._name

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Pass the request on."""
        judge, ticket = self.judges(self.key, self.make), Ticket(request)
        self._asked[ticket] = judge, judge.submit(request)
        return ticket

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """What the judge says."""
        judge, waiting = self.judges(self.key, self.make), dict[Ticket, Ticket]()
        for ticket in tickets:
            asked, inner = self._asked[ticket]
            if asked is not judge:
                inner = judge.submit(ticket.request)
                self._asked[ticket] = judge, inner
            waiting[inner] = ticket
        for inner, found in judge.gather(list(waiting), timeout):
            del self._asked[waiting[inner]]
            yield waiting[inner], found


@dataclass
class Meter:
    """A budget of evaluations. A program counts once, at its first answer, whatever the source of the answer.

    Attributes:
        limit: how many; 0 for no limit.
        file: keeps what was answered, so that a run that was interrupted goes on with the rest of its budget.
        answered: what was asked and answered. A start program that was submitted ahead and never needed is not in it.
    """

    limit: int = 0
    file: Path | None = None
    answered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.is_file():
            self.answered.update(self.file.read_text().splitlines())

    def count(self, key: str) -> None:
        """Count a program that was answered, by what tells it from others."""
        if key in self.answered:
            return
        self.answered.add(key)
        if self.file is not None:
            with open(self.file, "a") as kept:
                kept.write(f"{key}\n")

    @property
    def used(self) -> int:
        """Evaluations so far."""
        return len(self.answered)

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
        self.evaluator, self.meter, self.key, self.at_once = evaluator, meter, key, evaluator.at_once

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Pass the request on."""
        return self.evaluator.submit(request)

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """What the other says, counted."""
        for ticket, found in self.evaluator.gather(tickets, timeout):
            self.meter.count(f"{self.key} {subject_of(ticket.request.program, ticket.request.patch)}")
            yield ticket, found

    def close(self) -> None:
        """Close the other."""
        self.evaluator.close()


class FirstStored(Evaluator):
    """Answers from what is stored; asks the judge what is not.

    Args:
        stored: replays; what it does not know is a failure of class ``"unknown"``.
        judge: is asked then.
    """

    def __init__(self, stored: Evaluator, judge: Evaluator):
        self.stored, self.judge, self.at_once = stored, judge, judge.at_once
        self._known: dict[Ticket, Evaluation] = {}
        self._asked: dict[Ticket, Ticket] = {}

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Look the request up; pass it on where nothing is stored."""
        ticket, found = Ticket(request), self.stored.ask(request)
        if found.failure != UNKNOWN:
            self._known[ticket] = found
        else:  # a tree may know the specification by an older digest
            self._asked[ticket] = self.judge.submit(replace(request, spec=""))
        return ticket

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """Stored answers first, then new ones."""
        waiting = {self._asked[ticket]: ticket for ticket in tickets if ticket in self._asked}
        for ticket in tickets:
            if ticket in self._known:
                yield ticket, self._known.pop(ticket)
        for inner, found in self.judge.gather(list(waiting), timeout) if waiting else ():
            del self._asked[waiting[inner]]
            yield waiting[inner], found

    def close(self) -> None:
        """Close the judge."""
        self.judge.close()


@dataclass(frozen=True)
class Elsewhere:
    """Where live judges work that are not of this machine, such as on a cluster (`qimeng.cluster.judging`).

    Attributes:
        device: that they judge for.
        versions: of what judges there, for the keys of the store.
        make: makes the judge of a spec.
        at_once: environments whose steps are judged beside each other (`Evaluator.at_once`).
    """

    device: Device
    versions: tuple[tuple[str, str], ...]
    make: Callable[[KernelSpec], Evaluator]
    at_once: int = 2

    def conditions(self, spec: KernelSpec) -> Conditions:
        """What the findings about `spec` depend on."""
        return Conditions(spec.digest, self.device.name, spec.mode, not self.device.measured, self.versions)


def live_tasks(
    specs: Iterable[KernelSpec],
    device: Device,
    store: Store,
    meter: Meter,
    judges: OpenJudges,
    coder: str | Coder = "template",
    elsewhere: Elsewhere | None = None,
) -> Iterator[Task]:
    """A task for each spec that can be captured, judged on this machine or elsewhere, each program once.

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
        conditions = task.conditions if elsewhere is None else elsewhere.conditions(spec)
        cached = CachingEvaluator(_late(spec, task, judges, elsewhere), store, conditions)
        yield replace(task, evaluator=MeteredEvaluator(cached, meter, conditions.digest), conditions=conditions)


def mixed_task(
    stored: StoredTask,
    device: Device,
    store: Store,
    meter: Meter,
    judges: OpenJudges,
    coder: str | Coder = "template",
    elsewhere: Elsewhere | None = None,
) -> Task:
    """The task of a tree; a judge answers what the tree lacks, and the answers go to `store`.

    Today's coder writes the patches: one that differs from the tree's is judged like any other new one.

    Raises:
        ValueError: the judge's times are not of the tree's kind (another device, or estimates beside measured ones).
    """
    spec, tree = stored.tree.spec(), stored.task.conditions
    task = replace(stored.task, context=replace(stored.task.context, device=device, coder=make_coder(coder)))
    judge = _late(spec, task, judges, elsewhere)
    live = conditions_of(spec, judge, device) if elsewhere is None else elsewhere.conditions(spec)
    if (live.device, live.estimated) != (tree.device, tree.estimated):
        kinds = [f"{c.device}, {'estimated' if c.estimated else 'measured'}" for c in (tree, live)]
        where = "here" if elsewhere is None else "there"
        raise ValueError(f"the tree of {stored.tree.name} has times of {kinds[0]}; {where} they would be of {kinds[1]}")
    cached = CachingEvaluator(judge, store, live)
    return replace(task, evaluator=FirstStored(task.evaluator, MeteredEvaluator(cached, meter, live.digest)))


def _late(spec: KernelSpec, task: Task, judges: OpenJudges, elsewhere: Elsewhere | None) -> LateJudge:
    device = task.context.device
    make, at_once = partial(make_evaluator, spec, task.start, task.context), 1
    if elsewhere is not None:
        make, at_once = partial(elsewhere.make, spec), elsewhere.at_once
    return LateJudge(f"{spec.digest} {device.name} {task.context.mode}", make, judges, evaluator_kind(device), at_once)


def _never() -> Evaluator:
    raise AssertionError("stands in until the computation is captured")


__all__ = [
    "OPEN",
    "Elsewhere",
    "FirstStored",
    "LateJudge",
    "Meter",
    "MeteredEvaluator",
    "OpenJudges",
    "live_tasks",
    "mixed_task",
]
