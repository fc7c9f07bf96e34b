"""A small graph that every test of the step loop shares."""

import pytest

from qimeng.graph.opgraph import OpGraph
from qimeng.testing import sample_graph


@pytest.fixture(scope="session")
def graph() -> OpGraph:
    return sample_graph()
