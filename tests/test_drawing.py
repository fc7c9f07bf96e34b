"""What tests draw follows from their names, not from the tests that ran before, nor from the clock."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from qimeng.envs.judge import gpu_evaluator, judge_clock
from tests.conftest import seed_all

HERE = Path(__file__).parent


def draws() -> tuple[float, ...]:
    secret = gpu_evaluator._draw_seed(), judge_clock._random.random()  # of sources that were made when imported
    return *secret, random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(scope="module")
def shared() -> tuple[float, ...]:
    return draws()


def test_what_a_test_draws_follows_from_its_name(shared: tuple[float, ...], request: pytest.FixtureRequest) -> None:
    drawn = draws()
    seed_all(request.node.nodeid)
    assert draws() == drawn != shared


def test_what_tests_share_follows_from_the_fixtures_name(shared: tuple[float, ...]) -> None:
    seed_all("tests/test_drawing.py::shared::0")
    assert draws() == shared


def test_properties_are_tried_on_the_same_examples_every_time() -> None:
    own = re.compile(r"\bsettings\((?!PROPERTY)")
    files = [path for path in HERE.rglob("*.py") if "from hypothesis import" in path.read_text()]
    found = [str(path.relative_to(HERE)) for path in files if own.search(path.read_text())]
    assert found == ["properties.py"], "begin with `tests.properties.PROPERTY`"
