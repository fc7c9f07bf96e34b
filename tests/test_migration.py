"""What an older version wrote: stores, trees and recipes under the names that this version gives their programs.

`tests/program/old` was written by the last version that named programs by their printed text: a search of a drawn spec
with one final verification, one attempt of a language model, and another search whose spec is not in the store.
"""

from __future__ import annotations

import json
import lzma
import sqlite3
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.envs.steps import compiled_first
from qimeng.envs.steps.caching import CachingEvaluator, ReplayCoder, ReplayEvaluator
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget
from qimeng.errors import ReplayError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import FinalOptions
from qimeng.interfaces.records import program_from_json
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_file import read_trees, write_trees
from qimeng.planner.data.tree_store import trees_of
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.random import RandomPlanner
from qimeng.program.identity import IDENTITY
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.recipe import Recipe
from qimeng.spec import KernelSpec
from qimeng.store import SCHEMA_VERSION, Store
from qimeng.store.migration import planned
from qimeng.testing import FakeCoder, FakeEvaluator, ScriptedPlanner, fake_task, sample_graph

OLD = Path(__file__).parent / "program" / "old"
REMARK = "rows name programs that cannot be rebuilt"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.sqlite"
    db = sqlite3.connect(path)
    db.executescript(lzma.decompress((OLD / "store.sql.xz").read_bytes()).decode())
    db.close()
    return path


@pytest.fixture
def searched_as_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a search, nothing of PyTorch's was tried for computations of this size."""
    monkeypatch.setattr(compiled_first, "SEVERAL", 100)


@pytest.fixture(scope="module")
def start() -> Program:
    tree = next(read_trees(OLD / "tree.xz"))
    return Program.start(capture_spec(tree.spec()))


@pytest.mark.usefixtures("searched_as_then")
def test_an_old_store_answers_again(old: Path, start: Program) -> None:
    with pytest.warns(UserWarning, match=REMARK):
        store = Store(old)
    (conditions,) = [c for c in store.conditions() if c.spec != "sample"]
    edges = store.steps(conditions)
    assert len(edges) == 3 and start.digest in {e.parent for e in edges}
    for edge in edges:
        for digest in (edge.parent, edge.child):
            body = store.program(digest or "")
            assert body is not None and program_from_json(body[0], start.graph).digest == digest
        assert edge.evaluation is None or store.evaluation_of(edge.evaluation) is not None
    assert [a.parent for a in store.attempts()] == [start.digest]
    judge = FakeEvaluator()
    task = fake_task(start.graph, coder=ReplayCoder(store, conditions, FakeCoder()))
    cached = CachingEvaluator(judge, store, conditions)
    task = replace(task, conditions=conditions, evaluator=cached, options=FinalOptions(("default",), 1.0))
    script = ScriptedPlanner(("lowering", "fusion", "tiling", "lowering", "stop"))
    before = store.counts()["evaluations"]
    result = optimize(task, GreedySearch(script), Budget(evaluations=8, steps=6), store)
    assert judge.calls == [] and result.cached > 2, "the same run judges nothing again, its final verification included"
    assert store.counts()["evaluations"] == before


@pytest.mark.usefixtures("searched_as_then")
def test_an_old_tree_replays(old: Path, start: Program) -> None:
    with pytest.warns(UserWarning, match=REMARK):
        store = Store(old)
    (conditions,) = [c for c in store.conditions() if c.spec != "sample"]
    replayed = replace(
        fake_task(start.graph, ReplayEvaluator(store, conditions), ReplayCoder(store, conditions, FakeCoder())),
        conditions=conditions,
    )
    script = ScriptedPlanner(("lowering", "fusion", "tiling", "lowering", "stop"))
    result = optimize(replayed, GreedySearch(script), Budget(evaluations=8, steps=6))
    assert [s.accepted for s in result.steps] == [True] * 4


def test_what_cannot_be_made_again_stays_as_history(old: Path) -> None:
    def rows(db: sqlite3.Connection) -> set[tuple[str, ...]]:
        text = "SELECT e.* FROM evaluations e JOIN conditions c ON c.digest = e.conditions WHERE c.body LIKE '%sample%'"
        return set(db.execute(text))

    db = sqlite3.connect(old)
    before = rows(db)
    with pytest.warns(UserWarning, match=r"old.sqlite was written by an older version: \d+ of \d+ rows") as said:
        store = Store(old)
    assert len(said) == 1
    assert before and rows(db) == before and db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    assert {c.spec for c, *_ in store.evaluations()} == {c.spec for c in store.conditions()}
    db.close()


def test_it_happens_once(old: Path) -> None:
    with pytest.warns(UserWarning, match=REMARK):
        first = list(Store(old).evaluations())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(Store(old).evaluations()) == first


@pytest.mark.filterwarnings("ignore:.*older version")
def test_several_may_open_an_old_store_at_once(old: Path) -> None:
    together = threading.Barrier(3)

    def opened(number: int) -> list[str]:
        together.wait()
        with Store(old) as store:
            return sorted(e[2] for e in store.evaluations())

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(opened, range(3))
    assert all(found == first for found in others)


def test_what_waits_for_its_spec_is_named_when_that_comes(old: Path) -> None:
    with pytest.warns(UserWarning, match="answer again once their computation is optimized"):
        store = Store(old)
    task, judge = fake_task(sample_graph()), FakeEvaluator()
    task = fake_task(sample_graph(), coder=ReplayCoder(store, task.conditions, FakeCoder()))
    before = store.counts()["evaluations"]
    assert store.name_anew("another", task.start) == 0
    assert store.name_anew("sample", task.start) > 3 and store.name_anew("sample", task.start) == 0
    task = replace(task, evaluator=CachingEvaluator(judge, store, task.conditions))
    optimize(task, GreedySearch(RandomPlanner(3)), Budget(evaluations=2, steps=2), store)
    assert judge.calls == [] and store.counts()["evaluations"] == before


def test_a_run_with_an_old_store_names_what_was_tried_of_its_spec(old: Path, start: Program) -> None:
    db = sqlite3.connect(old)
    with db:
        db.execute("UPDATE specs SET body = ''")  # as runs keep a spec
    db.close()
    with pytest.warns(UserWarning, match=REMARK):
        store = Store(old)
    assert start.digest not in {s.parent for s in store.steps()}
    whole = Store()
    whole.merge(store)
    (tree,) = read_trees(OLD / "tree.xz")
    task = make_task(tree.spec(), device="h200", evaluator=FakeEvaluator(), store=whole)
    assert task.start.digest == start.digest in {s.parent for s in whole.steps()}


def test_a_store_whose_specs_are_all_there_says_nothing(old: Path) -> None:
    db = sqlite3.connect(old)
    with db:
        (other,) = db.execute("SELECT digest FROM conditions WHERE body LIKE '%\"sample\"%'").fetchone()
        for table in ("evaluations", "steps"):
            db.execute(f"DELETE FROM {table} WHERE conditions = ?", (other,))
        db.execute("DELETE FROM conditions WHERE digest = ?", (other,))
        known = "SELECT parent FROM steps UNION SELECT child FROM steps"
        db.execute(f"DELETE FROM programs WHERE digest NOT IN ({known})")
    db.close()
    with Store(old) as store:
        assert store.counts()["steps"] == 3


def test_a_store_of_trees_has_no_programs_and_is_migrated_by_its_patches(old: Path, start: Program) -> None:
    db = sqlite3.connect(old)
    with db:
        db.execute("DELETE FROM programs")
    db.close()
    with pytest.warns(UserWarning, match=REMARK):
        store = Store(old)
    assert {start.digest} < {e.parent for e in store.steps()}


@pytest.mark.parametrize("estimated", [False, True])
def test_what_was_measured_on_a_gpu_begins_with_the_layouts_of_the_gpu(
    old: Path, estimated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def captured(spec: KernelSpec, device: str) -> OpGraph:
        asked.append(device)
        with pytest.MonkeyPatch.context() as here:  # PyTorch's own tracing must not look for a GPU
            here.setattr("torch.cuda.is_available", lambda: False)
            return capture_spec(spec)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("qimeng.program.verify.capture_spec", captured)
    db = sqlite3.connect(old)
    if estimated:
        db.execute("UPDATE conditions SET body = replace(body, 'false', 'true')")
    planned(db)
    db.close()
    assert set(asked) == {"cpu" if estimated else "cuda"}


# ---- files of trees


def test_an_old_file_of_trees_is_the_store_it_came_from(old: Path, tmp_path: Path) -> None:
    (tree,) = read_trees(OLD / "tree.xz")
    assert tree.identity == 1
    now = tree.today()
    with pytest.warns(UserWarning, match=REMARK):
        (known,) = trees_of(Store(old))

    def parts(tree: Tree) -> tuple[object, ...]:
        """Patches by what is in them: a schedule of this version is written with fewer fields than the old one."""
        edges = {replace(e, patch=None) for e in tree.edges}
        return edges, {(p, s) for p, s, _ in tree.evaluations}, set(tree.patches.values())

    assert parts(now) == parts(known) and now.identity == IDENTITY and now.today() is now
    store = Store()
    from qimeng.planner.data.tree_store import put_tree

    put_tree(store, tree)  # brings it up to date
    write_trees(store, tmp_path / "new.xz")
    (again,) = read_trees(tmp_path / "new.xz")
    assert again.identity == IDENTITY and parts(again) == parts(now)


# ---- recipes


def old_recipe() -> tuple[str, str]:
    data = json.loads((OLD / "recipe.json").read_text())
    return data["source"], json.dumps(data["recipe"])


def test_an_old_recipe_replays(start: Program) -> None:
    source, text = old_recipe()
    recipe = Recipe.from_json(text)
    assert recipe.identity == 1 and KernelSpec.from_source(source, "x").digest
    program = recipe.replay(start.graph)
    assert program.digest != recipe.program and any(program.implementation(r).generated for r in program.regions)
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_changed_old_recipe_is_refused(start: Program) -> None:
    data = json.loads(old_recipe()[1])
    step = next(s for s in data["steps"] if s["patch"]["alternatives"])
    step["patch"]["alternatives"][0]["source"] += "# tampered\n"
    with pytest.raises(ReplayError, match="has hash"):
        Recipe.from_json(json.dumps(data)).replay(start.graph)


def test_a_recipe_of_a_newer_version_is_refused(start: Program) -> None:
    newer = replace(Recipe.from_json(old_recipe()[1]), identity=IDENTITY + 1)
    with pytest.raises(ReplayError, match="this version knows"):
        newer.replay(start.graph)
