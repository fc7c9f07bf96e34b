"""Who uses a GPU next."""

from __future__ import annotations

import asyncio

from qimeng.cluster.turns import BACKGROUND, NORMAL, PERSON, Turns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order(asked: list[tuple[str, int, float]], first: str = "first") -> list[str]:
    """In which order runs get the GPU that ask while `first` has it; each takes so many seconds."""
    clock, found = Clock(), []
    turns = Turns(clock)

    async def use(run: str, priority: int, seconds: float) -> None:
        async with turns.turn(run, priority):
            found.append(run)
            await asyncio.sleep(0)
            clock.now += seconds

    async def all_of_them() -> None:
        await asyncio.gather(use(first, NORMAL, 1.0), *(use(*one) for one in asked))

    asyncio.run(all_of_them())
    assert (turns.running, turns.waiting) == (0, 0)
    return found


def test_a_person_goes_before_a_benchmark_and_that_before_a_collection() -> None:
    asked = [("collect", BACKGROUND, 1.0), ("bench", NORMAL, 1.0), ("optimize", PERSON, 1.0)]
    assert order(asked) == ["first", "optimize", "bench", "collect"]


def test_equals_share_by_seconds_not_by_number() -> None:
    long, short = ("long", NORMAL, 4.0), ("short", NORMAL, 1.0)
    found = order([long] * 3 + [short] * 12)[1:]
    used = {"long": 0.0, "short": 0.0}
    for run in found[:10]:  # while both still ask
        used[run] += 4.0 if run == "long" else 1.0
        assert abs(used["long"] - used["short"]) <= 4.0
    assert found.count("long") == 3 and found.count("short") == 12


def test_one_that_comes_later_is_owed_nothing() -> None:
    clock = Clock()
    turns = Turns(clock)

    async def scene() -> list[str]:
        async with turns.turn("old"):
            clock.now += 100.0
        found: list[str] = []

        async def use(run: str) -> None:
            async with turns.turn(run):
                found.append(run)
                clock.now += 1.0
                await asyncio.sleep(0)

        await asyncio.gather(*(use(run) for run in ["new"] * 4 + ["old"] * 4))
        return found

    found = asyncio.run(scene())
    assert set(found[:3]) == {"new", "old"}, "it does not get a hundred seconds in advance"


def test_so_many_run_beside_each_other_as_all_of_them_accept() -> None:
    turns = Turns()

    async def scene() -> None:
        async with turns.turn("a", beside=2), turns.turn("b", beside=2):
            assert turns.running == 2
            alone = asyncio.ensure_future(hold("c", 1))
            small = asyncio.ensure_future(hold("d", 2))
            await asyncio.sleep(0)
            assert (turns.running, turns.waiting) == (2, 2)
        await asyncio.gather(alone, small)

    async def hold(run: str, beside: int) -> None:
        async with turns.turn(run, beside=beside):
            assert turns.running <= beside
            await asyncio.sleep(0)

    asyncio.run(scene())


def test_one_that_is_given_up_leaves_its_place_to_others() -> None:
    turns = Turns()

    async def scene() -> None:
        async with turns.turn("a"):
            waits = asyncio.ensure_future(hold())
            await asyncio.sleep(0)
            assert turns.waiting == 1
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert turns.waiting == 0
        assert turns.running == 0

    async def hold() -> None:
        async with turns.turn("b"):
            raise AssertionError("it was never its turn")

    asyncio.run(scene())
