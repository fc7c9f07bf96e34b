"""Calls that never end are ended, with one clear error."""

from __future__ import annotations

import re
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from qimeng import KernelSpec, SpecError, optimize, plan_and_code
from qimeng.envs.steps.setup import make_task
from qimeng.spec import patience as room
from qimeng.spec.patience import LIMIT_S, TooLong, left_s, patience, together, within
from qimeng.testing import FakeCoder, FakeEvaluator


def busy() -> None:
    while True:
        pass


def asleep() -> None:
    time.sleep(100)


def called(run: Callable[[], None], in_main: bool) -> None:
    """Call `run` here, or in another thread."""
    thread = threading.Thread(target=run)
    if in_main:
        run()
    else:
        thread.start()
        thread.join(60)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "LEAST_S", 0.3)
    with within(0.3):
        yield


@pytest.mark.parametrize("call", [busy, asleep])
def test_what_does_not_end_is_ended(call, short):
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(TooLong, match="it did not end within 0.3 s"), patience("it"):
        call()
    assert time.monotonic() - began < 10 and signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize("in_main", [True, False])
def test_what_waits_has_all_its_time_and_what_computes_a_part(in_main, short):
    def run() -> None:
        with within(30.0), patience("it", busy=0.1):
            time.sleep(0.3)
        found.append("waited")
        # a busy machine may take long to give a call 0.1 s of the processor
        for call, seconds in ((busy, 30.0), (asleep, 0.5)) if in_main else ((busy, 30.0),):
            began = time.thread_time()
            with within(seconds), pytest.raises(TooLong, match="did not end within 0.1 s"), patience("it", busy=0.1):
                call()
            found.append(f"{time.thread_time() - began >= 0.1}")

    found: list[str] = []
    called(run, in_main)
    assert found == ["waited", "True", *(["False"] if in_main else [])]


def test_a_stop_that_is_lost_is_repeated(short, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "AGAIN_S", 0.1)
    began = time.monotonic()
    with pytest.raises(TooLong), patience("it"):
        try:
            busy()
        except BaseException:  # noqa: BLE001  as code that Python calls back, where no error gets out
            busy()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("in_main", [True, False])
def test_a_stop_that_python_drops_in_a_callback_is_repeated_in_silence(
    in_main, short, monkeypatch: pytest.MonkeyPatch, capfd
):
    class Watched:
        pass

    def run() -> None:
        watched = Watched()
        seen = weakref.ref(watched, lambda _: busy())
        del watched  # busy until the stop ends it, which Python drops
        assert seen() is None
        busy()

    monkeypatch.setattr(room, "AGAIN_S", 0.1)
    found: list[str] = []

    def caller() -> None:
        try:
            with within(0.3), patience("it"):
                run()
        except TooLong as error:
            found.append(str(error))

    called(caller, in_main)
    assert found and not capfd.readouterr().err


def test_in_another_thread_as_well(short):
    found: list[str] = []

    def run() -> None:
        LIMIT_S.set(0.3)
        try:
            with patience("it"):
                busy()
        except TooLong as error:
            found.append(str(error))
        found.append("went on")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert found[0].startswith("it did not end within 0.3 s; a computation must end") and found[1:] == ["went on"]


def test_a_short_call_does_not_wait_for_its_watch(monkeypatch: pytest.MonkeyPatch):
    """`Thread.start` returns when the other thread has run, and a pause of no length gives the processor away."""
    monkeypatch.setattr(threading.Thread, "start", None)
    monkeypatch.setattr(time, "sleep", None)
    with patience("short"):
        pass


def test_what_ends_in_time_is_left_alone(short):
    for _ in range(200):
        with patience("it"):
            pass
    with pytest.raises(KeyError), patience("it"):
        raise KeyError
    time.sleep(0.5)  # no timer is left that would end this


def test_calls_of_one_preparation_share_their_time(short, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "FEW_S", 0.1)
    assert left_s() == 0.3
    with together():
        time.sleep(0.15)
        with together():  # ends no later
            assert 0.1 <= left_s() <= 0.15
        time.sleep(0.2)
        assert left_s() == 0.1
    assert left_s() == 0.3


class Long(torch.nn.Module):
    """Ends soon on real tensors, and takes minutes without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6_000):
            x = x + 1
        return x


def test_a_long_loop_is_left_as_it_is_within_the_budget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "LEAST_S", 4.0)
    monkeypatch.setattr(room, "FEW_S", 2.0)  # the module itself takes a hundredth of it
    task_of = KernelSpec.from_module(Long(), (torch.ones(4),))
    began = time.monotonic()
    with within(4.0):
        task = make_task(task_of, evaluator=FakeEvaluator(), coder=FakeCoder())
    assert re.search("half of the time left.*; a Python loop", task.reason) and time.monotonic() - began < 60


def test_a_model_that_never_ends_is_one_clear_error(short):
    with pytest.raises(SpecError, match="Endless: forward did not end within 0.3 s"):
        optimize(Endless(), (torch.ones(4),), seconds=0.3)


class Endless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.numel():
            x = x + 1
        return x


def test_a_forward_that_never_ends_is_one_clear_error(short):
    began = time.monotonic()
    with pytest.raises(
        SpecError, match=r"forward did not end within 0\.\d+ s; a computation must end on its own inputs"
    ):
        plan_and_code(Endless(), (torch.ones(4),), seconds=0.3, evaluator=FakeEvaluator(), coder=FakeCoder())
    assert time.monotonic() - began < 20


class EndsOnOwn(torch.nn.Module):
    """Ends on finite numbers and on no others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.abs().max() > 1):
            x = x / 2
        return x


def test_what_does_not_end_on_other_inputs_is_done_without(monkeypatch: pytest.MonkeyPatch):
    from qimeng.envs.judge.input_validity import refused_distributions

    for home in ("qimeng.envs.judge.input_validity", "qimeng.spec.valid"):
        monkeypatch.setattr(f"{home}.BRIEF_S", 0.5)
    spec = KernelSpec.from_module(EndsOnOwn(), (torch.randn(8),))
    spec.check()
    assert refused_distributions(spec, ("given", "infinite", "x3")) == {"infinite"}
