"""A process for what Dynamo compiles: its frame evaluation stays on in a process, for other tests too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interpreted import rows_of

Elsewhere = Callable[[Callable[[], None]], None]


@pytest.fixture
def elsewhere() -> Elsewhere:
    """Calls a function of a module in another process; what it raises is raised here."""

    def call(body: Callable[[], None]) -> None:
        rows_of("-m", "tests.integration.calling", body.__module__, body.__name__, interpret=False)

    return call
