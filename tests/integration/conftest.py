"""A process for what Dynamo compiles: its frame evaluation stays on in a process, for other tests too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

Elsewhere = Callable[[Callable[[], None]], None]


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    """Calls a function of a module in another process; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda body: pool.submit(body).result()
