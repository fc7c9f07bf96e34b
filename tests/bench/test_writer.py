"""The small writer: what it learns from, numbers as expressions, training and answering, and how its patches count."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.bench.row import Environment
from qimeng.bench.writer.examples import Draw, Example, collect, examples_of, split
from qimeng.bench.writer.judging import CopyCoder, Judged, attempts, judge, read_rows, table
from qimeng.bench.writer.model import SIZES, Training, WriterChat, new_writer, train
from qimeng.bench.writer.symbolic import symbolic
from qimeng.coder.llm.chat import Reply
from qimeng.coder.llm.reply import read_reply
from qimeng.coder.llm.shown import target_region
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.replay import CachingEvaluator
from qimeng.envs.session import Session
from qimeng.graph.verify import capture_spec
from qimeng.interfaces import Evaluation, Patch
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.tree import put_drawn, trees_of
from qimeng.planner.lm.mini import MiniSize
from qimeng.program.program import Program
from qimeng.store import Conditions, Store
from qimeng.testing import FakeEvaluator, fake_task

SMALL, LARGER = Bytes(1 << 14, 1 << 16), Bytes(1 << 18, 1 << 20)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return list(collect([Draw(0, 1, sizes) for sizes in (SMALL, LARGER)]))


class Folded(ast.NodeTransformer):
    """Computes what consists of constants."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node = ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))
        if isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            return ast.Constant(eval(ast.unparse(node)))
        return node


def folded(source: str) -> str:
    return ast.dump(Folded().visit(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "shapes", "wanted"),
    [
        ("k[(96, 7)](BM=128)", [(300, 96)], "k[(96, 7)](BM=128)"),
        ("k[(9,)](BM=128, BN=64)", [(300, 160)], "k[((300 + 127) // 128 * ((160 + 63) // 64),)](BM=128, BN=64)"),
        ("a = t % 1200", [(3, 400)], "a = t % (3 * 400)"),
        ("x = v * 0.0025", [(3, 400)], "x = v * (1 / (400))"),
        ("x = 64 + 7 + 12345", [(3, 400)], "x = 64 + 7 + 12345"),
    ],
)
def test_numbers_become_expressions(source: str, shapes: list[tuple[int, ...]], wanted: str) -> None:
    assert symbolic(source, shapes) == wanted
    assert folded(wanted) == folded(source)


def test_numbers_that_can_be_copied_stay() -> None:
    assert symbolic("a = p * 1200", [(3, 400)], "strides (1200, 1)") == "a = p * 1200"


def test_examples_say_the_same_as_the_template_coder(examples: list[Example]) -> None:
    assert len(examples) > 10 and not any(e.verified for e in examples)
    assert len({e.key for e in examples}) == len(examples)
    assert any("// " in e.answer for e in examples)
    for e in examples[:4]:
        assert Example.from_json(e.to_json()) == e
        request = e.request()
        read = read_reply(Reply(f"```python\n{e.answer}```"), target_region(request))
        assert read.language == "triton"
        assert "[data " in e.prompt[1] and len(e.prompt[0]) < 20


def test_chains_and_shapes_are_held_out(examples: list[Example]) -> None:
    e = examples[0]
    many = [
        replace(e, traits=replace(e.traits, ops=("add", f"op{n}")), shapes=f"{m}", prompt=("", f"{n} {m}"))
        for n in range(40)
        for m in range(20)
    ]
    parts = split(many)
    assert split(many) == parts and sum(map(len, (parts.learnt, parts.shapes, parts.chains))) == len(many)
    learnt = {x.chain for x in parts.learnt}
    assert {x.chain for x in parts.shapes} <= learnt and not {x.chain for x in parts.chains} & learnt
    assert not {(x.chain, x.shapes) for x in parts.shapes} & {(x.chain, x.shapes) for x in parts.learnt}
    assert 0.1 < len(parts.chains) / len(many) < 0.3 and 0.05 < len(parts.shapes) / len(many) < 0.2
    alone = replace(e, traits=replace(e.traits, ops=("add",)))
    assert not split([alone]).chains


class Slower(FakeEvaluator):
    """Takes the first alternative; programs take a millisecond and `slow` more."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = 0.0

    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().evaluate(program, patch.only(0) if patch else None)
        assert found.timing is not None
        return replace(found, timing=replace(found.timing, device_ms=1.0 + self.slow))


def test_only_right_and_faster_steps_are_learnt() -> None:
    drawn = draw(0, 1, SMALL)
    store, evaluator = Store(), Slower()
    put_drawn(store, drawn)
    task = fake_task(capture_spec(drawn.spec, verify=False), evaluator, TemplateCoder(), mode=drawn.spec.mode)
    task = replace(task, conditions=Conditions(drawn.spec.digest, "h200", drawn.spec.mode))
    session = Session(replace(task, evaluator=CachingEvaluator(evaluator, store, task.conditions)), store=store)
    session.begin()
    lowering = next(a for a in session.observe().actions if a.kind == "lowering")
    session.step(lowering)
    for slow in (1.0, -0.5):
        evaluator.slow = slow
        later = [a for a in session.observe().actions if a.regions == lowering.regions and a.kind != "library"]
        tried = {s.action.kind for s in session.state.history}
        session.step(next(a for a in later if a.kind not in {"unfuse", "fusion", *tried}))
    (tree,) = trees_of(store)
    found = examples_of(tree)
    accepted = [s for s in session.state.history if s.accepted]
    assert len(accepted) == 3 and all(e.verified for e in found)
    assert [e.action for e in found] == [accepted[0].action, accepted[2].action]


def test_tries_are_counted(examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [e for e in examples if e.traits.kind == "lowering"][:2]
    request = own[0].request()
    assert list(attempts(CopyCoder(own[:1]), FakeEvaluator(), request, 2)) == ["passed"]
    wrong = FakeEvaluator(wrong=lambda program: "it differs")
    assert list(attempts(CopyCoder(own[:1]), wrong, request, 2)) == ["region wrong", "write coder", "write coder"]
    task = fake_task(request.program.graph)
    monkeypatch.setattr("qimeng.bench.writer.judging.make_task", lambda spec, device: task)
    for _ in range(2):
        judge("shapes", own[:1], {"copy": CopyCoder(own)}, tmp_path / "rows.jsonl", Environment("fake"))
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row.passed == 1 and row.tries == ("passed",) and row.error is None


def test_table_of_shares() -> None:
    rows = [
        Judged("shapes", str(n), "trained", "lowering", "add", passed, (), 1.0, Environment())
        for n, passed in enumerate((1, 1, 2, 0))
    ]
    assert "| shapes | trained | 4 | 50% | 75% |" in table([*rows, replace(rows[0], error="no judge")])


def test_a_writer_learns_and_answers(examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", MiniSize(hidden=32, layers=1, heads=2, kv_heads=1, inner=64, positions=2048))
    short = sorted(examples, key=lambda e: len(e.prompt[1]) + len(e.answer))[:2]
    new_writer(short, "tiny", tmp_path / "new", vocabulary=400)
    rows: list[dict[str, float]] = []
    how = Training(seconds=1e9, steps=50, tokens=2048, rate=1e-2)
    train(tmp_path / "new", tmp_path / "old", short, replace(how, steps=1), on_row=rows.append)
    train(tmp_path / "new", tmp_path / "old", short, how, on_row=rows.append)
    assert rows[1]["loss"] < 0.8 * rows[0]["loss"] and rows[1]["examples"] == 2
    chat = WriterChat(tmp_path / "old", max_tokens=8, batch=2, device="cpu", temperature=2.0)
    chat.prepare([e.messages for e in short], draws=1)
    answers = [next(chat.ask(short[0].messages)).text for _ in range(3)]
    again = WriterChat(tmp_path / "old", max_tokens=8, batch=2, device="cpu", temperature=2.0)
    assert next(again.ask(short[0].messages)).text == answers[0] and len(set(answers)) > 1
