"""Errors that luck decides: an honest program is never refused for them, and nothing wrong hides behind them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from qimeng.envs.errors import error_budget
from qimeng.envs.errors.accuracy import Error, measure
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.errors.float64 import NEARBY, Near, move_nearby, nearby
from qimeng.envs.errors.nearby_inputs import FAR, NEARBY_TRIALS, most_nearby, second_look
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.envs.judge.trials import Trial
from qimeng.envs.judge.verdicts import Judge, Tally
from qimeng.envs.workers.outputs import describe, facts_to_json
from qimeng.envs.workers.tensor_transfer import hand_over
from qimeng.graph.region import merge
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import DISTRIBUTIONS, KernelSpec
from qimeng.spec.distributions import SECRET_SIZE

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]


def references(module: torch.nn.Module, x: torch.Tensor, seed: int) -> References:
    draws = random.Random(seed)
    spec = KernelSpec.from_module(module, (x,), training=True).with_(accepts_any=True)  # none is tried
    return References(spec, None, CPU, draw_seed=lambda: draws.getrandbits(62))


def linear_batch_norm(seed: int, rows: int = 2, inputs: int = 32, features: int = 4) -> References:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(inputs, features), torch.nn.BatchNorm1d(features))
    return references(module, torch.rand(rows, inputs), seed)


def honest(state: State, x: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    """The same with its sums in another order."""
    weight, terms = state["0.weight"], range(x.shape[1])
    y = torch.zeros(x.shape[0], weight.shape[0])
    for k in reversed(terms) if backwards else terms:
        y = y + x[:, k : k + 1] * weight[:, k]
    y = y + state["0.bias"]
    mean = y.sum(0) / len(y)
    variance = ((y - mean) ** 2).sum(0) / len(y)
    return (y - mean) * torch.rsqrt(variance + 1e-5) * state["1.weight"] + state["1.bias"]


def without_epsilon(state: State, x: torch.Tensor) -> torch.Tensor:
    y = x @ state["0.weight"].T + state["0.bias"]
    return (y - y.mean(0)) * torch.rsqrt(y.var(0, correction=0)) * state["1.weight"] + state["1.bias"]


def in_half(state: State, x: torch.Tensor) -> torch.Tensor:
    return honest({k: v.half().float() for k, v in state.items()}, x.half().float())


def with_unbiased_variance(state: State, x: torch.Tensor) -> torch.Tensor:
    y = x @ state["0.weight"].T + state["0.bias"]
    return (y - y.mean(0)) * torch.rsqrt(y.var(0) + 1e-5) * state["1.weight"] + state["1.bias"]


def looks(refs: References, candidates: list[Callable[[State, torch.Tensor], torch.Tensor]], rounds: int):
    """Of every trial and candidate: whether it is right at once, and whether it is after a second look."""
    for _ in range(rounds):
        for trial in refs.every_distribution():
            state, x = refs.parameters.set(trial.draw.parameter_seed), refs.inputs(trial.draw)[0]
            for candidate in candidates:
                state = refs.parameters.set(trial.draw.parameter_seed)
                y = candidate(state, x)
                error, text = error_budget.check(y, trial.expected[0])
                yield text is None, text is None or refs.look_again(trial, 0, y, error) is not None


def test_an_honest_program_is_out_of_bounds_now_and_then_and_never_refused():
    found = [
        look
        for seed in range(6)
        for look in looks(linear_batch_norm(seed, inputs=256), [honest, lambda s, x: honest(s, x, True)], rounds=2)
    ]
    assert len(found) == 6 * 2 * (len(DISTRIBUTIONS) + len(SECRET_SIZE) + 1) * 2
    assert sum(not first for first, _ in found) >= 1, "what this test is about does not happen any more"
    assert all(second for _, second in found)


def test_rows_whose_terms_nearly_cancel_are_no_reason_to_refuse_an_honest_program():
    """Every element of a row is off by what its sum is off, and of some rows hardly anything is left."""

    def sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x @ y
        s = h.sum(-1, keepdim=True)
        return s + s * h

    def in_two_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = (x[:, :32] @ y[:32]).float() + (x[:, 32:] @ y[32:]).float()
        s = h.sum(-1, keepdim=True)
        return (s + s * h).bfloat16()

    torch.manual_seed(0)
    inputs = torch.randn(4000, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    draw_seed = partial(random.Random(0).getrandbits, 62)  # some draws have such rows
    refs = References(KernelSpec.from_function(sums, inputs), None, CPU, draw_seed)
    for _ in range(2):
        for trial in refs.every_distribution():
            y = in_two_parts(*refs.inputs(trial.draw))
            error, text = error_budget.check(y, trial.expected[0])
            assert text is None or refs.look_again(trial, 0, y, error) is not None, trial.draw.distribution


def test_logits_that_are_nearly_the_same_are_no_reason_to_refuse_an_honest_program():
    """Which of two keys a query attends to hangs on how the sums were rounded, where logits go into the hundreds."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k = torch.cat([k, 1.0001 * k])
        return torch.softmax(q @ k.t(), -1) @ v

    def in_two_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k = torch.cat([k, 1.0001 * k])
        return torch.softmax(q[:, :16] @ k[:, :16].t() + q[:, 16:] @ k[:, 16:].t(), -1) @ v

    torch.manual_seed(0)
    inputs = torch.randn(1, 32), torch.randn(16, 32), torch.randn(32, 16)
    draw_seed, first = partial(random.Random(0).getrandbits, 62), 0
    refs = References(KernelSpec.from_function(attention, inputs), None, CPU, draw_seed)
    refs.dropped.update(set(DISTRIBUTIONS) - {"x30"})
    for _ in range(60):
        for trial in refs.every_distribution():
            y = in_two_parts(*refs.inputs(trial.draw))
            error, text = error_budget.check(y, trial.expected[0])
            first += text is not None
            assert text is None or refs.look_again(trial, 0, y, error) is not None
    assert first > 0, "what this test is about does not happen any more"


def test_rounding_behind_what_saturates_is_no_reason_to_refuse_an_honest_program():
    """Behind a sigmoid that is 1 all inputs nearby are the same: new roundings come from the parameters alone."""

    def later(state: State, x: torch.Tensor) -> torch.Tensor:
        return honest({k.replace("1.", "0.", 1).replace("2.", "1.", 1): v for k, v in state.items()}, x.sigmoid())

    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 4)
    linear.weight.data.mul_(300)
    module = torch.nn.Sequential(torch.nn.Sigmoid(), linear, torch.nn.BatchNorm1d(4))
    refs = references(module, torch.rand(3, 32) + 50, 0)
    first = 0
    for trial in refs.fresh(5000):
        y = later(refs.state(trial.draw), refs.inputs(trial.draw)[0])
        error, text = error_budget.check(y, trial.expected[0])
        first += text is not None
        assert text is None or refs.look_again(trial, 0, y, error) is not None
        if first == 2:
            break
    assert first > 0, "what this test is about does not happen any more"


def test_eagers_error_nearby_is_told_relative_to_the_result_in_question():
    refs = References(KernelSpec.from_function(torch.sin, (torch.randn(4, 4),)), None, CPU)
    near, at = torch.full((4, 4), 100.0), torch.ones(4, 4)
    expected, _ = refs.expect(near + 0.5, near.double(), Error(), "given", False, at)
    assert expected.error.max == pytest.approx(0.25) and torch.equal(expected.value, near)
    expected, _ = refs.expect(near + 0.5, near.double(), Error(), "given", False)
    assert expected.error.max == pytest.approx(0.0025)


@pytest.fixture(scope="module")
def of_eight_rows() -> list[References]:
    return [linear_batch_norm(seed, rows=8) for seed in range(12)]


@pytest.mark.parametrize("wrong", [without_epsilon, in_half, with_unbiased_variance])
def test_what_is_wrong_stays_refused_on_every_draw(wrong, of_eight_rows):
    """Per program, as the judge does: one trial that is refused is enough, and no run lets it pass."""
    for refs in of_eight_rows:
        assert not all(right for _, right in looks(refs, [wrong], rounds=1))


def test_trials_of_another_distribution_lend_no_error():
    """Eager loses six digits on small inputs, none on large ones: wrong by a thousandth there is wrong."""

    def cancels(x: torch.Tensor) -> torch.Tensor:
        return (x + 3000.0) - 3000.0 + torch.where(x.abs() > 0.5, 1000.0 * x, 0.0)

    refs = References(KernelSpec.from_function(cancels, (torch.randn(64, 64),)), None, CPU)
    errors: dict[str, Error] = {}
    for trial in refs.every_distribution():
        errors[trial.draw.distribution] = trial.outputs[0].error
        if trial.draw.distribution not in ("x0.01", "rounded", "units"):  # the latter two may be as small
            y = refs.parameters.module(refs.inputs(trial.draw)[0]) * 1.001
            error, text = error_budget.check(y, trial.outputs[0])
            assert text is not None and refs.look_again(trial, 0, y, error) is None
    assert errors["x0.01"].max > 1e-3 > 100 * errors["x3"].rms


def test_inputs_nearby_keep_their_domain_layout_and_sign():
    torch.manual_seed(0)
    real, shares = torch.randn(6, 5).t(), torch.rand(1, 8).softmax(-1).expand(3, 8)
    sign, index = torch.randn(9).sign(), torch.arange(7)
    inputs = ({"a": real}, shares, sign, index, 3)
    moved = nearby(inputs, ("real", "probability", "sign", "index", "scalar"), Near(1))
    assert moved[2] is sign and moved[3] is index and moved[4] == 3
    assert moved[0]["a"].stride() == real.stride() and moved[1].stride() == shares.stride()
    for new, old in ((moved[0]["a"], real), (moved[1], shares)):
        factor = (new / old).double()
        assert float(factor.min()) >= 1 - 1 / 64 - 1e-6 and float(factor.max()) <= 1 and float(factor.std()) > 1e-3
    again = nearby(inputs, ("real", "probability", "sign", "index", "scalar"), Near(1))
    assert torch.equal(again[1], moved[1]) and not torch.equal(moved[1], shares)
    for dtype, most in ((torch.float32, NEARBY[0]), (torch.float16, 2.0**-9), (torch.bfloat16, 1 / 64)):
        x = torch.rand(1000).add(1).to(dtype)
        (moved,) = nearby((x,), ("real",), Near(1, NEARBY[0]))
        off = 1 - moved.double() / x.double()
        assert most / 4 < float(off.max()) <= most + torch.finfo(dtype).eps, "every rounding falls out anew"


def test_a_state_nearby_keeps_integers_masks_and_constants_that_are_no_parameters():
    module = torch.nn.BatchNorm1d(8)
    module.register_buffer("mask", torch.tensor([0.0, 1.0, 1.0, 0.0]))
    torch.nn.init.normal_(module.bias)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    move_nearby(module, Near(1))
    after = module.state_dict()
    assert {k for k in before if torch.equal(before[k], after[k])} == {"num_batches_tracked", "mask", "running_mean"}
    factor = after["bias"] / before["bias"]
    assert float(factor.min()) >= 1 - 1 / 64 - 1e-6 and float(factor.max()) <= 1 and float(factor.std()) > 1e-3


def test_a_second_look_ends_as_soon_as_it_can_and_is_refused_to_what_is_far_off():
    expected = [Expected(torch.ones(1), Error(1e-6, 1e-6), Error(1e-6, 1e-6))]
    asked = []

    def look() -> bool:
        asked.append(1)
        expected[0] = expected[0].widened(Expected(torch.ones(1), Error(len(asked) * 1e-6, 1e-6)))
        return len(asked) < 5

    assert second_look(Error(1e-5, 1e-6), lambda: expected[0], look) == expected[0]
    assert len(asked) == 3 and expected[0].budget.max == pytest.approx(1.2e-5)
    assert second_look(Error(1e-4, 1e-6), lambda: expected[0], look) is None and len(asked) == 5
    far = expected[0].budget.max * FAR[0] * 1.01
    assert second_look(Error(far, 1e-6), lambda: expected[0], look) is None and len(asked) == 5
    for number, share in enumerate(FAR):
        asked.clear()
        assert second_look(Error(expected[0].budget.max * share * 0.99, 1e-6), lambda: expected[0], look) is None
        assert len(asked) == (1, 2, 5)[number], "one more look for what is far off, two for what is nearer"
    assert second_look(Error(float("nan"), 1e-6), lambda: expected[0], look) is None and len(asked) == 5
    assert most_nearby(10) == NEARBY_TRIALS and most_nearby(1 << 20) == 4 and most_nearby(1 << 30) == 4


def test_a_channel_that_is_nothing_but_rounding_gets_more_looks():
    """What a ReLU leaves of a channel near zero: zeros in one result, rounding in the other, in eager's as well."""
    value = torch.rand(64, 8)
    value[:, 3] = 0.0
    candidate, eager = value.clone(), value.clone()
    candidate[5, 3], eager[9, 3] = 1e-7, 2e-7
    error, own = measure(candidate, value), measure(eager, value)
    assert error.max < 1e-6 and error.across > 1e4, "the column has no scale"
    floor = Error(1e-5, 1e-5, 1e-5, 1e-5)
    for unlucky, passes in ((2, True), (5, False)):
        expected, asked = [Expected(value, Error(), floor)], []

        def look(unlucky=unlucky, expected=expected, asked=asked) -> bool:
            asked.append(1)
            seen = own if len(asked) == unlucky else Error()
            expected[0] = expected[0].widened(Expected(value, seen, floor))
            return True

        assert (second_look(error, lambda expected=expected: expected[0], look) is not None) is passes
        assert len(asked) == min(unlucky, 4)


def near_miss(trial: Trial, share: float) -> torch.Tensor:
    """The expected output with one element off by `share` of the allowed maximum."""
    expected = trial.outputs[0]
    y = expected.value.double().clone()
    scale = y[0, 0].abs() + y[0].square().mean().sqrt()
    y[0, 0] += share * expected.budget.max * scale
    return y.float()


def test_the_judge_takes_a_second_look_before_it_refuses_and_keeps_what_it_saw():
    refs = linear_batch_norm(1)
    judge = Judge(refs, lambda: 1.0)
    trial = next(iter(refs.fresh(1)))

    def compare(y: torch.Tensor, look_again) -> str | None:
        facts, tensors = describe(y, {})
        items, files = hand_over([*tensors, *(b.value for b in trial.buffers.values())])
        answer = {"facts": facts_to_json(facts), "tensors": items}, files
        return judge.compare(answer, refs.facts, trial.expected, Tally(), look_again).error

    def look_again(number, actual, error):
        return refs.look_again(trial, number, actual, error)

    y = near_miss(trial, 0.8)
    budget = trial.outputs[0].budget
    trial.outputs[0] = Expected(trial.outputs[0].value, Error(), budget * 0.5)  # as if eager had been lucky
    assert "out of bounds" in (compare(y, lambda *a: None) or "")
    assert compare(y, look_again) is None
    assert trial.nearby > 0
    assert compare(y, lambda *a: None) is None, "the next candidate is held against the same budget"
    assert "out of bounds" in (compare(near_miss(trial, 40.0), look_again) or "")


def test_a_region_gets_a_second_look_too(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    spec = KernelSpec.from_module(module, (torch.rand(4, 8),), training=True)
    graph = capture_spec(spec)
    program = Program.start(graph)
    program = program.with_regions(merge(program.regions, [r.id for r in program.regions]))
    refs = References(spec, graph, CPU)
    region = RegionReference(refs, program, program.regions[0], str(tmp_path))
    number = next(n for n, e in enumerate(region.expected) if e.value.shape == (4, 4))
    lucky = region.expected[number]
    region.expected[number] = Expected(lucky.value, Error(), lucky.floor * 0.5)
    assert region.look_again(number, lucky.value, lucky.floor * 0.9) is not None
    assert region.expected[number].floor.max >= 0.9 * lucky.floor.max
    assert torch.equal(region.expected[number].value, lucky.value)
    assert region.look_again(number, lucky.value, region.expected[number].budget * 2 * FAR[0]) is None
