"""Trees in a small file say what the store says."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.bench.collect import STORE, merge, put_drawn, read_texts
from qimeng.bench.explore import Explored, explore
from qimeng.cli_collect import export
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.task import Task
from qimeng.errors import QimengError
from qimeng.graph.device_strides import heads_inside, with_strides
from qimeng.interfaces import Action, Evaluation, Gate, Planner
from qimeng.planner.climb import HillClimb
from qimeng.planner.data.generate import Bytes, Drawn, draw
from qimeng.planner.data.tree import Tree, TreeError
from qimeng.planner.data.tree_file import describe, read_trees, write_trees
from qimeng.planner.data.tree_store import compact, trees_of
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.random import RandomPlanner
from qimeng.program.identity import IDENTITY
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.store import Conditions, Store, StoredStep, content_hash, evaluation_key
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task

LITTLE = Bytes(1 << 12, 1 << 14)


def fake(drawn: Drawn, store: Store, device: str = "h200") -> Task:
    def wrong(program: Program) -> str | None:
        return "off by one " * 100 if len(program.regions) == 2 and "triton" in program.source else None

    task = fake_task(capture_spec(drawn.spec, verify=False))
    conditions = Conditions(drawn.spec.digest, device, drawn.spec.mode, versions=(("evaluator", "fake"),))
    judge = CachingEvaluator(FakeEvaluator(wrong=wrong), store, conditions)
    return replace(task, conditions=conditions, evaluator=judge)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("tree") / "store.sqlite")
    for index in (0, 3, 4):
        drawn = draw(11, index, LITTLE)
        put_drawn(made, drawn)
        row = Explored(drawn.spec.digest, drawn.spec.name, drawn.family, 11, index, "h200", asked=25)
        explore(fake(drawn, made), row, made, seconds=60.0)
    return made


@pytest.fixture(scope="module")
def file(store: Store) -> Path:
    path = Path(store.path).with_name("trees.jsonl.xz")
    write_trees(store, path)
    return path


def test_what_is_written_is_read(store: Store, file: Path) -> None:
    read = {t.name: t for t in read_trees(file)}
    assert read == {t.name: t for t in trees_of(store)}
    assert [t.index for t in read_trees(file)] == [0, 3, 4]
    for tree in read.values():
        assert tree.index is not None
        assert tree.spec() == draw(11, tree.index, LITTLE).spec


def test_the_head_counts(store: Store, file: Path) -> None:
    written, counts = describe(file), store.counts()
    assert (written.specs, written.trees) == (3, 3)
    assert written.evaluations == counts["evaluations"] and written.edges == counts["steps"]
    assert written.programs == counts["programs"]
    assert written.size == file.stat().st_size < 400 * written.evaluations


def test_the_same_store_gives_the_same_file(store: Store, file: Path, tmp_path: Path) -> None:
    write_trees(store, tmp_path / "again.xz")
    assert (tmp_path / "again.xz").read_bytes() == file.read_bytes()
    for tree in read_trees(file):
        other = tree.store()
        assert other.steps() == tree.edges
        assert {(p, s) for _, p, s, _ in other.evaluations()} == {(p, s) for p, s, _ in tree.evaluations}


@pytest.mark.parametrize(("planner", "least"), [(HeuristicPlanner(), 3), (RandomPlanner(1), 1)])
def test_answers_are_those_of_the_store(planner: Planner, least: int, store: Store, file: Path) -> None:
    for tree in read_trees(file):
        task = replace(fake(draw(11, tree.index or 0, LITTLE), Store()), evaluator=tree.evaluator())
        session = Session(task, Budget(seconds=60.0, evaluations=30, steps=40))
        GreedySearch(planner).run(session)
        told = {s: e for s, e in session.ledger.known.items() if e.failure != "unknown"}
        assert len(told) >= least  # the start program, and what the heuristic found
        for subject, answer in told.items():
            known = store.evaluation(tree.conditions, subject)
            assert known is not None and compact(known) == answer


def test_patches_come_from_the_tree(file: Path) -> None:
    tree = next(read_trees(file))
    coder = tree.coder(FakeCoder())
    task = fake(draw(11, tree.index or 0, LITTLE), Store())
    task = replace(task, context=replace(task.context, coder=coder), evaluator=tree.evaluator())
    session = Session(task, Budget(60.0, 200, 200))
    session.begin()
    start = session.state
    for action in tree.explored[start.program.digest]:
        session.return_to(start)
        step = session.step(action)
        edges = [e for e in tree.edges if e.parent == start.program.digest and e.action == action]
        assert step.accepted == any(e.accepted for e in edges)
        if step.accepted:
            assert session.state.program.digest in {e.child for e in edges}


def test_the_best_branch_leads_to_the_fastest_program(file: Path) -> None:
    for tree in read_trees(file):
        start = Program.start(capture_spec(tree.spec(), verify=False)).digest
        branch = tree.best_branch(start)
        assert branch and branch[0].parent == start and all(step.accepted for step in branch)
        assert [step.child for step in branch[:-1]] == [step.parent for step in branch[1:]]
        assert tree.times[branch[-1].child or ""] == min(tree.times.values()) < tree.times[start]
        assert tree.best_branch("elsewhere") == ()


def test_steps_that_lead_nowhere_are_no_answers(file: Path) -> None:
    tree, fusion = next(read_trees(file)), Action("fusion", ("r1", "r2"))

    def step(parent: str, child: str, judged: bool) -> StoredStep:
        return StoredStep(parent, fusion, None, "judged" if judged else None, True, child)

    edges = (step("a", "b", False), step("b", "c", True), step("c", "d", False), step("d", "e", False))
    small = replace(tree, edges=edges)
    assert small.explored.keys() == {"a", "b", "c", "d"} and small.answered.keys() == {"a", "b"}
    refused = StoredStep("d", fusion, None, None, False, None)
    assert replace(tree, edges=(*edges, refused)).answered.keys() == {"a", "b", "c", "d"}


def of_another_version(tree: Tree) -> Tree:
    """`tree` as a version that lays sources out otherwise would have written it."""

    def name(digest: str) -> str:
        return content_hash(f"another version's {digest}")

    keys = {
        evaluation_key(tree.conditions, s): evaluation_key(tree.conditions, name(s)) for _, s, _ in tree.evaluations
    }
    edges = [
        replace(
            e,
            parent=name(e.parent),
            evaluation=None if e.evaluation is None else keys[e.evaluation],
            child=None if e.child is None else name(e.child),
        )
        for e in tree.edges
    ]
    judged = [(purpose, name(subject), evaluation) for purpose, subject, evaluation in tree.evaluations]
    return replace(tree, edges=tuple(edges), evaluations=tuple(judged), identity=1)


def test_a_tree_of_another_version_is_named_anew(file: Path) -> None:
    for tree in read_trees(file):
        old = of_another_version(tree)
        start = tree.start()
        assert start.digest not in old.explored and tree.today(start) is tree
        assert old.today(start) == tree
        assert replace(old, identity=tree.identity).today(start) == tree, "captured otherwise than it was then"
        assert old.task(FakeCoder(), start).evaluator.evaluate(start).ok
        with pytest.raises(TreeError, match="does not begin with the program"):
            replace(old, evaluations=()).today(start)


ATTENTION = """
import torch


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def get_inputs():
    return [torch.randn(2, 3, 8, 16) for _ in range(3)]


def get_init_inputs():
    return []
"""


def test_a_tree_of_a_gpu_begins_with_the_layout_that_attention_has_there(file: Path) -> None:
    spec = KernelSpec.from_source(ATTENTION, "attention")
    captured = capture_spec(spec, verify=False)
    start = Program.start(with_strides(captured, heads_inside))
    assert start.digest != Program.start(captured).digest
    tree = next(read_trees(file))
    edge = replace(tree.edges[0], parent=start.digest)
    about = replace(tree, name="attention", source=ATTENTION, dtype=spec.dtype, mode=spec.mode, edges=(edge,))
    assert about.start().digest == start.digest


def test_a_store_takes_trees_up_again(file: Path, tmp_path: Path) -> None:
    counts = merge(tmp_path / "again", [file])
    assert counts["evaluations"] == sum(len(t.evaluations) for t in read_trees(file)) and counts["log"] == 0
    with Store(tmp_path / "again" / STORE) as store:
        write_trees(store, tmp_path / "again.xz")
    assert (tmp_path / "again.xz").read_bytes() == file.read_bytes()


def written(trees: Sequence[Tree], path: Path) -> Path:
    """A file as an older version wrote it."""
    head = {"format": "qimeng trees", "version": 1}
    path.write_bytes(lzma.compress("\n".join(json.dumps(d) for d in (head, *(t.to_data() for t in trees))).encode()))
    return path


def test_merging_rewrites_an_older_file_and_leaves_out_what_nobody_can_rename(file: Path, tmp_path: Path) -> None:
    good, bad, *_ = (of_another_version(tree) for tree in read_trees(file))
    refused = list[str]()
    older = written([replace(bad, edges=()), good], tmp_path / "older.xz")
    merge(tmp_path / "again", [older], on_refused=lambda tree, error: refused.append(f"{tree.name}: {error}"))
    with Store(tmp_path / "again" / STORE) as store:
        (new,) = trees_of(store)
    (same,) = (t for t in read_trees(file) if t.name == good.name)
    assert new.identity == IDENTITY and new.today() is new and len(new.edges) == len(same.edges)
    assert sorted(new.times.values()) == sorted(same.times.values())
    assert len(refused) == 1 and f"{bad.name}: the tree of {bad.name} does not begin with the program" in refused[0]


def test_a_patch_that_this_version_cannot_read_costs_its_edge_alone(file: Path, tmp_path: Path) -> None:
    head, *lines = lzma.decompress(file.read_bytes()).decode().splitlines()
    data = json.loads(lines[0])
    data["patches"][0]["alternatives"] = [{"schedule": {"a field of another version": 1}}]
    other = tmp_path / "other.xz"
    other.write_bytes(lzma.compress("\n".join([head, json.dumps(data)]).encode()))
    whole, left = next(read_trees(file)), next(read_trees(other))
    lost = next(iter(whole.patches))
    assert lost not in left.patches and left.edges == tuple(e for e in whole.edges if e.patch != lost)


def test_hill_climbing_on_a_tree_stops(file: Path) -> None:
    tree = next(read_trees(file))
    task = replace(fake(draw(11, tree.index or 0, LITTLE), Store()), evaluator=tree.evaluator())
    session = Session(task)
    assert HillClimb(HeuristicPlanner()).run(session) == "stop"
    assert [a.action.kind for a in session.ledger.attempts].count("stop") == 1


def test_failures_keep_their_reason_in_short() -> None:
    failed = Evaluation(Gate.REGION, "off by one " * 100, "wrong", seconds={"check": 1.0})
    short = compact(failed)
    assert short.error is not None and failed.error is not None and failed.error.startswith(short.error)
    assert len(short.error) == 240 and short.failure == "wrong" and not short.seconds


def test_some_trees_only(store: Store, tmp_path: Path) -> None:
    families = {t.family for t in trees_of(store)}
    chosen = min(families)
    write_trees(store, tmp_path / "some.xz", lambda tree: tree.family == chosen)
    assert {t.family for t in read_trees(tmp_path / "some.xz")} == {chosen}
    with pytest.raises(TreeError, match="holds no tree that is wanted: its .* trees are of h200"):
        write_trees(store, tmp_path / "none.xz", lambda tree: False)
    with pytest.raises(TreeError, match="holds no tree of a spec with a source"):
        write_trees(Store(), tmp_path / "none.xz")


def test_trees_that_were_measured_are_exported_by_the_name_of_their_device(tmp_path: Path) -> None:
    drawn = draw(11, 0, LITTLE)
    with Store(tmp_path / "store.sqlite") as made:
        put_drawn(made, drawn)
        row = Explored(drawn.spec.digest, drawn.spec.name, drawn.family, 11, 0, "h200(here)", asked=2)
        explore(fake(drawn, made, "h200(here)"), row, made, seconds=20.0)
    export(tmp_path, tmp_path / "trees.xz", device="h200", without_source=[])
    assert [t.conditions.device for t in read_trees(tmp_path / "trees.xz")] == ["h200(here)"]


def test_a_text_that_is_not_ours_is_left_out_and_put_back(store: Store, file: Path, tmp_path: Path) -> None:
    whole = {t.conditions.spec: t for t in read_trees(file)}
    family = next(iter(whole.values())).family
    less, listed = tmp_path / "less.xz", tmp_path / "listed.jsonl"
    write_trees(store, less, without_source=[family])
    left = [t for t in read_trees(less) if not t.source]
    assert left and all((t.family == family) != bool(t.source) for t in read_trees(less))
    assert left[0].with_source(whole[left[0].conditions.spec].source) == whole[left[0].conditions.spec]
    assert not any(
        t.source in lzma.decompress(less.read_bytes()).decode() for t in whole.values() if t.family == family
    )
    with pytest.raises(TreeError, match="was left out of its tree: `qimeng collect merge --listed"):
        merge(tmp_path / "none", [less])
    assert not (tmp_path / "none").exists()
    with pytest.raises(TreeError, match="holds no tree of family 'a,b' to leave out the source of; it has "):
        write_trees(store, less, without_source=[family, "a,b"])
    others = next(t.source for t in whole.values() if t.conditions.spec != left[0].conditions.spec)
    with pytest.raises(TreeError, match="is that of another spec"):
        merge(tmp_path / "wrong", [less], {t.conditions.spec: others for t in left})
    listed.write_text("".join(json.dumps({"spec": d, "source": t.source}) + "\n" for d, t in whole.items()))
    merge(tmp_path / "again", [less], read_texts(listed))
    with Store(tmp_path / "again" / STORE) as again:
        write_trees(again, tmp_path / "again.xz")
    assert (tmp_path / "again.xz").read_bytes() == file.read_bytes()
    listed.write_text('["no row"]\n')
    with pytest.raises(QimengError, match="holds no JSON lines with `spec` and `source`"):
        read_texts(listed)


def test_other_files_are_refused(tmp_path: Path) -> None:
    def read(path: Path) -> list[Tree]:
        return list(read_trees(path))

    with pytest.raises(TreeError, match="cannot be read as trees"):
        read(tmp_path / "missing.xz")
    text = tmp_path / "text.xz"
    text.write_text("no trees here")
    with pytest.raises(TreeError, match="cannot be read as trees"):
        read(text)
    text.write_bytes(lzma.compress(b"no trees here"))
    with pytest.raises(TreeError, match="holds no trees"):
        read(text)
    text.write_bytes(lzma.compress(json.dumps({"format": "qimeng trees", "version": 99}).encode()))
    with pytest.raises(TreeError, match="version 99"):
        read(text)


@pytest.mark.slow
def test_a_task_from_a_tree_needs_no_judge(tmp_path: Path) -> None:
    from qimeng.bench.collect import Assignment, explore_one

    path = tmp_path / "store.sqlite"
    row = explore_one(Assignment(5, 6, LITTLE, ("reduction",), 5, "h200"), path, 100.0, "h200")
    assert row.error is None and row.evaluations == 5
    with Store(path) as opened:
        write_trees(opened, tmp_path / "trees.xz")
    tree = next(read_trees(tmp_path / "trees.xz"))
    task = tree.task()
    assert task.estimated and task.conditions == tree.conditions
    session = Session(task, Budget(60.0, 5, 40))
    HillClimb(HeuristicPlanner()).run(session)
    assert session.ledger.best is not None and session.ledger.start is not None and session.ledger.start.ok
    assert sum(e.ok for e in session.ledger.known.values()) >= 2
