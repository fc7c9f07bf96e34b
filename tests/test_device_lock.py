import fcntl
import multiprocessing
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qimeng import device_lock
from qimeng.device_lock import DeviceLock, lock_path


class Log:
    """Who was on the device when, from threads that each open the lock for themselves.

    Attributes:
        waiting: names of threads that have to wait for a lock.
        go: set when whoever is on the device may leave it.
    """

    def __init__(self, path: Path):
        self.path, self.events = str(path), list[str]()
        self.waiting, self.go = set[str](), threading.Event()

    def flock(self, file: int, how: int) -> None:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if how & fcntl.LOCK_NB:
                raise
            self.waiting.add(threading.current_thread().name)
            fcntl.flock(file, how)

    def start(self, name: str, kind: str) -> threading.Thread:
        """A thread that is on the device, or has to wait for it, when this returns."""

        def run() -> None:
            lock = DeviceLock(self.path)
            with getattr(lock, kind)():
                self.events.append(f"+{name}")
                self.go.wait(60)
                self.events.append(f"-{name}")
            lock.close()

        thread = threading.Thread(target=run, name=name)
        thread.start()
        while f"+{name}" not in self.events and name not in self.waiting:
            time.sleep(0.01)
        return thread

    def end(self, *threads: threading.Thread) -> None:
        self.go.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log(tmp_path / "lock")
    monkeypatch.setattr(device_lock, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": made.flock}))
    return made


def test_many_may_check_at_once_and_one_measures_alone(log: Log) -> None:
    threads = [log.start("a", "beside"), log.start("b", "beside"), log.start("c", "alone")]
    assert log.events == ["+a", "+b"]
    log.end(*threads)
    assert log.events[:2] == ["+a", "+b"] and log.events[-2:] == ["+c", "-c"]


def test_who_measures_is_not_overtaken_for_ever_by_those_who_check(log: Log) -> None:
    log.end(log.start("a", "beside"), log.start("c", "alone"), log.start("b", "beside"))
    assert log.events == ["+a", "-a", "+c", "-c", "+b", "-b"]


def test_turns_alone_follow_each_other_before_anybody_checks(log: Log) -> None:
    kinds = {"a": "beside", "c": "alone", "b": "beside", "d": "alone"}
    log.end(*[log.start(name, kind) for name, kind in kinds.items()])
    assert log.events[:2] == ["+a", "-a"] and log.events[-2:] == ["+b", "-b"]
    assert sorted([log.events[2:4], log.events[4:6]]) == [["+c", "-c"], ["+d", "-d"]]


def test_who_checks_steps_aside_for_who_waits_to_measure_and_goes_on_after(log: Log) -> None:
    log.go.set()
    lock = DeviceLock(log.path)
    with lock.beside():
        lock.step_aside()  # nobody waits
        assert log.events == []
        first = log.start("c", "alone")
        assert log.events == []
        lock.step_aside()
        assert log.events == ["+c", "-c"]
        second = log.start("d", "alone")
        assert log.events == ["+c", "-c"], "it is beside others again"
    log.end(first, second)
    lock.close()


def hold_and_die(path: str) -> None:
    with DeviceLock(path).alone():
        multiprocessing.current_process().kill()


def test_a_process_that_dies_gives_its_turn_back(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    process = multiprocessing.get_context("spawn").Process(target=hold_and_die, args=(path,))
    process.start()
    process.join()
    began = time.monotonic()
    with DeviceLock(path).alone():
        assert time.monotonic() - began < 5


def test_a_gpu_has_one_lock_whatever_number_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    one, other = (lock_path(torch.device("cuda", n)) for n in (0, 3))
    assert one == other and "GPU-1" in one
