"""Grades of replies: the cheap gates first, a judge for what they leave, and what a conversation goes on with."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.writer import grading
from experiments.writer.edits import edits_of
from experiments.writer.examples import Draw, Example, examples_of
from experiments.writer.grading import JudgeGrader, Question, Verdict, own_share, together, verdicts
from qimeng.bench.pool import Place
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.steps.task import Task
from qimeng.finetune.rollout import Answered, Graded
from qimeng.interfaces import Action, Evaluation, Gate, Request
from qimeng.planner.data.generate import Bytes
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.testing import FakeEvaluator, fake_task
from tests.bench.inline import Inline

H200 = device_named("h200")


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return [e for n in range(2) for e in examples_of(Draw(n, 1, Bytes(1 << 14, 1 << 16)))]


class Counting(Inline):
    """A pool that remembers what it was asked."""

    def __init__(self, answer: Callable[[Question], list[Verdict]], slots: int = 1):
        super().__init__([Place("", slots)])
        self.asked: list[Question] = []
        self.answer = answer

    def run(self, tasks, work, *unused, **limits):  # type: ignore[no-untyped-def]
        self.asked += tasks
        return super().run(tasks, self.answer, *unused, **limits)


def right(question: Question) -> list[Verdict]:
    return [Verdict("", "", 1.0, 2.0, 0.5) for _ in question.replies]


class Passes:
    """Screens that refuse nothing."""

    def __init__(self, *unused: object) -> None:
        pass

    def refusals(self, some: list[object]) -> list[None]:
        return [None] * len(some)


def grades(pool: Counting, examples: list[Example], *replies: tuple[Example, str]) -> tuple[JudgeGrader, list[Graded]]:
    grader = JudgeGrader(examples, H200, pool)  # type: ignore[arg-type]
    return grader, grader.grade([Answered(e.key, e.messages, text, True, n) for n, (e, text) in enumerate(replies)])


@pytest.mark.slow
def test_replies_meet_the_cheap_gates_first(examples: list[Example]) -> None:
    tiling = next(e for e in examples if e.traits.kind in ("tiling", "vectorization", "pipeline"))
    lowering = next(e for e in examples if e.traits.kind == "lowering")
    present = tiling.prompt[1].split("```python\n")[-1].split("```")[0]
    pool = Counting(right)
    grader, found = grades(
        pool,
        examples,
        (lowering, lowering.reply),
        (lowering, "I would write a kernel."),
        (lowering, lowering.reply.replace("tl.store", "tl.put")),
        (lowering, lowering.reply),
        (tiling, f"```python\n{present}```"),
        (tiling, tiling.reply),
    )
    assert [g.failure for g in found] == ["", "write format", "compile compile", "", "write duplicate", ""]
    assert [g.reward for g in found] == [3.5, 0, 0, 3.5, 0, 3.5] and found[0].speedup == 2.0 and found[0].share == 0.5
    assert sorted(len(q.replies) for q in pool.asked) == [1, 1], "equal replies are judged once"
    assert all(g.counted for g in found) and not found[0].then
    assert found[1].then[-1].text.startswith("Your answer cannot be used: ") and len(found[1].then) == 4
    assert "tl.put" in found[2].then[-1].text and "tl.put" in found[2].then[-2].text
    assert grading.UNCHANGED in found[4].then[-1].text
    before = len(pool.asked)
    again = grader.grade([Answered(lowering.key, found[1].then, lowering.reply, True)])
    assert again[0].reward == 3.5 and len(pool.asked) == before
    (cut,) = grader.grade([Answered(lowering.key, lowering.messages, lowering.reply, False)])
    assert cut.failure == "write cut-off" and not cut.right


def test_what_a_machine_failed_counts_for_nothing(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "Screens", Passes)
    lowering = next(e for e in examples if e.traits.kind == "lowering")

    def fails(question: Question) -> list[Verdict]:
        raise OSError("the disk is full")

    _, (found,) = grades(Counting(fails), examples, (lowering, lowering.reply))
    assert not found.counted and not found.right and not found.then
    late = Counting(lambda question: [Verdict("region late", "no time", counted=False)])
    _, (found,) = grades(late, examples, (lowering, lowering.reply))
    assert not found.counted and not found.then
    wrong = Counting(lambda question: [Verdict("region wrong", "output 0 differs by 3")])
    _, (found,) = grades(wrong, examples, (lowering, lowering.reply))
    assert found.counted and "output 0 differs by 3" in found.then[-1].text


def test_one_request_or_reply_that_cannot_be_taken_ends_no_run(
    examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "Screens", Passes)
    lowering, other = [e for e in examples if e.traits.kind == "lowering"][:2]
    gone = replace(other, program=other.program.replace('"nodes": ["', '"nodes": ["gone", "', 1))
    entry = re.search(r"def region\(.*\):\n", lowering.answer)
    assert entry is not None
    nested = "    if 1: pass\n" + "    elif 1: pass\n" * 300
    deep = lowering.answer.replace(entry[0], entry[0] + nested)
    some = [(gone, gone.reply), (lowering, f"```python\n{deep}```"), (lowering, lowering.reply)]
    _, found = grades(Counting(right), [lowering, gone], *some)
    assert not found[0].counted and found[1].right and found[2].right


def test_nothing_is_judged_after_the_end(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "Screens", Passes)
    lowering = next(e for e in examples if e.traits.kind == "lowering")
    limits: list[tuple[float, ...]] = []

    class Remembers(Counting):
        def run(self, tasks, work, *some, **more):  # type: ignore[no-untyped-def]
            limits.append(some)
            return super().run(tasks, work, *some, **more)

    pool, now = Remembers(right), time.monotonic()
    answers = [Answered(lowering.key, lowering.messages, lowering.reply, True)]
    soon = JudgeGrader([lowering], H200, pool, stop_at=now + 60)  # type: ignore[arg-type]
    assert soon.grade(answers)[0].right and limits[0][1:] == (now + 60, now + 60)
    (late,) = JudgeGrader([lowering], H200, pool, stop_at=now).grade(answers)  # type: ignore[arg-type]
    assert not late.counted and not late.then and len(limits) == 1


def test_replies_to_one_request_are_judged_side_by_side(
    examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "Screens", Passes)
    first, second = [e for e in examples if e.traits.kind == "lowering"][:2]
    some = [(first, first.reply.replace("num_warps=", f"num_stages={n}, num_warps=")) for n in range(1, 8)]
    for slots, sizes in ((1, [7, 1]), (4, [3, 3, 1, 1]), (99, [2, 2, 2, 1, 1])):
        pool = Counting(right, slots)
        _, found = grades(pool, [first, second], *some, (second, second.reply))
        assert all(g.right for g in found)
        assert sorted((len(q.replies) for q in pool.asked), reverse=True) == sizes


@pytest.mark.parametrize(
    ("replies", "judges", "most"),
    [
        ([8] * 4, 40, 2),
        ([8] * 24, 40, 8),
        ([8] * 20, 40, 4),
        ([8] * 50, 40, 8),
        ([5, 1, 1], 4, 3),
        ([1], 4, 2),
        ([], 4, 2),
    ],
)
def test_no_judge_begins_twice_where_that_can_be(replies: list[int], judges: int, most: int) -> None:
    assert together(replies, judges) == most


def test_what_takes_too_long_to_compile_meets_no_judge(
    examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Passes):
        def refusals(self, some: list[object]) -> list[Any]:
            return [Evaluation(Gate.COMPILE, failure="timeout", error="not compiled within 30 s") for _ in some]

    monkeypatch.setattr(grading, "Screens", Slow)
    lowering = next(e for e in examples if e.traits.kind == "lowering")
    pool = Counting(right)
    _, (found,) = grades(pool, examples, (lowering, lowering.reply))
    assert found.failure == "compile timeout" and found.counted and not pool.asked


def test_edits_are_of_the_code_that_was_refused(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "Screens", Passes)
    lowering = next(e for e in examples if e.traits.kind == "lowering")
    broken = lowering.answer.replace("num_warps=", "num_stages=7, num_warps=")

    def judged(question: Question) -> list[Verdict]:
        return [
            Verdict("region wrong", "it differs", parent_ms=2.0) if "=7" in r else right(question)[0]
            for r in question.replies
        ]

    pool = Counting(judged)
    grader, (found,) = grades(pool, examples, (lowering, f"```python\n{broken}```"))
    assert found.failure == "region wrong"
    shown = found.then[-2].text.removeprefix("```python\n").removesuffix("```")
    edits = edits_of(shown.replace("num_stages=7, ", ""), shown)
    assert edits is not None
    (second,) = grader.grade([Answered(lowering.key, found.then, edits, True)])
    assert [q.parent_ms for q in pool.asked] == [None, 2.0]
    assert second.right and pool.asked[-1].replies[0].startswith("```python\n")
    (lost,) = grader.grade([Answered(lowering.key, lowering.messages, edits, True)])
    assert lost.failure == "write format", "there the text to search for is missing"


def test_verdicts_of_a_judge(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = next(e for e in examples if e.traits.kind == "lowering")

    def task_of(evaluator: FakeEvaluator) -> Callable[..., Task]:
        return lambda spec, coder, device: fake_task(lowering.request().program.graph, evaluator)

    monkeypatch.setattr(grading, "make_task", task_of(FakeEvaluator()))
    one, unread = verdicts(Question(lowering, (lowering.reply, "no code")))
    assert not one.failure and one.share == pytest.approx(1.0) and one.speedup > 0
    assert unread.failure == "write coder" and unread.speedup == 0
    monkeypatch.setattr(grading, "make_task", task_of(FakeEvaluator(wrong=lambda program: "it differs")))
    (found,) = verdicts(Question(lowering, (lowering.reply,)))
    assert found == Verdict("region wrong", "it differs")
    monkeypatch.setattr(grading, "make_task", task_of(FakeEvaluator()))
    (again,) = verdicts(Question(lowering, (lowering.reply,), parent_ms=7.0))
    assert again.parent_ms == 7.0, "what is known is not measured again"


def test_the_share_is_that_of_the_generated_regions() -> None:
    """Two regions, 1 and 3 ms; the first is generated, which claims a quarter; its kernels have a tenth of all."""
    spec = KernelSpec.from_module(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), (torch.randn(8, 64),))
    start = Program.start(capture_spec(spec))
    request = Request(start, Action("lowering", (start.regions[-1].id,)), H200)
    program = TemplateCoder().write(request).apply(start)
    generated = [r.id for r in program.regions if program.implementation(r).generated]
    plain = [r.id for r in program.regions if r.id not in generated]
    times = {generated[0]: 1.0, plain[0]: 3.0}
    found = Evaluation(Gate.PASSED, region_ms=times, generated_share=0.25)
    assert own_share(found, program) == pytest.approx(1.0)
    assert own_share(replace(found, generated_share=0.1), program) == pytest.approx(0.4)
    assert own_share(replace(found, region_ms={plain[0]: 1.0}), program) == 0
    assert own_share(found, Program.start(program.graph)) == 0
