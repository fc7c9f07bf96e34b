"""What a writer's replies are worth: read, compared with what is known, screened, and judged on every GPU.

Deals in replies to examples and in verdicts. The cheap gates come first: whether a reply can be read, whether it
changes anything, whether it was judged before, and what `qimeng.finetune.screens` says. Knows nothing about how a
model is trained on grades.

The speedup is over the program before the step (Kernel-Smith), the share is that of the generated regions' own
kernels: a step that writes one region of ten is not lazy.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch

from experiments.writer.examples import Example
from experiments.writer.repairs import Says, patch_of, refused_turn
from qimeng.bench.pool import Pool
from qimeng.coder.llm.chat import ChatError, Message, Reply
from qimeng.coder.llm.coder import LLMCoder, told
from qimeng.coder.llm.shown import base_source, shown_source
from qimeng.device import Device
from qimeng.envs.steps.setup import make_task
from qimeng.errors import QimengError
from qimeng.finetune.rewards import turn_reward
from qimeng.finetune.rollout import Answered, Graded, Grader
from qimeng.finetune.screens import Screens
from qimeng.interfaces import Evaluation, Evaluator, Fault, Patch, Request
from qimeng.interfaces.records import program_from_json
from qimeng.program.program import Program
from qimeng.spec import KernelSpec

UNCHANGED = "this is the present code: nothing is changed; make the change that is asked for"

BEGIN_S, EACH_S = 90.0, 60.0
"""Seconds that a judge may take to begin, and for each reply."""

LEAST = 2
"""Replies to one request that are worth a judge of their own, where there are more judges than requests. By
estimate, a judge takes some 15 seconds to begin, and few for each reply."""

UNKNOWN = "judge"
"""Failure of a reply that could not be judged."""


@dataclass(frozen=True)
class Verdict:
    """What the gates and the judge found out about one reply.

    Attributes:
        failure: gate and class of the failure; empty where it is right.
        reason: why, in words.
        ms: device milliseconds of the program with it.
        parent_ms: of the program before.
        share: share of the generated regions' time that is their own kernels'.
        counted: whether it is the reply's verdict; False where a machine or the judge failed.
    """

    failure: str = ""
    reason: str = ""
    ms: float | None = None
    parent_ms: float | None = None
    share: float = 0.0
    counted: bool = True

    @property
    def speedup(self) -> float:
        """Over the program before; 0 where a time is missing."""
        return self.parent_ms / self.ms if self.ms and self.parent_ms and not self.failure else 0.0


@dataclass(frozen=True)
class Question:
    """Replies to one example that one judge sees.

    Attributes:
        example: what is answered.
        replies: to it.
        parent_ms: of the program before, where it is known.
    """

    example: Example
    replies: tuple[str, ...]
    parent_ms: float | None = None


def verdicts(question: Question, device: str | None = None) -> list[Verdict]:
    """The judge's verdicts on each reply.

    Args:
        question: replies that can be read.
        device: name of a device to estimate for; the GPU of this machine by default.

    Raises:
        QimengError: there is no judge for the spec.
    """
    e = question.example
    spec = KernelSpec.from_source(e.source, "asked", dtype=e.dtype, mode=e.mode)
    task = make_task(spec, coder=LLMCoder(Says(Reply(""))), device=device)  # judged as a model's are
    with closing(task.evaluator) as evaluator:
        program = program_from_json(e.program, task.start.graph)
        request = Request(program, e.action, task.context.device, e.mode)
        parent_ms = question.parent_ms or evaluator.evaluate(program).ms
        return [_verdict(evaluator, request, text, parent_ms) for text in question.replies]


def _verdict(evaluator: Evaluator, request: Request, text: str, parent_ms: float | None) -> Verdict:
    try:
        patch = patch_of(request, Reply(text))
    except QimengError as error:
        return Verdict("write coder", str(error), parent_ms=parent_ms)
    found = evaluator.evaluate(request.program, patch)
    if not found.ok:
        ours = found.fault in (Fault.MEASUREMENT, Fault.MACHINE, Fault.JUDGE)
        return Verdict(f"{found.gate.value} {found.failure}", found.error or "", parent_ms=parent_ms, counted=not ours)
    return Verdict("", "", found.ms, parent_ms, own_share(found, patch.apply(request.program, found.chosen)))


def own_share(found: Evaluation, program: Program) -> float:
    """PR of the generated regions: the measured share of generated kernels over the share that these regions have.

    0 where neither is known, or no region is generated.
    """
    total = sum(found.region_ms.values())
    own = sum(ms for r, ms in found.region_ms.items() if program.implementation(program.region(r)).generated)
    return min(1.0, (found.generated_share or 0.0) * total / own) if own else 0.0


@dataclass(frozen=True)
class Read:
    """A reply that could be read.

    Attributes:
        request: what it answers, without what was refused before.
        patch: what it means.
        key: of the request and of the patch's code.
    """

    request: Request
    patch: Patch
    key: tuple[str, str]

    @property
    def source(self) -> str:
        """The whole code, whether the reply was edits or not."""
        return shown_source(self.patch.alternatives[0])


class JudgeGrader(Grader):
    """Grades replies to examples.

    Args:
        examples: what may be asked, by key.
        device: what is written for.
        pool: of judges.
        work: `verdicts`, with its device.
        processes: compilations at once.
        stop_at: the clock's time (`time.monotonic`) after which nothing is judged, and what is being judged is cut off:
            such replies do not count.

    Attributes:
        spent: seconds of the gates that need no GPU, and of judges, since the beginning.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        device: Device,
        pool: Pool,
        work: Callable[[Question], list[Verdict]] = verdicts,
        processes: int | None = None,
        stop_at: float = math.inf,
    ):
        self._examples = {e.key: e for e in examples}
        self._pool, self._work, self._device = pool, work, device
        self._screens, self._stop_at = Screens(device, processes), stop_at
        self.spent = {"screen_s": 0.0, "judge_s": 0.0}
        self._known: dict[tuple[str, str], Verdict] = {}
        self._parents: dict[str, float] = {}  # milliseconds of the program before, by example
        self._refused: dict[tuple[str, tuple[Message, ...]], Patch] = {}  # what a conversation goes on from
        self._request = lru_cache(256)(self._captured)

    def _captured(self, key: str) -> Request:
        return replace(self._examples[key].request(), device=self._device)

    def grade(self, answers: Sequence[Answered]) -> list[Graded]:
        """The grades; replies that nothing is known about are screened together, then judged together."""
        if time.monotonic() > self._stop_at:
            return [Graded(0.0, False, failure=UNKNOWN, counted=False) for _ in answers]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # judges need memory of the same GPU
        found: dict[int, Graded] = {}
        patches: dict[int, Read] = {}
        for number, answer in enumerate(answers):
            example = self._examples[answer.key]
            reply = Reply(answer.text, finish="stop" if answer.finished else "length")
            failed = self._refused.get((answer.key, answer.messages))  # edits are of that
            try:
                request = self._request(answer.key)
                patch = patch_of(replace(request, failed=failed), reply)
            except ChatError as error:
                then = told(example.messages, reply, error)
                found[number] = Graded(0.0, False, failure=f"write {error.kind}", then=then)
                continue
            except QimengError:  # the request does not fit this version: no verdict on the reply
                found[number] = Graded(0.0, False, failure="write coder", counted=False)
                continue
            patches[number] = Read(request, patch, (answer.key, patch.alternatives[0].digest))
        began = time.monotonic()
        self._screen(patches.values())
        screened = time.monotonic()
        self._judge(patches.values())
        self.spent["screen_s"] += screened - began
        self.spent["judge_s"] += time.monotonic() - screened
        for number, read in patches.items():
            verdict = self._known.get(read.key, Verdict(UNKNOWN, counted=False))
            found[number] = self._graded(read, verdict)
        return [found[number] for number in range(len(answers))]

    def _screen(self, some: Iterable[Read]) -> None:
        """Verdicts of the gates that need no GPU, on what is not known yet."""
        new: dict[tuple[str, str], tuple[Request, Patch]] = {}
        for read in some:
            if read.key in self._known:
                continue
            if _same(read.source, base_source(read.request)):
                self._known[read.key] = Verdict("write duplicate", UNCHANGED)
            else:
                new[read.key] = read.request, read.patch
        refusals = self._screens.refusals([(request.program, patch) for request, patch in new.values()])
        for key, refusal in zip(new, refusals, strict=True):
            if refusal is not None and (refusal.lasting or refusal.failure == "timeout"):
                self._known[key] = Verdict(f"{refusal.gate.value} {refusal.failure}", refusal.error or "")

    def _judge(self, some: Iterable[Read]) -> None:
        """Verdicts of the judge, on what is not known yet."""
        new = {read.key: f"```python\n{read.source}```" for read in some if read.key not in self._known}
        questions: dict[Question, list[tuple[str, str]]] = {}
        groups = {name: list(group) for name, group in groupby(sorted(new), lambda key: key[0])}
        most = together([len(keys) for keys in groups.values()], sum(place.slots for place in self._pool.places))
        for name, keys in groups.items():
            for some_keys in (keys[n : n + most] for n in range(0, len(keys), most)):
                replies = tuple(new[key] for key in some_keys)
                questions[Question(self._examples[name], replies, self._parents.get(name))] = some_keys
        if not questions:
            return
        limit_s = BEGIN_S + EACH_S * max(len(q.replies) for q in questions)
        for outcome in self._pool.run(list(questions), self._work, limit_s, self._stop_at, self._stop_at):
            for key, verdict in zip(questions[outcome.task], outcome.result or (), strict=False):
                if verdict.parent_ms:
                    self._parents[key[0]] = verdict.parent_ms
                if verdict.counted:
                    self._known[key] = verdict

    def _graded(self, read: Read, verdict: Verdict) -> Graded:
        if not verdict.failure:
            reward = turn_reward(True, verdict.speedup, verdict.share)
            return Graded(reward, True, verdict.share, verdict.speedup)
        name, _ = read.key
        messages = self._examples[name].messages
        turn = refused_turn(read.request, messages, read.patch, verdict.reason) if verdict.counted else None
        then: tuple[Message, ...] = (*messages, *turn) if turn else ()
        if then:
            self._refused[name, then] = read.patch
        return Graded(0.0, False, failure=verdict.failure, then=then, counted=verdict.counted)


def together(replies: Sequence[int], judges: int) -> int:
    """Replies to one request that one judge sees: so few that each judge is used, so many that each begins once.

    Args:
        replies: how many there are to each request.
        judges: how many there are.
    """
    largest = max(replies, default=LEAST)
    some = (most for most in range(LEAST, largest) if sum(-(-n // most) for n in replies) <= judges)
    return next(some, max(largest, LEAST))


def _same(text: str, other: str | None) -> bool:
    """Whether two Python texts differ at most in comments and spaces."""
    try:
        return other is not None and ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))
    except RecursionError:  # nested deeper than any present code
        return False


__all__ = ["JudgeGrader", "Question", "Verdict", "own_share", "together", "verdicts"]
