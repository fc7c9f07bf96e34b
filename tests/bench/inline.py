"""A pool for tests that works in this process; tasks and results are pickled as they would be for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cloudpickle

from qimeng.bench.pool import Outcome, Place


class Inline:
    """What `qimeng.bench.pool.Pool` is to those that use it; what the work raises is a failure."""

    def __init__(self, places: Sequence[Place] = ()):
        self.places = tuple(places) or (Place(),)

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *unused: object) -> None:
        pass

    def run(self, tasks: Iterable[Any], work: Callable[[Any], Any], *unused: Any, **limits: Any) -> Iterator[Any]:
        for task in tasks:
            do, one = cloudpickle.loads(cloudpickle.dumps((work, task)))  # as it would come to another process
            try:
                yield Outcome(task, cloudpickle.loads(cloudpickle.dumps(do(one))))
            except Exception as error:  # noqa: BLE001  whatever the work raises is the task's outcome
                yield Outcome(task, failure=f"{type(error).__name__}: {error}")
