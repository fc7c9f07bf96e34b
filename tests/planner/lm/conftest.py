"""One tokenizer and reader, trained on what the environment prints for the small graph; a few stored trees."""

from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.bench.explore import Explored, explore
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.task import Task
from qimeng.graph.opgraph import OpGraph
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.tree_file import read_trees, write_trees
from qimeng.planner.data.tree_store import put_drawn
from qimeng.planner.lm.corpus import corpus
from qimeng.planner.lm.mini import MiniSize, train_tokenizer
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.stored import StoredTask, stored_tasks
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task

TINY = MiniSize(hidden=32, layers=2, heads=2, kv_heads=1, inner=64, positions=512)


@pytest.fixture(scope="session")
def task(graph: OpGraph) -> Task:
    return fake_task(graph)


@pytest.fixture(scope="session")
def reader(task: Task) -> Reader:
    return Reader(train_tokenizer(corpus([task]), 512), 192, 24)


@pytest.fixture(scope="session")
def tiny() -> MiniSize:
    return TINY


@pytest.fixture(scope="session")
def trees_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trees of four drawn specs, explored with fakes."""
    store = Store(tmp_path_factory.mktemp("trees") / "store.sqlite")
    for index in (0, 3, 4, 6):
        drawn = draw(11, index, Bytes(1 << 12, 1 << 14))
        put_drawn(store, drawn)
        task = fake_task(capture_spec(drawn.spec, verify=False))
        conditions = Conditions(drawn.spec.digest, "h200", drawn.spec.mode, True, (("evaluator", "fake"),))
        judge = CachingEvaluator(FakeEvaluator(estimated=True), store, conditions)
        row = Explored(drawn.spec.digest, drawn.spec.name, drawn.family, 11, index, "h200", asked=12)
        explore(replace(task, conditions=conditions, evaluator=judge), row, store, seconds=60.0)
    path = Path(store.path).with_name("trees.jsonl.xz")
    write_trees(store, path)
    return path


@pytest.fixture(scope="session")
def stored(trees_file: Path) -> tuple[StoredTask, ...]:
    return tuple(stored_tasks(read_trees(trees_file), FakeCoder()))
