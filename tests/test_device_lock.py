import multiprocessing
import threading
import time
from pathlib import Path

import pytest
import torch

from qimeng.device_lock import DeviceLock, lock_path


class Log:
    """Who was on the device when, from threads that each open the lock for themselves."""

    def __init__(self, path: Path):
        self.path, self.events = str(path), []

    def start(self, name: str, kind: str, hold_s: float) -> threading.Thread:
        def run() -> None:
            lock = DeviceLock(self.path)
            with getattr(lock, kind)():
                self.events.append(f"+{name}")
                time.sleep(hold_s)
                self.events.append(f"-{name}")
            lock.close()

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.1)
        return thread


def test_many_may_check_at_once_and_one_measures_alone(tmp_path: Path) -> None:
    log = Log(tmp_path / "lock")
    threads = [log.start("a", "beside", 0.4), log.start("b", "beside", 0.4), log.start("c", "alone", 0.1)]
    for thread in threads:
        thread.join()
    assert log.events[:2] == ["+a", "+b"] and log.events[-2:] == ["+c", "-c"]


def test_who_measures_is_not_overtaken_for_ever_by_those_who_check(tmp_path: Path) -> None:
    log = Log(tmp_path / "lock")
    threads = [log.start("a", "beside", 0.5), log.start("c", "alone", 0.1), log.start("b", "beside", 0.1)]
    for thread in threads:
        thread.join()
    assert log.events == ["+a", "-a", "+c", "-c", "+b", "-b"]


def test_turns_alone_follow_each_other_before_anybody_checks(tmp_path: Path) -> None:
    log = Log(tmp_path / "lock")
    names = [("a", "beside", 0.5), ("c", "alone", 0.3), ("b", "beside", 0.1), ("d", "alone", 0.1)]
    for thread in [log.start(*name) for name in names]:
        thread.join()
    assert log.events[:2] == ["+a", "-a"] and log.events[-2:] == ["+b", "-b"]
    assert sorted([log.events[2:4], log.events[4:6]]) == [["+c", "-c"], ["+d", "-d"]]


def test_who_checks_steps_aside_for_who_waits_to_measure_and_goes_on_after(tmp_path: Path) -> None:
    log = Log(tmp_path / "lock")
    lock = DeviceLock(log.path)
    with lock.beside():
        lock.step_aside()  # nobody waits
        assert log.events == []
        thread = log.start("c", "alone", 0.2)
        assert log.events == []
        lock.step_aside()
        assert log.events == ["+c", "-c"]
        other = log.start("d", "alone", 0.0)
        assert log.events == ["+c", "-c"], "it is beside others again"
    thread.join()
    other.join()
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
