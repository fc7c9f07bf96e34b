"""One tokenizer and reader, trained on what the environment prints for the small graph."""

import pytest

from qimeng.envs.task import Task
from qimeng.graph.opgraph import OpGraph
from qimeng.planner.lm.corpus import corpus
from qimeng.planner.lm.mini import MiniSize, train_tokenizer
from qimeng.planner.lm.reading import Reader
from qimeng.testing import fake_task

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
