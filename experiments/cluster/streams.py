"""Several searches beside each other, each with a pool of its own: what they ask is answered for a while.

Deals in pools, threads and times. Knows nothing about what a pool does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from experiments.cluster.work import Work
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, Ticket


@dataclass(frozen=True)
class Answer:
    """One evaluation.

    Attributes:
        work: whose.
        request: what was asked.
        found: the answer.
        began: when it was submitted, in seconds since the window began.
        seconds: from then to the answer.
    """

    work: Work
    request: EvaluationRequest
    found: Evaluation
    began: float
    seconds: float


@dataclass
class Watched:
    """What happened in a window.

    Attributes:
        opening_s: seconds until every pool had answered its first requests; they are not counted.
        window_s: seconds from then until the time was over, or one of the pools had no more to ask.
        answers: within the window, in the order they came.
        failed: why streams came to nothing.
        again: requests that were judged again, by whose fault that was.
    """

    opening_s: float = 0.0
    window_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    again: dict[str, int] = field(default_factory=dict)


def watch(
    works: Sequence[Work],
    open_pool: Callable[[Work], Evaluator],
    at_once: int,
    until: float,
    on_begin: Callable[[], None] = lambda: None,
) -> Watched:
    """Ask all works beside each other until the time is over.

    Args:
        works: what is asked, each through a pool of its own.
        open_pool: makes the pool of a work; it is closed here, in the thread that opened it, whose end would end the
            processes that it started.
        at_once: requests in flight at a time in each pool.
        until: when the window ends (`time.monotonic`), its opening counted in.
        on_begin: called when the window begins.
    """
    made, began, lock = Watched(), time.monotonic(), threading.Lock()
    opened_at, ends = [began], [until]

    def begin() -> None:
        opened_at[0] = time.monotonic()
        on_begin()

    ready, done = threading.Barrier(len(works), begin), threading.Barrier(len(works))

    def stream(work: Work) -> None:
        pool, requests = None, work.requests
        try:
            pool = open_pool(work)
            asked = [pool.submit(request) for request in requests[:at_once]]
            opened = sum(1 for _ in pool.gather(asked, max(0.0, until - time.monotonic())))
            if opened < len(asked):
                raise TimeoutError("the pool did not open in time")
        except Exception as error:  # noqa: BLE001  one stream may fail, the others go on
            made.failed.append(f"{work.spec.name}: {type(error).__name__}: {error}"[:300])
            requests = []
        ready.wait()
        if pool is not None and requests:
            _ask(pool, work, requests[at_once:])
        done.wait()  # nobody gives its share of a GPU to others while these still measure
        if pool is not None:
            with lock:
                for whose, count in pool.report.again.items():
                    made.again[whose] = made.again.get(whose, 0) + count
            pool.close()

    def _ask(pool: Evaluator, work: Work, requests: Sequence[EvaluationRequest]) -> None:
        left, asked = iter(requests), dict[Ticket, float]()
        while (now := time.monotonic()) < min(ends):
            while len(asked) < at_once:
                if (request := next(left, None)) is None:
                    ends.append(now)
                    return
                asked[pool.submit(request)] = time.monotonic()
            for ticket, found in pool.gather(list(asked), min(ends) - now):
                at, now = asked.pop(ticket), time.monotonic()
                made.answers.append(Answer(work, ticket.request, found, at - opened_at[0], now - at))
                break

    threads = [threading.Thread(target=stream, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.opening_s, made.window_s = opened_at[0] - began, max(0.0, min(ends) - opened_at[0])
    made.answers = [a for a in made.answers if a.began + a.seconds <= made.window_s]
    return made


__all__ = ["Answer", "Watched", "watch"]
