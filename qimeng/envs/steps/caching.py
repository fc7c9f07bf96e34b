"""Evaluators and a coder that answer from what is stored.

Deals in look-ups by content hash. Knows nothing about how an evaluation was made. With them planners train, tests run
and interrupted searches resume without touching a GPU again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qimeng.errors import CoderError, RequestError
from qimeng.graph.region import Region
from qimeng.interfaces import (
    Asked,
    Coder,
    EngineReport,
    Evaluation,
    EvaluationRequest,
    Evaluator,
    Gate,
    Patch,
    Request,
    Scope,
    SerialEvaluator,
    Ticket,
)
from qimeng.store import ACCIDENT, Conditions, Store, subject_of

FINAL = "final"
_PURPOSES = {Asked.TIMING: "step", Asked.CHECK: "check", Asked.REGION: "region"}
UNKNOWN = "unknown"
"""Class of the failure that stands for an evaluation that is not stored; asking again is of no use."""


@dataclass(frozen=True, eq=False)
class _Ticket(Ticket):
    """A request to a `CachingEvaluator`.

    Attributes:
        known: the stored answer.
        inner: the inner evaluator's ticket, where nothing is stored.
    """

    known: Evaluation | None = None
    inner: Ticket | None = None


class CachingEvaluator(Evaluator):
    """Asks the store first; what had to be judged is in the store, durably, before it is returned.

    So a request that is submitted again has the same answer. A failure that may be an accident (out of time, out of
    memory, a process that died) is recorded there, but not taken for an answer: the program is judged again. A final
    verification answers only for the same modes of torch.compile and the same tools of compute-sanitizer. A patch that
    was judged on its region answers for every program with an equal region.

    Args:
        evaluator: judges what the store does not know.
        store: where evaluations are kept.
        conditions: what they depend on besides the program.

    Attributes:
        hits: evaluations that the store knew.
    """

    def __init__(self, evaluator: Evaluator, store: Store, conditions: Conditions):
        self.evaluator, self.store, self.conditions = evaluator, store, conditions
        self.version, self.estimated = evaluator.version, evaluator.estimated
        self.at_once = evaluator.at_once
        self.hits = 0

    @property
    def name(self) -> str:
        """That of the inner evaluator."""
        return self.evaluator.name

    @property
    def report(self) -> EngineReport:
        """That of the inner evaluator, with the answers that came from the store."""
        report = self.evaluator.report
        return replace(report, stored=report.stored + self.hits)

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Look the request up; pass it on where nothing is stored."""
        asked = [request] if request.asked is not Asked.REGION else [request, replace(request, asked=Asked.TIMING)]
        found = (self.store.evaluation(self.conditions, *self._key(each)) for each in asked)
        known = next((evaluation for evaluation in found if evaluation is not None), None)
        if known is not None:
            return _Ticket(request, known)
        return _Ticket(request, inner=self.evaluator.submit(request))

    @property
    def prepares(self) -> bool:
        """As it says."""
        return self.evaluator.prepares

    def prepare(self, request: EvaluationRequest) -> None:
        """Passed on."""
        self.evaluator.prepare(request)

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """Stored answers first, then new ones as they come, each stored before it is given."""
        waiting: dict[Ticket, _Ticket] = {}
        for ticket in tickets:
            if not isinstance(ticket, _Ticket):
                raise RequestError("a ticket of another evaluator")
            if ticket.known is not None:
                self.hits += 1
                yield ticket, ticket.known
            elif ticket.inner is not None:
                waiting[ticket.inner] = ticket
        if not waiting:
            return
        for inner, evaluation in self.evaluator.gather(list(waiting), timeout):
            ticket = waiting[inner]
            self._keep(ticket.request, evaluation)
            yield ticket, evaluation

    def close(self) -> None:
        """Give back the inner evaluator's processes."""
        self.evaluator.close()

    def _key(self, request: EvaluationRequest) -> tuple[str, str]:
        """What is judged, and for what purpose, as the store is asked."""
        if request.asked is Asked.REGION:
            return request.region_subject, _PURPOSES[request.asked]
        subject = subject_of(request.program, request.patch)
        if request.asked is not Asked.FINAL:
            return subject, _PURPOSES[request.asked]
        if self.conditions.estimated:  # an estimate runs no kernel, with tools or without
            return subject, FINAL
        modes, tools = (sorted(set(names)) for names in (request.options.compile_modes, request.options.sanitize))
        return " ".join((subject, *modes, *tools)), FINAL

    def _keep(self, request: EvaluationRequest, evaluation: Evaluation) -> None:
        if request.asked is Asked.REGION and evaluation.scope is not Scope.REGION:
            request = replace(request, asked=Asked.TIMING)  # the whole program was judged
        program, patch = request.program, request.patch
        subject, purpose = self._key(request)
        subjects = [subject]
        if request.asked is Asked.FINAL:
            subjects = list(dict.fromkeys((subject_of(program, patch), subject)))
        for name in subjects:
            self.store.put_evaluation(self.conditions, name, evaluation, purpose)
        if patch is not None and len(patch.alternatives) > 1 and evaluation.ok and request.asked is not Asked.FINAL:
            chosen, _ = self._key(replace(request, patch=patch.only(evaluation.chosen)))
            self.store.put_evaluation(self.conditions, chosen, replace(evaluation, chosen=0), purpose)


class ReplayEvaluator(SerialEvaluator):
    """Answers only what is stored, so that the same question always has the same answer.

    What is not stored comes back as a failure of class ``"unknown"``: the action is refused, never guessed. An accident
    is an answer here, where nothing better is stored.

    Args:
        source: a store, or a mapping from what was judged (`subject_of`) to its evaluation.
        conditions: under which the store's evaluations were made; needed with a store.
    """

    def __init__(self, source: Store | Mapping[str, Evaluation], conditions: Conditions | None = None):
        if isinstance(source, Store):
            if conditions is None:
                raise ValueError("a store holds evaluations of many conditions; say which")
            found = [e for e in source.evaluations() if e[0] == conditions]
            self._known = {s: e for _, purpose, s, e in found if purpose == ACCIDENT}
            self._known |= {s: e for _, purpose, s, e in found if purpose not in (ACCIDENT, FINAL)}
            self._final = {s: e for _, purpose, s, e in found if purpose == FINAL}
        else:
            self._known, self._final = dict(source), {}

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """The stored evaluation, or a failure of class ``"unknown"``.

        For a final verification that is not stored, the evaluation of the program stands.
        """
        subject = subject_of(request.program, request.patch)
        if request.asked is Asked.REGION and request.region_subject in self._known:
            return self._known[request.region_subject]
        final = self._final.get(subject) if request.asked is Asked.FINAL else None
        return final or self._look_up(self._known, subject)

    def _look_up(self, table: Mapping[str, Evaluation], subject: str) -> Evaluation:
        found = table.get(subject)
        return found or Evaluation(Gate.WRITE, f"no stored evaluation of {subject}", UNKNOWN)


class ReplayCoder(Coder):
    """Writes the patches that were written before, in the order of their digests, repairs included.

    Args:
        store: holds the tree of trajectories.
        conditions: under which they were made.
        coder: says what can be implemented; its `write` is never called.
    """

    def __init__(self, store: Store, conditions: Conditions, coder: Coder):
        self.store, self.conditions, self.coder = store, conditions, coder
        self.schedules = coder.schedules

    def write(self, request: Request) -> Patch:
        """The stored patch for this program and action; on repair, the next one.

        Raises:
            CoderError: none is stored, or none is left.
        """
        graph = request.program.graph
        steps = self.store.steps(self.conditions, request.program.digest)
        digests = list(dict.fromkeys(s.patch for s in steps if s.action == request.action and s.patch is not None))
        records = [r for r in map(self.store.patch, digests) if r is not None]
        patches = [r.patch(graph) for r in records]
        if request.failed is not None and request.failed in patches:
            patches = patches[patches.index(request.failed) + 1 :]
        if not patches:
            raise CoderError(f"no stored patch for {request.action} on program {request.program.digest}")
        return patches[0]

    def can_implement(self, region: Region) -> str | None:
        """What the inner coder says."""
        return self.coder.can_implement(region)


__all__ = ["FINAL", "UNKNOWN", "CachingEvaluator", "ReplayCoder", "ReplayEvaluator", "subject_of"]
