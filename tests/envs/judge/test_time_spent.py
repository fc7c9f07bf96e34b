"""Which part of an evaluation its seconds count for."""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.envs.judge.time_spent import Clock
from qimeng.testing import FakeClock


def test_what_items_take_to_be_made_counts_apart_from_their_use() -> None:
    now = FakeClock()
    clock = Clock(now)

    def made() -> Iterator[str]:
        for name in ("first", "second"):
            now.now += 3.0
            yield name

    seen = []
    with clock.part("check"):
        for item in clock.each("reference", made()):
            now.now += 1.0
            seen.append(item)
    assert seen == ["first", "second"]
    assert clock.seconds == {"reference": 6.0, "check": 2.0}
