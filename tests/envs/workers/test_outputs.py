"""What a call returned, described, compared and handed over."""

from __future__ import annotations

import os
import time
import weakref

import pytest
import torch

from qimeng.device import DEVICES
from qimeng.envs.cost.time_bounds import least_ms
from qimeng.envs.workers import stopwatch
from qimeng.envs.workers.channel import Malformed
from qimeng.envs.workers.outputs import describe, difference, facts_from_json, facts_to_json
from qimeng.envs.workers.sampled_output import OutputSampler, call_seed
from qimeng.envs.workers.stopwatch import (
    ENOUGH,
    FEW,
    HOPELESS,
    LEAD_MS,
    MOST_LATE,
    MOST_LEAD_MS,
    Effort,
    Reading,
    Stopwatch,
)
from qimeng.envs.workers.tensor_transfer import hand_over, take
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


def test_facts_survive_json_and_name_shared_memory():
    x = torch.randn(4, 6)
    facts, tensors = describe({"a": x.t(), "b": (None, 3, torch.ones(2))}, {"input 0": x})
    assert len(tensors) == 2 and facts_from_json(facts_to_json(facts)) == facts
    assert facts.leaves[0].shares == ("input 0",) and facts.leaves[0].stride == (1, 6)
    again, _ = describe((tensors[1], tensors[1]), {})
    assert again.leaves[1].shares == ("output 0",)


def test_differences_are_told_in_words():
    def facts(*out):
        return describe(out, {})[0]

    a = torch.ones(2, 3)
    assert difference(facts(a), facts(torch.zeros(2, 3))) is None
    assert "dtype" in (difference(facts(a.half()), facts(a)) or "")
    assert "stride" in (difference(facts(torch.ones(3, 2).t()), facts(a)) or "")
    assert "structure" in (difference(facts(a, a), facts(a)) or "")
    assert "value is 4" in (difference(facts(4), facts(3)) or "")
    assert "shares memory" in (difference(facts(a, a), facts(a, a.clone())) or "")
    assert difference(facts(a, a.clone()), facts(a, a)) is None
    assert difference(facts(torch.ones(1, 3)), facts(torch.ones(3, 1).t())) is None


class Kind(torch.Tensor):
    pass


def test_classes_of_tensors_are_told_apart():
    lazy = torch.ones(2).as_subclass(Kind)
    assert "Kind, expected Tensor" in (difference(describe(lazy, {})[0], describe(torch.ones(2), {})[0]) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_are_handed_over_on_the_cpu(dtype):
    tensors = [torch.randint(0, 2, (5, 7)).to(dtype), torch.ones((), dtype=dtype), torch.empty(0, 3, dtype=dtype)]
    facts, found = describe(tensors, {})
    items, files = hand_over(found)
    got = take(items, files, list(facts.leaves))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, got, strict=True))
    for fd in files:
        os.ftruncate(fd, 0)
    with pytest.raises(Malformed):
        take(items, files, list(facts.leaves))
    for fd in files:
        os.close(fd)


def test_any_number_of_tensors_needs_one_file():
    tensors = [torch.full((i % 3,), float(i)) for i in range(600)]
    items, files = hand_over(tensors)
    assert len(files) == 1
    got = take(items, files, list(describe(tensors, {})[0].leaves))
    assert all(torch.equal(a, b) for a, b in zip(tensors, got, strict=True))
    with pytest.raises(Malformed):
        take([{}, {"at": -1}], files, list(describe(tensors[:2], {})[0].leaves))
    os.close(files[0])


@pytest.mark.parametrize("data", [None, {}, {"tree": "", "leaves": [1]}, {"tree": "", "leaves": [{"kind": "Tensor"}]}])
def test_descriptions_that_are_none_are_refused(data):
    with pytest.raises(Malformed):
        facts_from_json(data)


def test_nothing_but_a_dtype_is_taken_for_a_dtype():
    data = facts_to_json(describe(torch.ones(2), {})[0])
    data["leaves"][0] = {**data["leaves"][0], "dtype": "os"}
    with pytest.raises(Malformed):
        facts_from_json(data)


def filled(seed: int) -> tuple[torch.Tensor]:
    return (torch.full((4,), float(seed)),)


def test_every_timed_call_has_inputs_of_its_own_which_lie_elsewhere():
    seen: list[tuple[float, int]] = []
    watch = Stopwatch(torch.device("cpu"))
    samples = watch.measure(
        lambda x: seen.append((float(x[0]), x.data_ptr())),
        lambda seed: (torch.full((4096,), float(seed % 1000003)),),
        7,
        Effort(0.0, 9, 1.0, 2),
    )
    assert samples.timing().calls == len(samples.device_ms) == 9
    assert [v for v, _ in seen] == [call_seed(7, n) % 1000003 for n in range(11)] and len({v for v, _ in seen}) == 11
    assert len({p for _, p in seen}) > 1


def test_a_short_call_is_measured_some_dozens_of_times_and_a_long_one_three_times():
    watch = Stopwatch(torch.device("cpu"))
    short = watch.measure(lambda x: None, filled, 7, Effort(min_ms=1e6, limit_s=60.0, max_calls=25))
    assert len(short.device_ms) == 25
    long = watch.measure(lambda x: time.sleep(0.01), filled, 7, Effort(min_ms=1e6, limit_s=0.0))
    assert len(long.device_ms) == 3


def measured(host_ms: list[float], effort: Effort, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[float]]:
    """Which calls count, and the lead of every call; launching call n takes the host `host_ms[n]`, or the last."""
    watch, leads = Stopwatch(torch.device("cpu")), []

    def once(call: object, arguments: object, lead_ms: float = LEAD_MS, resets: bool = True) -> tuple[Reading, None]:
        number, host = len(leads), host_ms[min(len(leads), len(host_ms) - 1)]
        leads.append(lead_ms)
        return Reading(1.0 + number, 1.0 + number, host, max(host - lead_ms, 0.0)), None

    monkeypatch.setattr(watch, "once", once)
    found = watch.measure(lambda x: None, filled, 7, effort)
    assert len(leads) <= effort.most_calls
    return [ms - 1.0 for ms in found.device_ms], leads


def test_measuring_ends_once_the_median_is_certain_enough(monkeypatch):
    watch, times = Stopwatch(torch.device("cpu")), iter([1.0 + 0.001 * (n % 2) for n in range(40)])
    monkeypatch.setattr(watch, "once", lambda *a, **k: (lambda t: (Reading(t, t), None))(next(times)))
    asked = Effort(min_ms=1e6, limit_s=60.0, warmup=2, error=0.005)
    assert len(watch.measure(lambda x: None, filled, 7, asked).device_ms) == ENOUGH
    times = iter([1.0 + 0.1 * (n % 2) for n in range(80)])
    assert len(watch.measure(lambda x: None, filled, 7, asked).device_ms) == asked.max_calls


def test_measuring_ends_early_where_every_call_is_clearly_behind(monkeypatch):
    def calls(*pattern: float) -> int:
        watch, times = Stopwatch(torch.device("cpu")), iter(pattern * 40)
        monkeypatch.setattr(watch, "once", lambda *a, **k: (lambda t: (Reading(t, t), None))(next(times)))
        asked = Effort(min_ms=1e6, limit_s=60.0, warmup=2, behind_ms=1.5)
        return len(watch.measure(lambda x: None, filled, 7, asked).device_ms)

    assert calls(1.6) == calls(1.6, 9.0) == FEW
    assert calls(1.4) == calls(1.4, 9.0) == Effort().max_calls


FOUR = Effort(min_ms=0.0, min_calls=4, limit_s=60.0, warmup=1)


def test_a_call_that_the_host_launched_late_is_repeated_with_a_longer_lead(monkeypatch: pytest.MonkeyPatch):
    counted, leads = measured([0.12, 0.15, 0.3, 0.2, 0.5, 0.39, 0.3], FOUR, monkeypatch)
    assert counted == [1, 3, 5, 6] and leads == [0.1, 0.24, 0.24, 0.4, 0.4, 0.4, 0.4]


def test_a_program_that_the_host_is_long_to_launch_is_timed_as_it_is(monkeypatch: pytest.MonkeyPatch):
    counted, leads = measured([0.5], FOUR, monkeypatch)
    assert counted == [1 + HOPELESS + n for n in range(4)] and set(leads) == {LEAD_MS, MOST_LEAD_MS}
    counted, leads = measured([0.05, 90.0], FOUR, monkeypatch)
    assert counted == [1 + MOST_LATE + n for n in range(4)] and max(leads) == MOST_LEAD_MS


def test_long_calls_are_not_repeated_for_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stopwatch, "LATE_S", 0.0)
    counted, _ = measured([0.5], FOUR, monkeypatch)
    assert counted == [1, 2, 3, 4]


def test_inputs_too_large_for_several_sets_are_held_one_at_a_time():
    watch = Stopwatch(torch.device("cpu"))
    watch._memory = 0
    made: list[weakref.ref[torch.Tensor]] = []
    seen: list[float] = []

    def make(seed: int) -> tuple[torch.Tensor]:
        assert not any(reference() is not None for reference in made)
        x = torch.full((4,), float(seed % 1000003))
        made.append(weakref.ref(x))
        return (x,)

    watch.measure(lambda x: seen.append(float(x[0])), make, 7, Effort(0.0, 4, 1.0, 1))
    assert len(made) == len(set(seen)) == 5


def test_a_witness_is_any_call_that_counts_and_copied_at_once():
    output = torch.zeros(2)
    chosen = set()
    for _ in range(60):
        sampler = OutputSampler()
        for _ in range(2):
            sampler.begin()
            for call in (3, 4):
                sampler.show(call, (output.fill_(call),))
        assert sampler.sample.tensors[0].tolist() == [sampler.sample.call] * 2
        chosen.add((sampler.sample.round, sampler.sample.call))
    assert chosen == {(0, 3), (0, 4), (1, 3), (1, 4)}


def test_the_least_time_counts_what_must_be_moved():
    def bound(function, *shapes):
        return least_ms(
            capture_spec(KernelSpec.from_function(function, tuple(torch.empty(s) for s in shapes))), DEVICES["h200"]
        )

    per_ms = DEVICES["h200"].bandwidth_gbs * 1e6
    n = 1 << 24
    assert bound(torch.relu, (n,)) == pytest.approx((4 * n + max(4 * n - DEVICES["h200"].l2_bytes, 0)) / per_ms)
    assert bound(lambda x: x.sum(), (n,)) == pytest.approx(4 * n / per_ms)
    assert bound(lambda x: x[:10] + 1, (n,)) == 0
    assert bound(lambda x: x.cumsum(0), (n,)) == bound(torch.relu, (n,))
    assert bound(lambda x: x.cumsum(0)[:10] + 1, (n,)) == 0
    assert bound(lambda x: torch.triu(x.reshape(4096, 4096)), (n,)) < 5 * n / per_ms
