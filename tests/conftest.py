"""What every test may use: markers that skip themselves with a reason, and golden files."""

from __future__ import annotations

import gc
import json
import os
import random
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Before torch is imported, and for the processes that tests start: threads that outnumber the cores spin, and wait
    # for one another. Not in the controller, whose environment its workers inherit.
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


class DrawnByName(random.SystemRandom):
    """Stands for the system's source of random numbers, which nobody can seed."""

    source = random.Random()
    test = ""

    def random(self) -> float:
        return self.source.random()

    def getrandbits(self, k: int) -> int:
        return self.source.getrandbits(k)


random.SystemRandom = DrawnByName  # type: ignore[misc]  # before a module keeps one that it makes when it is imported


def seed_all(name: str) -> None:
    """Whatever draws in this process draws as `name` says, whichever tests ran here before."""
    import numpy
    import torch

    number = zlib.crc32(name.encode())
    DrawnByName.source.seed(name)
    random.seed(name)
    numpy.random.seed(number)
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` formats a stack for a GPU that is not there
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    seed_all(collector.nodeid)  # what a file draws when it is imported
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
    """What tests share is the same whichever of them is the first one to need it."""
    if fixturedef.scope != "function":
        seed_all(f"{fixturedef.baseid}::{fixturedef.argname}::{getattr(request, 'param_index', 0)}")
    found = yield
    if fixturedef.scope != "function":
        seed_all(DrawnByName.test)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """All that a test draws, the judge's secret seeds as well, follows from its name: what fails once fails again."""
    DrawnByName.test = item.nodeid
    seed_all(item.nodeid)


def pytest_collection_finish() -> None:
    """What is there stays, and is not looked at again: captures make millions of objects, each time beside more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_gpu():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    slow = [item for item in items if item.get_closest_marker("slow")]
    if not config.getoption("--slow"):
        for item in slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
    # Whole files, which share what they set up. Before all others those of the whole library, beside this one: a single
    # test of theirs takes a minute, and at the end it would keep one worker waiting.
    first, here = {item.path for item in slow}, Path(__file__).parent
    items.sort(key=lambda item: (item.path not in first, item.path.parent != here))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is left in the user's cache, and nothing taken from it."""
    os.environ["QIMENG_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """`once(name, make)`: what `make()` returns (JSON), made by one of pytest's processes for all of them."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"once_{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(make()))
            return json.loads(path.read_text())

    return made


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` equals the file `golden/<name>` beside the test; --update-golden writes it."""
    folder = Path(request.path).parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; write it with pytest --update-golden"
        assert text == path.read_text(), f"{path} differs; look, then pytest --update-golden"

    return compare
