"""The LLM coder in the loop: what needs no model, repairs, several answers, budgets, the store, a kill at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.coder.llm.account import Account, Allowance, Prices
from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.coder.llm.coder import LLMCoder
from qimeng.coder.llm.replies import RecordedChat
from qimeng.envs.screening.origin import is_sweep
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Gate, Patch
from qimeng.interfaces.records import program_from_json
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program, torch_implementation
from qimeng.store import Store
from qimeng.testing import FakeClock, FakeEvaluator, ScriptedPlanner, fake_task, sample_graph
from tests.coder.llm.scripted import ScriptedChat, kernel


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


def started(
    graph: OpGraph, chat: Chat, repairs: int = 2, evaluator: FakeEvaluator | None = None, **parts: object
) -> Session:
    task = fake_task(graph, evaluator, LLMCoder(chat, **parts))  # type: ignore[arg-type]
    session = Session(task, Budget(1e9, 1000, 1000, repairs))
    session.begin()
    return session


def first(session: Session, text: str) -> Action:
    return next(a for a in session.observe().actions if str(a).startswith(text))


def wrong_with(remark: str) -> FakeEvaluator:
    return FakeEvaluator(wrong=lambda p: f"wrong because of {remark}" if remark in p.source else None)


# ---- what is asked


def test_changes_of_the_graph_need_no_model(graph: OpGraph) -> None:
    chat = ScriptedChat(kernel())
    session = started(graph, chat)
    assert session.step(first(session, "fusion")).accepted and not chat.asked
    assert session.step(first(session, "lowering")).accepted and len(chat.asked) == 1
    assert session.step(first(session, "unfuse")).accepted and len(chat.asked) == 1


def test_a_kernel_without_a_schedule_is_taken_up_again(graph: OpGraph) -> None:
    """Intents on its schedule are legal in words, and go to the model; so does lowering it afresh."""
    chat = ScriptedChat(kernel("one"), kernel("two"), kernel("three"))
    session = started(graph, chat)
    relu = next(r for r in session.state.program.regions if r.label() == "relu")
    session.step(Action("lowering", (relu.id,)))
    kinds = {a.kind for a in session.observe().actions if a.regions == (relu.id,)}
    assert {"lowering", "tiling", "pipeline", "vectorization"} <= kinds
    assert session.step(Action("tiling", (relu.id,), "taller")).accepted
    assert "taller" in chat.asked[1][1].text and "# one" in chat.asked[1][1].text
    assert session.step(Action("lowering", (relu.id,))).accepted
    assert "# three" in session.state.program.source and "# two" not in session.state.program.source
    refused = session.step(Action("tiling", ("r00000000",), "taller"))
    assert refused.evaluation is not None and refused.evaluation.failure == "illegal"


def test_a_refused_kernel_is_repaired(graph: OpGraph) -> None:
    chat = ScriptedChat(kernel("bug"), kernel("good"))
    session = started(graph, chat, evaluator=wrong_with("bug"))
    assert session.step(first(session, "lowering")).accepted
    *_, said, told = chat.asked[1]
    assert (said.role, told.role) == ("assistant", "user")
    assert "# bug" in said.text and "wrong because of bug" in told.text


def test_repairs_end(graph: OpGraph) -> None:
    chat = ScriptedChat(*[kernel(f"bug {n}") for n in range(9)])
    session = started(graph, chat, evaluator=wrong_with("bug"))
    action = first(session, "lowering")
    step = session.step(action)
    assert not step.accepted and len(chat.asked) == 3 and step.evaluation is not None
    assert step.evaluation.failure == "wrong"
    assert action in session.ledger.refused[session.state.program.digest]


def test_the_same_answer_twice_is_no_repair(graph: OpGraph) -> None:
    chat = ScriptedChat(kernel("bug"), kernel("bug"), kernel("good"))
    session = started(graph, chat, evaluator=wrong_with("bug"))
    assert not session.step(first(session, "lowering")).accepted and len(chat.asked) == 2


def test_an_answer_that_cannot_be_read_is_asked_for_again(graph: OpGraph) -> None:
    chat = ScriptedChat("Let me think.", Reply("", finish="length"), kernel())
    session = started(graph, chat, again=2)
    assert session.step(first(session, "lowering")).accepted
    assert chat.asked[1][-2:][0] == Message("assistant", "Let me think.")
    assert "no code" in chat.asked[1][-1].text
    roles = [m.role for m in chat.asked[2]]
    assert roles[1:] == ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]  # templates want turns
    assert session.task.context.coder.memory.remarks()[0].endswith("cut-off 1, format 1")


@pytest.mark.parametrize("kind", ["rate-limit", "timeout", "connection", "authentication", "refusal", "setup"])
def test_what_the_model_lacks_masks_nothing(kind: str, graph: OpGraph) -> None:
    chat = ScriptedChat(ChatError("no", kind), kernel())
    session = started(graph, chat)
    action, start = first(session, "lowering"), session.state
    step = session.step(action)
    assert not step.accepted and step.evaluation is not None
    assert (step.evaluation.gate, step.evaluation.failure) == (Gate.WRITE, f"model-{kind}")
    assert not step.evaluation.lasting and not session.ledger.refused
    assert action not in session.observe().actions  # not at once again
    session.return_to(start)
    assert session.step(action).accepted


def test_a_repair_that_the_model_does_not_give_leaves_the_question_open(graph: OpGraph) -> None:
    session = started(graph, ScriptedChat(kernel("bug"), ChatError("no", "timeout")), evaluator=wrong_with("bug"))
    step = session.step(first(session, "lowering"))
    assert step.evaluation is not None and step.evaluation.failure == "wrong" and not session.ledger.refused


# ---- several answers


def test_the_best_of_several_answers(graph: OpGraph) -> None:
    chat = ScriptedChat(kernel("bug"), "no code", kernel("b"), kernel("b"))
    session = started(graph, chat, evaluator=wrong_with("bug"), candidates=4)
    step = session.step(first(session, "lowering"))
    assert step.accepted and step.evaluation is not None
    assert step.evaluation.configurations == 2 and "# b\n" in session.state.program.source


def test_the_reason_is_about_the_alternative_that_is_shown(graph: OpGraph) -> None:
    class Second(FakeEvaluator):
        """Refuses every patch for what is wrong with its second alternative."""

        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            if patch is None or len(patch.alternatives) < 2:
                return super().judge(program, patch)
            return Evaluation(Gate.REGION, "the second is wrong", "wrong", chosen=1)

    chat = ScriptedChat(kernel("one"), kernel("two"), kernel("three"), kernel("three"))
    session = started(graph, chat, evaluator=Second(), candidates=2)
    assert session.step(first(session, "lowering")).accepted
    assert "# two" in chat.asked[2][-2].text and "# one" not in chat.asked[2][-2].text


def test_alternatives_of_a_model_are_no_sweep(graph: OpGraph) -> None:
    session = started(graph, ScriptedChat(kernel("a"), kernel("b")), candidates=2)
    from qimeng.interfaces import Request

    context = session.task.context
    patch = context.coder.write(Request(session.state.program, first(session, "lowering"), context.device))
    assert len(patch.alternatives) == 2 and not is_sweep(session.state.program, patch)
    region = session.state.program.regions[0]
    assert is_sweep(session.state.program, Patch(None, region.id, (torch_implementation(region),)))
    with pytest.raises(ValueError, match="from 1 to 8"):
        LLMCoder(ScriptedChat(), candidates=9)


# ---- budgets


MESSAGES = [Message("user", "x" * 400)]


def spend(account: Account, script: Sequence[Reply], count: int = 1, store: Store | None = None) -> tuple[int, str]:
    """Ask until the budget is used up; how many answers there were, and what was said then."""
    chat, given = RecordedChat(ScriptedChat(*script), account, store), 0
    try:
        for number in range(100):
            given += len(list(chat.ask([*MESSAGES, Message("user", str(number))], count)))
    except ChatError as error:
        assert error.kind == "budget" and not error.passing
        return given, str(error)
    return given, ""


def test_budgets() -> None:
    script = [Reply("y", 100, 10, 0.5)] * 100
    assert spend(Account(Allowance(calls=7)), script) == (7, "the model's budget is used up: 7 of 7 calls")
    assert spend(Account(Allowance(calls=7)), script, 3)[0] == 7  # never more calls
    assert spend(Account(Allowance(tokens=400)), script) == (4, "the model's budget is used up: 440 of 400 tokens")
    priced = Account(Allowance(money=0.01), Prices(prompt=10.0, reply=100.0))
    assert spend(priced, script) == (5, "the model's budget is used up: 0.01 of 0.01 money")
    assert str(priced) == "5 answers (0 from the store), 550 tokens, 2.5 s, 0.0100 spent in all, 0.0100 now; budget 1"
    assert spend(Account(Allowance(calls=0)), script)[0] == 0


def test_tokens_that_nobody_counts_are_estimated() -> None:
    account = Account()
    account.add(MESSAGES, Reply("y" * 41))
    assert (account.prompt_tokens, account.reply_tokens) == (100, 11)


def test_money_needs_prices() -> None:
    with pytest.raises(ValueError, match="needs the prices"):
        Account(Allowance(money=1.0))


def test_a_budget_ends_the_model_and_not_the_run(graph: OpGraph) -> None:
    chat = ScriptedChat(*[kernel(str(n)) for n in range(9)])
    coder = LLMCoder(chat, Account(Allowance(calls=2)))
    result = optimize(fake_task(graph, coder=coder), GreedySearch(ScriptedPlanner(["lowering"] * 9)))
    assert len(chat.asked) == 2 and result.speedup is not None
    failures = [s.evaluation.failure for s in result.steps if s.evaluation and not s.accepted]
    assert set(failures) == {"model-budget"}
    assert result.notes[-1].startswith("fake:model: 2 answers (0 from the store), 220 tokens, 1.0 s; budget")


def test_a_slow_model_is_not_begun_with_what_it_cannot_end(graph: OpGraph) -> None:
    clock = FakeClock()

    class Slow(ScriptedChat):
        def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = 0.0) -> Iterable[Reply]:
            clock.now += 30.0
            return super().ask(messages, count)

    task = fake_task(graph, coder=LLMCoder(Slow(kernel("a"), kernel("b"))))
    session = Session(task, Budget(seconds=50.0), clock=clock)
    session.begin()
    assert session.exhausted() is None
    assert session.step(first(session, "lowering")).accepted
    assert session.exhausted() == "seconds"


# ---- the store


def test_a_run_repeats_itself_without_the_model(graph: OpGraph, tmp_path: Path) -> None:
    def run(chat: Chat) -> tuple[list[str], Account]:
        coder = LLMCoder(chat, candidates=2)
        store = Store(tmp_path / "s.sqlite")
        coder.memory.use_store(store, "sample")
        task = fake_task(graph, wrong_with("bug"), coder)
        result = optimize(task, GreedySearch(ScriptedPlanner(["lowering"] * 4)), store=store)
        return [s.patch_digest for s in result.steps], coder.account

    script = [kernel("bug"), "no code", kernel("a"), kernel("b"), "Hm.", "Well.", *map(kernel, "cdefgh")]
    steps, account = run(ScriptedChat(*script))
    again, replayed = run(ScriptedChat())
    assert again == steps and len(set(steps)) == len(steps) >= 4
    assert replayed.calls == replayed.replayed == account.calls and replayed.seconds == 0
    assert (replayed.tokens, account.replayed) == (account.tokens, 0)


def test_other_settings_are_another_question() -> None:
    store, seen = Store(), set()
    for name, settings in (("m", "{}"), ("n", "{}"), ("m", '{"temperature": 0}')):
        chat = ScriptedChat(kernel())
        chat.name, chat.settings = name, settings
        recorded = RecordedChat(chat, Account(), store)
        list(recorded.ask(MESSAGES))
        seen.add(recorded.question(MESSAGES, 0))
    assert len(seen) == 3 == store.counts()["replies"]


def test_answers_that_are_missing_are_asked_for() -> None:
    """Numbers go on where the store ends; what failed is asked for again."""
    store = Store()
    chat = ScriptedChat("a", ChatError("no", "timeout"), "b", "c")
    recorded = RecordedChat(chat, Account(), store)
    assert [r.text for r in recorded.ask(MESSAGES, 3)] == ["a"]
    assert [r.text for r in recorded.ask(MESSAGES, 3)] == ["a", "b", "c"]
    assert [r.text for r in recorded.ask(MESSAGES, 3)] == ["a", "b", "c"]
    assert len(chat.asked) == 4 and recorded.account.failures == {"timeout": 1}


def test_attempts_merge(graph: OpGraph) -> None:
    stores = [Store(), Store()]
    for number, store in enumerate(stores):
        session = started(graph, ScriptedChat(kernel(str(number))))
        session.store = store
        session.task.context.coder.memory.use_store(store, "sample")
        session.step(first(session, "lowering"))
    stores[0].merge(stores[1])
    found = stores[0].attempts()
    assert len(found) == 2 == stores[0].counts()["replies"]
    assert all(stores[0].attempts(a.patch) == (a,) and stores[0].patch(a.patch or "") for a in found)
    step = stores[0].steps(parent=found[0].parent)[0]
    assert program_from_json((stores[0].program(step.child or "") or ("", ""))[0], graph).implementations


def test_a_store_of_version_1_is_extended(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = Store(path)
    store.put_spec("s", "softmax")
    store._db.executescript("DROP TABLE replies; DROP TABLE attempts; PRAGMA user_version = 1")
    store.close()
    assert Store(path).spec("s") == ("softmax", "") and Store(path).counts()["replies"] == 0


KILLED = """
import os, signal, sys
from qimeng.coder.llm.account import Account
from qimeng.coder.llm.chat import Chat, Message, Reply
from qimeng.coder.llm.replies import RecordedChat
from qimeng.store import Store

store, bill = sys.argv[1:]

class Paid(Chat):
    name, settings = "m", "{}"
    def ask(self, messages, count=1, limit_s=0.0):
        for _ in range(count):
            with open(bill, "a") as file:
                file.write(messages[0].text + "\\n")
            yield Reply(f"answer to {messages[0].text}")

def run(stop):
    seen = []
    chat = RecordedChat(Paid(), Account(), Store(store))
    for question in "abc":
        for reply in chat.ask([Message("user", question)], 2):
            seen.append(reply.text)
            if len(seen) == stop:
                os.kill(os.getpid(), signal.SIGKILL)
    print(seen, flush=True)
    os._exit(0)

for stop in 1, 4, 0:
    pid = os.fork()
    if pid == 0:
        run(stop)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_a_killed_run_pays_nothing_twice(tmp_path: Path) -> None:
    """Killed the moment the first, then the fourth answer is seen; then run to its end."""
    bill = tmp_path / "bill"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s.sqlite"), str(bill)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=os.getcwd(), timeout=120)
    assert done.returncode == 0, done.stderr
    killed = str(int(signal.SIGKILL))
    assert done.stdout.split("\n")[:-1] == [killed, killed, str([f"answer to {q}" for q in "aabbcc"]), "0"]
    assert bill.read_text().split() == list("aabbcc")


def test_the_same_model_is_shared_by_copies(graph: OpGraph) -> None:
    import copy

    coder = LLMCoder(ScriptedChat())
    assert copy.deepcopy(coder) is coder and repr(coder) == "LLMCoder('fake:model')"
    assert json.dumps([*coder.memory.remarks()]) == "[]"


def test_random_and_empty_regions_are_left_alone(graph: OpGraph) -> None:
    from qimeng.graph.region import make_region

    coder = LLMCoder(ScriptedChat())
    region = Program.start(graph).regions[1]
    assert coder.can_implement(region) is None
    name = region.nodes[0]
    for target, told in (("aten.bernoulli.default", "random"), ("aten.view.default", "nothing is computed")):
        nodes = {**graph.nodes, name: replace(graph.nodes[name], target=target)}
        found = coder.can_implement(make_region(replace(graph, nodes=nodes), [name]))
        assert told in (found or "")
