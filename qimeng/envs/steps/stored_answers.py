"""Evaluators and a coder that answer from what is stored.

Deals in look-ups by content hash. Knows nothing about how an evaluation was made. With them planners train, tests run
and interrupted searches resume without touching a GPU again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qimeng.errors import CoderError
from qimeng.graph.region import Region
from qimeng.interfaces import Coder, Evaluation, Evaluator, Gate, Patch, Request
from qimeng.program.program import Program
from qimeng.store import ACCIDENT, Conditions, Store, subject_of

FINAL = "final"
UNKNOWN = "unknown"
"""Class of the failure that stands for an evaluation that is not stored; asking again is of no use."""


class CachingEvaluator(Evaluator):
    """Asks the store first; what had to be judged is in the store, durably, before it is returned.

    A failure that may be an accident (out of time, out of memory, a process that died) is recorded there, but not taken
    for an answer: the program is judged again.

    Args:
        evaluator: judges what the store does not know.
        store: where evaluations are kept.
        conditions: what they depend on besides the program.

    Attributes:
        hits: evaluations that the store knew.
    """

    def __init__(self, evaluator: Evaluator, store: Store, conditions: Conditions):
        self.evaluator, self.store, self.conditions = evaluator, store, conditions
        self.hits = 0
        self._modes: frozenset[str] = frozenset()
        self._tools: tuple[str, ...] = ()

    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """The stored evaluation, or a new one."""
        subject = subject_of(program, patch)
        known = self.store.evaluation(self.conditions, subject)
        if known is not None:
            self.hits += 1
            return known
        evaluation = self.evaluator.evaluate(program, patch)
        self.store.put_evaluation(self.conditions, subject, evaluation)
        if patch is not None and len(patch.alternatives) > 1 and evaluation.ok:
            chosen = patch.apply(program, evaluation.chosen).digest
            self.store.put_evaluation(self.conditions, chosen, replace(evaluation, chosen=0))
        return evaluation

    def final(self, program: Program) -> Evaluation:
        """The stored final verification beside the same modes of torch.compile, or a new one.

        One with tools of compute-sanitizer answers only for the same tools.
        """
        subject = " ".join((program.digest, *sorted(self._modes), *self._tools))
        known = self.store.evaluation(self.conditions, subject, FINAL)
        if known is not None:
            self.hits += 1
            return known
        evaluation = self.evaluator.final(program)
        for s in dict.fromkeys((program.digest, subject)):
            self.store.put_evaluation(self.conditions, s, evaluation, FINAL)
        return evaluation

    def compare_with(self, modes: Sequence[str], limit_s: float) -> None:
        """Pass it on; estimates have no such baselines."""
        if not self.conditions.estimated:
            self._modes = frozenset(modes)
        self.evaluator.compare_with(modes, limit_s)

    def sanitize_with(self, tools: Sequence[str]) -> None:
        """Pass it on; an estimate runs no kernel, with tools or without."""
        if not self.conditions.estimated:
            self._tools = tuple(sorted(set(tools)))
        self.evaluator.sanitize_with(tools)

    def close(self) -> None:
        """Give back the inner evaluator's processes."""
        self.evaluator.close()


class ReplayEvaluator(Evaluator):
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

    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """The stored evaluation, or a failure of class ``"unknown"``."""
        return self._look_up(self._known, subject_of(program, patch))

    def final(self, program: Program) -> Evaluation:
        """The stored final verification, else the stored evaluation."""
        return self._final.get(program.digest) or self._look_up(self._known, program.digest)

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
