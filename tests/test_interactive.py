"""`--interactive` by script: what is shown, what each answer does, and what of it is in the result."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from qimeng.cli import main
from qimeng.cli_interactive import Interactive, line_reader
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Planner
from qimeng.testing import FakeClock, FakeEvaluator, ScriptedCoder, ScriptedPlanner, fake_task, sample_graph

FUSE, LOWER = "fusion", "lowering"


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


class Person:
    """Answers from a script and keeps what was shown."""

    def __init__(self, *answers: str):
        self.answers, self.shown = list(answers), [""]

    def ask(self, question: str) -> str | None:
        self.shown.append(question)
        return self.answers.pop(0) if self.answers else None

    def search(self, planner: Planner) -> Interactive:
        return Interactive(planner, self.ask, self.shown.append)

    @property
    def text(self) -> str:
        return "\n".join(self.shown)


def run(graph: OpGraph, person: Person, *script: str, coder: ScriptedCoder | None = None, wrong: str = "") -> Result:
    evaluator = FakeEvaluator(wrong=lambda p: "it differs" if wrong and wrong in p.source else None)
    task = fake_task(graph, evaluator, coder or ScriptedCoder())
    return optimize(task, person.search(ScriptedPlanner(script)), Budget(1e9, 40))


def kinds(result: Result) -> list[str]:
    return [s.action.kind for s in result.recipe.steps]


def test_accepted_steps_are_taken(graph: OpGraph) -> None:
    person = Person("", "a", "yes")
    result = run(graph, person, LOWER, LOWER)
    assert [(s.action.kind, s.accepted) for s in result.steps] == [(LOWER, True), (LOWER, True), ("stop", True)]
    assert result.stopped == "stop"
    assert "+def fake_" in person.text and "right: " in person.text and "x as fast" in person.text
    assert "The planner proposes to stop" in person.text


def test_a_skipped_step_is_no_part_of_the_result(graph: OpGraph) -> None:
    result = run(graph, Person("skip", "q"), LOWER)
    assert kinds(result) == [] and "triton" not in result.source
    assert [s.accepted for s in result.steps] == [False, True]
    assert "turned down by the user (skip)" in result.report()


def test_a_skipped_action_is_not_proposed_again(graph: OpGraph) -> None:
    session = Session(fake_task(graph), Budget(1e9, 40))
    before = session.observe().actions
    Person("s").search(ScriptedPlanner([LOWER])).run(session)
    assert len(session.observe().actions) == len(before) - 1
    assert session.ledger.best is not None and session.ledger.best.record is None


def test_another_action_from_the_list(graph: OpGraph) -> None:
    actions = Session(fake_task(graph), Budget()).observe().actions
    number = next(n for n, a in enumerate(actions, 1) if a.kind == FUSE)
    person = Person("list", "9999", str(number), "a", "q")
    result = run(graph, person, LOWER)
    assert [s.action.kind for s in result.steps][:2] == [LOWER, FUSE]
    assert f"{number:4}  fusion" in person.text and "there is no action 9999" in person.text


def test_an_instruction_reaches_the_coder_with_the_same_action(graph: OpGraph) -> None:
    coder = ScriptedCoder()
    run(graph, Person("i use two stages", "a", "q"), LOWER, coder=coder)
    assert [r.instruction for r in coder.requests[:2]] == ["", "use two stages"]
    assert coder.requests[0].action == coder.requests[1].action and coder.requests[1].history


def test_a_refused_step_is_shown_with_its_reason(graph: OpGraph) -> None:
    coder, person = ScriptedCoder(), Person("i mind the mask", "s", "q")
    result = run(graph, person, LOWER, coder=coder, wrong="fake_")
    assert "refused (gate region): it differs" in person.text and kinds(result) == []
    told = next(r for r in coder.requests if r.instruction == "mind the mask")
    assert told.history[-1].evaluation is not None and told.history[-1].evaluation.error == "it differs"


def test_no_answers_left_ends_it(graph: OpGraph) -> None:
    person = Person("what?", "d")
    result = run(graph, person, LOWER)
    assert kinds(result) == [] and result.stopped == "stop"
    assert "'what?' is not an answer" in person.text and "no more answers" in person.text


def test_time_to_think_is_free(graph: OpGraph) -> None:
    clock = FakeClock()

    def ask(question: str) -> str:
        clock.now += 1000
        return "a"

    session = Session(fake_task(graph), Budget(100, 40), clock=clock)
    Interactive(ScriptedPlanner([LOWER, LOWER]), ask, lambda text: None, clock).run(session)
    assert len(session.state.recipe()) == 2 and session.ledger.seconds_left > 99


def test_answers_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\n"))
    shown: list[str] = []
    ask = line_reader(shown.append)
    assert [ask("one? "), ask("two? "), ask("three? ")] == ["a", "", None]
    assert shown[0] == "one? a"


def test_it_takes_the_place_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parent.parent / "examples" / "softmax_problem.py"
    with pytest.raises(SystemExit):
        main(["optimize", str(example), "--interactive", "--search", "beam", "--out", str(tmp_path)])
    assert "leave out --search beam" in capsys.readouterr().err
