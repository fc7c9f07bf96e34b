"""The small writer: what it learns from, numbers as expressions, training and answering, and how its patches count."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.tables import render
from experiments.writer import folder
from experiments.writer.answering import Answer, Sheet, Written, sheets
from experiments.writer.copying import CopyCoder, worth_copying
from experiments.writer.examples import Draw, Example, collect, examples_of, split, units
from experiments.writer.folder import COPIED, NEAREST, read, requests, write
from experiments.writer.judging import Batch, Judged, attempts, batches, judge, read_rows, rows_of, table
from experiments.writer.model import SIZES, encoded, kept, new_writer
from experiments.writer.resized import resized
from experiments.writer.symbolic import Code, Expressions
from experiments.writer.training import Training, train
from qimeng.bench.row import Environment
from qimeng.coder.llm.chat import ChatError, Message, Reply
from qimeng.coder.llm.reply import read_reply
from qimeng.coder.llm.shown import target_region
from qimeng.coder.llm.similar import similarity
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.session import Session
from qimeng.finetune.members import Member
from qimeng.interfaces import Action, Evaluation, Patch
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.tree_store import put_drawn, trees_of
from qimeng.planner.heuristic_facts import has_product
from qimeng.planner.lm.mini import MiniSize
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeEvaluator, fake_task
from tests.bench.inline import Inline

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
        ("k[(96, 7)](B=128)", [(300, 96)], "k[(96, 7)](B=128)"),
        ("k[(9,)](BM=128, BN=64)", [(300, 160)], "k[((300 + 127) // 128 * ((160 + 63) // 64),)](BM=128, BN=64)"),
        ("k[(99,)](BM=64, BN=32)", [(11, 130, 90)], "k[(11 * ((130 + 63) // 64 * ((90 + 31) // 32)),)](BM=64, BN=32)"),
        ("a = t % 1200", [(3, 400)], "a = t % (3 * 400)"),
        ("x = v * 0.0025", [(3, 400)], "x = v * (1 / (400))"),
        ("x = v * 0.004016064257028112", [(8, 250)], "x = v * (1 / (250 - 1))"),
        ("x = 64 + 7 + 12345", [(3, 400)], "x = 64 + 7 + 12345"),
        ("x = f(v, width=400)", [(3, 400)], "x = f(v, width=400)"),
    ],
)
def test_numbers_become_expressions(source: str, shapes: list[tuple[int, ...]], wanted: str) -> None:
    code = Code(source, tuple(shapes))
    assert Expressions.of([code]).write(code) == wanted
    assert folded(wanted) == folded(source)


def test_of_several_expressions_the_one_that_explains_most_is_written() -> None:
    """Columns, not rows, are divided into blocks here, which one code does not tell: both extents are 1000."""

    def code(rows: int, columns: int) -> Code:
        return Code(f"n = t % {-(-columns // 64)}\nk[(8,)](B=64)", ((rows, columns),))

    unclear, text = code(1000, 1000), "n = t % ((1000 + 63) // 64)"
    expressions = Expressions.of([unclear, *(code(900, 100 * n) for n in range(2, 20))])
    assert expressions.write(code(100, 1024)).splitlines()[0] == "n = t % ((1024 + 63) // 64)"
    assert expressions.write(unclear).splitlines()[0] == text
    assert expressions.write(code(1024, 2048)).splitlines()[0] == "n = t % ((2048 + 63) // 64)"


def test_numbers_of_a_group_become_expressions() -> None:
    code = Code("n = 588\nx = v * 0.0017006802721088435", ((96, 48, 49),), "group_norm(x, 4)")
    assert Expressions.of([code]).write(code) == "n = (48 * 49 // 4)\nx = v * (1 / (48 * 49 // 4))"


def test_numbers_that_can_be_copied_stay() -> None:
    code = Code("a = p * 1200", ((3, 400),), "strides (1200, 1)")
    assert Expressions.of([code]).write(code) == code.source


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


def test_chains_and_shapes_are_held_out(examples: list[Example], tmp_path: Path) -> None:
    e = min(examples, key=lambda e: len(e.answer))
    many = [
        replace(
            e, traits=replace(e.traits, ops=("add", f"op{n}")), shapes=f"Meta(shape=({m},))", prompt=("", f"{n} {m}")
        )
        for n in range(40)
        for m in range(10)
    ]
    parts = split(many)
    assert split(many) == parts and sum(map(len, (parts.learnt, parts.shapes, parts.chains))) == len(many)
    learnt = {x.chain for x in parts.learnt}
    assert {x.chain for x in parts.shapes} <= learnt and not {x.chain for x in parts.chains} & learnt
    assert not {(x.chain, x.shapes) for x in parts.shapes} & {(x.chain, x.shapes) for x in parts.learnt}
    written = write(tmp_path, many)
    for name in ("learnt", "shapes", "chains"):
        keys = sorted(e.key for e in getattr(parts, name))
        assert sorted(e.key for e in getattr(written, name)) == sorted(e.key for e in read(tmp_path, name)) == keys
    asked = requests(tmp_path, "shapes", 3)
    assert len(asked) == 3 and asked == requests(tmp_path, "shapes")[:3]
    assert 0.1 < len(parts.chains) / len(many) < 0.3 and 0.05 < len(parts.shapes) / len(many) < 0.2
    alone = replace(e, traits=replace(e.traits, ops=("add",)))
    assert not split([alone]).chains


class Slower(FakeEvaluator):
    """Takes the first alternative; programs take a millisecond and `slow` more."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = 0.0

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch.only(0) if patch else None)
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


def test_steps_are_written_again_at_other_sizes(examples: list[Example]) -> None:
    one = examples[0]
    spec = KernelSpec.from_source(one.source, "s", dtype=one.dtype, mode=one.mode)
    device, start = device_named("h200"), Program.start(capture_spec(spec))
    lowering = Action("lowering", (next(r.id for r in start.regions if has_product(r)),))
    found = list(resized(spec, [(lowering,)], device, 3))
    sources = {other.source for other, _, _ in found}
    assert 2 <= len(sources) <= 3 and spec.source not in sources
    for other, request, patch in found:
        assert other.source and other.source.partition("class")[2] == (spec.source or "").partition("class")[2]
        assert request.action == lowering and len(patch.alternatives) == 1
    first = next(resized(spec, [(lowering,)], device, 3))
    assert first[0].source == found[0][0].source and first[2].alternatives == found[0][2].alternatives


def test_tries_are_counted(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    own = [e for e in examples if e.traits.kind == "lowering"][:2]
    request = own[0].request()
    assert list(attempts(CopyCoder([(own[0].traits, own[0].answer)]), FakeEvaluator(), request, 2)) == ["passed"]
    wrong = FakeEvaluator(wrong=lambda program: "it differs")
    assert list(attempts(CopyCoder([(own[0].traits, own[0].answer)]), wrong, request, 2)) == [
        "region wrong",
        "write coder",
        "write coder",
    ]
    task = fake_task(request.program.graph)
    monkeypatch.setattr("experiments.writer.judging.make_task", lambda spec, coder, device: task)
    (batch,) = batches("shapes", own[:1], ("copy", "other"), [])
    copier = CopyCoder([(e.traits, e.answer) for e in own])
    row, other = rows_of(batch, lambda: {"copy": copier, "other": copier}, Environment("fake"))
    assert row.passed == 1 and row.tries == ("passed",) and row.error is None and other.coder == "other"
    (left,) = batches("shapes", own[:1], ("copy", "other"), [row, replace(other, error="no judge")])
    assert left.asked == ((own[0], ("other",)),)
    assert not batches("shapes", own[:1], ("copy",), [row])


def fake_rows(batch: Batch) -> list[Judged]:
    """A judge that fails where it is asked about chains."""
    if batch.part == "chains":
        raise OSError("the disk is full")
    return [
        Judged(batch.part, e.key, n, "lowering", "add", 1, ("passed",), 1.0, Environment()) for e, (n,) in batch.asked
    ]


def test_a_judge_that_fails_costs_its_own_rows(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.writer.judging.Pool", Inline)
    out, some = tmp_path / "rows.jsonl", [examples[0]]
    both = [*batches("chains", some, ("copy",), []), *batches("shapes", some, ("copy",), [])]
    judge(both, fake_rows, out)
    rows = {r.part: r for r in read_rows(out)}
    assert rows["shapes"].error is None and "the disk is full" in (rows["chains"].error or "")
    assert batches("chains", some, ("copy",), rows.values()) and not batches("shapes", some, ("copy",), rows.values())


def test_what_is_worth_copying_is_what_is_copied(examples: list[Example]) -> None:
    known, asked = examples[3:], examples[:3]
    few = list(worth_copying(known, asked, 2))
    assert 2 <= len(few) <= 6 < len(known) and len({e.key for e in few}) == len(few)
    for e in asked:
        ranked = sorted(known, key=lambda k: -similarity(e.traits, k.traits))
        assert {k.key for k in ranked[:2]} <= {k.key for k in few}
    copiers = [CopyCoder((e.traits, e.answer) for e in some) for some in (known, few)]
    assert len({c.write(asked[0].request()).alternatives[0].source for c in copiers}) == 1


def test_only_what_may_be_asked_is_kept(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, e = 12, min(examples, key=lambda e: len(e.answer))
    monkeypatch.setattr(folder, "ASKED", asked)
    many = [replace(e, shapes=f"{n}", prompt=("", f"{n}"), verified=n % 40 == 0) for n in range(200)]
    assert asked < len(split(many).shapes)
    parts = write(tmp_path, many)
    assert len(parts.shapes) == asked and len(list(read(tmp_path, "shapes"))) == asked
    assert {x.key for x in split(many).shapes if x.verified} <= {x.key for x in parts.shapes}
    assert len(list(read(tmp_path, COPIED))) == NEAREST


def test_table_of_shares(tmp_path: Path) -> None:
    rows = [
        Judged("shapes", str(n), "trained", "lowering", "add", passed, (), 1.0, Environment())
        for n, passed in enumerate((1, 1, 2, 0))
    ]
    wanted = "| shapes | trained | 4 | 50 % | 75 % |"
    assert wanted in table([*rows, replace(rows[0], error="no judge")])
    (tmp_path / "rows.jsonl").write_text("\n".join(['{"step": 50, "loss": 2.0}', *(r.to_json() for r in rows), ""]))
    assert wanted in render("<!-- bench:writer rows.jsonl -->\n<!-- /bench -->", tmp_path)


@pytest.mark.slow
def test_a_writer_learns_and_answers(examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", MiniSize(hidden=32, layers=1, heads=2, kv_heads=1, inner=64, positions=2048))
    short = sorted(examples, key=lambda e: len(e.prompt[1]) + len(e.answer))[:2]
    new, old = tmp_path / "new", tmp_path / "old"
    new_writer(short, "tiny", new, vocabulary=400)
    some, told = encoded(new, short), list[dict[str, float]]()
    how = Training(seconds=1e9, steps=40, tokens=2048, rate=1e-2)
    train(new, tmp_path / "begun", some, replace(how, steps=1), on_row=told.append)
    looks = iter([False, False, False, True])
    train(new, old, some, how, stopped=lambda: next(looks))  # ended after 24 updates, as by SIGTERM
    last = train(new, old, some, how, held_out=some, on_row=told.append)
    assert last["step"] == 40 and last["loss"] < 0.8 * told[0]["loss"] and last["examples"] == 2
    assert 0 < last["held_loss"] < told[0]["loss"] and 0 <= last["held_exact"] <= 1
    asked = list(sheets(old, short, [], repairs=1, max_tokens=8, batch=2))
    answers = [a for sheet in asked for a in sheet.answers()]
    answers += [a for sheet in sheets(old, short, answers, 1, 8, 2) for a in sheet.answers()]
    assert [a.number for a in answers] == [0, 0, 1, 1]
    right = [replace(a, reply=replace(a.reply, text=short[0].reply)) for a in answers[:2] if a.key == short[0].key]
    (left,) = sheets(old, short, [*right, *(a for a in answers[:2] if a.key != short[0].key)], 1, 8, 2)
    assert [key for key, _ in left.asked] == [short[1].key], "what was accepted wants no repair"
    long = Sheet(old, 0, 8, (("long", (Message("user", "x" * 9000),)), asked[0].asked[0]))
    assert [a.reply.finish for a in long.answers()] == ["length"] * 2 and not long.answers()[0].reply.text
    assert not list(sheets(old, short, answers, repairs=1, max_tokens=8, batch=2))
    chat = Written("old", [Answer.from_json(a.to_json()) for a in answers], short)
    texts = [next(chat.ask(short[0].messages)).text for _ in range(2)]
    assert texts == [a.reply.text for a in answers if a.key == short[0].key]
    with pytest.raises(ChatError, match="no answer number 2"):
        next(chat.ask(short[0].messages))


@pytest.fixture
def tiny(examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Example]]:
    """An untrained writer of one layer, and the four shortest examples."""
    monkeypatch.setitem(SIZES, "tiny", MiniSize(hidden=32, layers=1, heads=2, kv_heads=1, inner=32, positions=2048))
    short = sorted(examples, key=lambda e: len(e.prompt[1]) + len(e.answer))[:4]
    new_writer(short, "tiny", tmp_path / "new", vocabulary=300)
    return tmp_path / "new", short


def test_a_training_goes_on_as_if_it_had_not_ended(tiny: tuple[Path, list[Example]], tmp_path: Path) -> None:
    new, short = tiny
    made, some = (kept(tmp_path / "rows.npz", new, short) for _ in range(2))
    assert [(ids.tolist(), head) for ids, head in some] == [(ids.tolist(), head) for ids, head in made]
    how = Training(seconds=1e9, steps=16, tokens=1024, rate=1e-2)
    whole = train(new, tmp_path / "whole", some, how)
    looks = iter([False, True])
    train(new, tmp_path / "parts", some, how, stopped=lambda: next(looks))
    parts = train(new, tmp_path / "parts", some, how)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-3) and parts["step"] == whole["step"] == 16


@pytest.mark.gpu
def test_a_compiled_training_learns_the_same(tiny: tuple[Path, list[Example]], tmp_path: Path) -> None:
    new, short = tiny
    some, how = encoded(new, short), Training(seconds=1e9, steps=8, tokens=1024, rate=1e-2)
    member = Member("cuda:0" if torch.cuda.is_available() else "cpu")
    plain, compiled = (
        train(new, tmp_path / str(c), some, replace(how, compiled=c), member=member) for c in (False, True)
    )
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=2e-2)


def test_several_walks_give_more_chains_than_one() -> None:
    one, several = (examples_of(Draw(0, 2, SMALL, walks)) for walks in (1, 4))
    assert {e.key for e in one} <= {e.key for e in several}
    assert len({e.chain for e in several}) > len({e.chain for e in one})


def test_sizes_of_drawn_specs_take_turns() -> None:
    drawn = list(units((), seed=3, count=3, sizes=(SMALL, LARGER), at=1, walks=2))
    assert drawn == [Draw(3, 0, SMALL, 2), Draw(3, 1, LARGER, 2), Draw(3, 2, SMALL, 2)]
    assert len(list(units((), count=3, sizes=(SMALL, LARGER)))) == 6
