"""What is right, on the CPU: float64, the budget from eager's own error, and the cases that need care."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.discrete import Dividing
from qimeng.envs.errors.float64 import NamedAsDouble
from qimeng.envs.estimate.interpret import gpu_arithmetic
from qimeng.envs.judge import exact_reference
from qimeng.envs.judge.program_times import ProgramTimes
from qimeng.envs.judge.reference import SMALL, References
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.graph.ops import longest_reduction
from qimeng.graph.region import merge
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import DISTRIBUTIONS, KernelSpec
from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.distributions import SECRET_SIZE
from qimeng.spec.perturb import SHARES, share_of
from qimeng.spec.together import TOGETHER

CPU = torch.device("cpu")


def references(module: torch.nn.Module, *inputs: torch.Tensor, **options) -> References:
    return References(KernelSpec.from_module(module, inputs, **options), None, CPU)


def of_function(function, *inputs: torch.Tensor, **options) -> References:
    return References(KernelSpec.from_function(function, inputs, **options), None, CPU)


def test_the_reference_is_float64_and_eager_is_within_a_quarter_of_its_own_budget():
    refs = references(torch.nn.Linear(256, 32), torch.randn(64, 256))
    assert refs.kind == "float64" and refs.eager_agrees
    for trial in refs.trials(4):
        (expected,) = trial.outputs
        x = refs.inputs(trial.draw)[0]
        state = refs.parameters.set(trial.draw.parameter_seed)
        exact = (x.double() @ state["weight"].double().T + state["bias"].double()).float()
        assert torch.allclose(exact, expected.value, rtol=1e-6, atol=0, equal_nan=True)
        error = accuracy.measure(
            torch.nn.functional.linear(x, state["weight"], state["bias"]), expected.value, expected.eager
        )
        assert error == expected.error and 0 < error.max <= expected.budget.max / 4 or error.max < expected.floor.max


def test_trials_start_with_the_specs_own_parameters_and_vary_from_there():
    refs = references(torch.nn.Linear(8, 8), torch.randn(4, 8))
    kinds = [(t.draw.distribution, t.draw.parameter_seed is not None) for t in refs.trials(len(DISTRIBUTIONS) + 1)]
    assert kinds[:2] == [("examples", False), ("given", True)]
    assert {d for d, _ in kinds[2:]} == set(DISTRIBUTIONS) - {"given"}
    assert kinds[2][0] in SMALL, "what is lost beside usual sizes shows at once"
    assert [bool(t.eager) for t in refs.trials(3)] == [True, False, False]
    seeds = [t.draw.parameter_seed for t in refs.trials(len(DISTRIBUTIONS) + 1)]
    shares = [None if seed is None else SHARES[share_of(seed)] for seed in seeds]
    assert shares[:2] == [None, 0], "one row first, which no sample of the parameters shows"
    assert set(shares[2:]) == set(SHARES) - {0}
    assert len(list(refs.every_distribution())) == len(DISTRIBUTIONS) + len(SECRET_SIZE) + 1, (
        "those of secret size or place twice"
    )


def test_distributions_on_which_the_module_raises_are_dropped_beforehand():
    """On a GPU a look at values fails in the middle of a kernel, and the process with it."""
    refs = of_function(torch.nn.functional.binary_cross_entropy, torch.rand(64, 8) * 0.9, torch.rand(64, 8) * 0.9)
    assert refs.dropped == set(DISTRIBUTIONS) - {"given", "x0.01"}
    assert {t.draw.distribution for t in refs.every_distribution()} == {"examples", "given", "x0.01"}
    assert refs.kind == "float64"
    assert len(list(refs.trials(4))) == 4
    assert not of_function(lambda x: x / 0, torch.rand(4, 4)).dropped - {"given"}


def test_exponentials_that_nothing_keeps_from_overflowing_are_seen():
    refs = of_function(lambda x: torch.softmax(x, -1), torch.randn(64, 256))
    wrong = set()
    for trial in refs.every_distribution():
        e = refs.inputs(trial.draw)[0].exp()
        wrong |= (
            {trial.draw.distribution} if error_budget.check(e / e.sum(-1, keepdim=True), trial.outputs[0])[1] else set()
        )
    assert "x30" in wrong and wrong <= {"x30", "rounded", "slices", "spots", "shifted", *TOGETHER}


def test_one_candidate_never_gets_the_same_trial_twice():
    refs = of_function(torch.sin, torch.rand(4, 8))
    for _ in range(20):
        seeds = [t.draw.seed for t in refs.trials(4)]
        assert len(set(seeds)) == 4


class Masked(torch.nn.Module):
    """Sees what a mask in a buffer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(32))
        self.register_buffer("mask", torch.ones(32, 32).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).masked_fill(self.mask == 0, 0.0)


def test_calls_that_are_timed_have_new_parameters_and_the_masks_of_the_module():
    """A kernel skips what a mask hides: one program was timed with the module's mask, the next with another."""
    refs = references(Masked(), torch.randn(32, 32))
    own = Masked().mask

    def moved(seed: int | None) -> bool:
        return not torch.equal(refs.parameters.set(seed)["mask"], own)

    seeds = [refs.timed_parameter_seed() for _ in range(16)]
    assert len(set(seeds)) == 16 and not any(map(moved, seeds))
    assert any(moved(refs.parameter_seed()) for _ in range(32)), "checks have others"
    draw = refs.timed_draw()
    assert draw.distribution == "given" and not moved(draw.parameter_seed)
    times = ProgramTimes(refs, None, None, None, lambda: 1.0)  # type: ignore[arg-type]
    for _ in range(16):
        times.begin()
        assert not moved(times._calls.parameter_seed)


def test_the_pool_is_renewed():
    refs = references(torch.nn.Linear(8, 8), torch.randn(4, 8))
    seeds = {t.draw.seed for _ in range(40) for t in refs.trials(1)}
    assert 5 < len(seeds) < 40


def test_changed_buffers_are_expected_too():
    refs = references(torch.nn.BatchNorm1d(16), torch.randn(32, 16), training=True)
    assert refs.mutated == ("running_mean", "running_var", "num_batches_tracked")
    trial = next(iter(refs.trials(1)))
    x = refs.inputs(trial.draw)[0]
    assert torch.allclose(trial.buffers["running_mean"].value, 0.1 * x.mean(0), atol=1e-6)
    assert int(trial.buffers["num_batches_tracked"].value) == 1


def test_where_float64_does_not_run_eager_is_the_reference():
    refs = of_function(lambda x: torch.cat([x, torch.ones(4, dtype=torch.float32)]).float(), torch.randn(4))
    (trial,) = refs.trials(1)
    assert refs.kind == "eager-highest" and "float64 failed (TypeError" in " ".join(refs.remarks)
    assert trial.outputs[0].error.max == 0


class Inverting(DispatchMode):
    """Multiplies by the inverse of a number, as PyTorch does on a GPU where `Dividing` changes nothing."""

    def call(self, func, types, args=(), kwargs=None):
        changed = any(isinstance(mode, Dividing) for mode in _get_current_dispatch_mode_stack())
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor) and not changed:
            return args[0] * torch.tensor(1 / args[1], dtype=torch.float32)
        return func(*args, **(kwargs or {}))


def test_codes_may_come_of_either_way_to_divide_where_eager_is_the_reference():
    def codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = x.to(torch.float32)
        scale = values.abs().amax(1, keepdim=True) / 127
        return (values / scale).round().to(torch.int8), scale

    spec = KernelSpec.from_function(codes, (torch.randn(512, 512).bfloat16(),))
    refs = References(spec, capture_spec(spec), CPU, arithmetic=lambda mode: Inverting())
    (trial,) = refs.trials(1)
    assert refs.kind == "eager-highest"
    exact, expected = codes(*refs.inputs(trial.draw))[0], trial.expected[0]
    error, text = error_budget.check(exact, expected)
    assert text is not None, "some differ"
    assert refs.look_again(trial, 0, exact, error) is not None
    assert refs.look_again(trial, 0, torch.where(exact == 3, 4, exact).to(torch.int8), error) is None


def test_eager_as_the_reference_is_granted_the_usual_error_of_its_sums(monkeypatch: pytest.MonkeyPatch):
    spec = KernelSpec.from_module(torch.nn.Linear(4096, 8), (torch.randn(4, 4096),))
    refs = References(spec, capture_spec(spec), CPU)

    def refuse(*arguments: object) -> None:
        raise RuntimeError("not in float64")

    monkeypatch.setattr(refs, "_in_double", refuse)
    (trial,) = refs.trials(1)
    expected = trial.outputs[0]
    assert refs.kind == "eager-highest"
    assert expected.budget.max > 3 * error_budget.floor(torch.float32, error_budget.roundings(4096), Error()).max


def test_where_the_memory_runs_out_in_float64_another_plan_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    refs = references(torch.nn.Linear(64, 8), torch.randn(4, 64))

    def too_large(*arguments: object) -> None:
        raise torch.OutOfMemoryError("8 GiB")

    monkeypatch.setattr(refs, "_in_double", too_large)
    with pytest.raises(torch.OutOfMemoryError):
        list(refs.trials(1))
    while refs.economize():
        pass
    assert len(list(refs.trials(1))) == 1 and refs.kind == "eager-highest"


def test_what_jumps_after_a_cast_to_half_types_is_what_eager_gives():
    spec = KernelSpec.from_function(lambda x: torch.round(x.half() * 100).to(torch.int32), (torch.randn(64, 64),))
    refs = References(spec, capture_spec(spec), CPU)
    trial = next(iter(refs.trials(1)))
    eager = refs._eager(refs.inputs(trial.draw), trial.draw.seed)
    assert refs.kind == "float64" and torch.equal(trial.expected[0].value, eager)


def test_half_types_that_are_named_round_and_bits_are_no_numbers():
    x = torch.rand(64, dtype=torch.float64)
    with NamedAsDouble():
        rounded, raised = x.half(), x.float()
        with pytest.raises(TypeError, match="bits"):
            x.view(torch.float16)
    assert rounded.dtype is raised.dtype is torch.float64
    assert torch.equal(rounded, x.to(torch.float16).double()) and torch.equal(raised, x)


def test_random_operators_draw_in_float64_what_they_drew_for_eager():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Softmax(-1))
    refs = references(net, torch.randn(8, 64), training=True)
    assert refs.kind == "float64" and refs.random == ("aten.bernoulli_",)
    trial = next(iter(refs.trials(1)))
    (expected,) = trial.outputs
    eager = refs._eager(refs.inputs(trial.draw), trial.draw.seed)
    assert 0 < expected.error.max < 1e-5 and error_budget.check(eager, expected)[1] is None
    other = refs._eager(refs.inputs(trial.draw), trial.draw.seed + 1)
    assert error_budget.check(other, expected)[1] is not None


def test_random_operators_that_mix_their_draws_with_their_inputs_are_checked_against_seeded_eager():
    refs = references(torch.nn.RReLU(), torch.randn(64, 64), training=True)
    assert refs.kind == "eager-highest" and "eager with the same seed" in " ".join(refs.remarks)
    (expected,) = next(iter(refs.trials(1))).outputs
    assert expected.error.max == 0


def test_a_distribution_with_many_values_that_are_not_finite_is_dropped():
    refs = of_function(torch.log, torch.rand(64, 64) + 0.5, domains=("real",))
    tried = {t.draw.distribution for t in refs.every_distribution()}
    assert {"normal", "negated"} <= refs.dropped
    assert "given" in tried and not {"normal", "negated"} & tried


def test_few_values_that_are_not_finite_may_be_eagers():
    def function(x):
        return torch.where(torch.arange(1024) == 7, x * float("inf"), x)

    refs = of_function(function, torch.randn(8, 1024))
    trial = next(iter(refs.trials(1)))
    (expected,) = trial.outputs
    assert expected.eager is not None
    right = function(refs.inputs(trial.draw)[0])
    assert error_budget.check(right, expected)[1] is None


def test_indices_may_differ_where_the_values_are_as_good():
    refs = of_function(lambda x: torch.argmax(x, 1), torch.randn(8, 64))
    trial = next(iter(refs.trials(1)))
    x = refs.inputs(trial.draw)[0]
    best = torch.argmax(x, 1)
    second = x.topk(2, 1).indices[:, 1]
    assert refs.accepts_selection(trial, 0, best)
    assert not refs.accepts_selection(trial, 0, second)
    assert not refs.accepts_selection(trial, 0, best + 1000)

    tied = of_function(lambda x: torch.argmax(torch.cat([x, x], 1), 1), torch.randn(8, 64))
    trial = next(iter(tied.trials(1)))
    best = torch.argmax(tied.inputs(trial.draw)[0], 1)
    assert tied.accepts_selection(trial, 0, best + 64)


def test_what_one_ulp_of_the_inputs_changes_is_allowed():
    smooth = of_function(torch.tanh, torch.randn(4, 64))
    (expected,) = next(iter(smooth.trials(1))).outputs
    assert expected.floor.max < 1e-5
    steep = of_function(lambda x: torch.sin(x * 1e4), torch.randn(4, 64))
    (expected,) = next(iter(steep.trials(1))).outputs
    assert expected.floor.max > 1e-4


@pytest.mark.parametrize(
    ("function", "shapes", "longest"),
    [
        (lambda x: x.sum(-1), [(8, 100)], 100),
        (lambda x: torch.softmax(x, -1), [(8, 100)], 100),
        (lambda x: x.mean(), [(8, 100)], 800),
        (lambda a, b: a @ b, [(8, 100), (100, 6)], 100),
        (lambda x: x + 1, [(8, 100)], 1),
    ],
)
def test_longest_reduction(function, shapes, longest):
    spec = KernelSpec.from_function(function, tuple(torch.randn(s) for s in shapes))
    assert longest_reduction(capture_spec(spec)) == longest


@pytest.mark.parametrize(("mode", "low", "high"), [("default", 0.0, 1e-5), ("high", 1e-4, 1e-2)])
def test_eager_on_the_cpu_can_be_given_a_gpus_precision(mode: str, low: float, high: float):
    spec = KernelSpec.from_function(torch.matmul, (torch.randn(64, 128), torch.randn(128, 32)), mode=mode)
    (trial,) = References(spec, None, CPU, arithmetic=gpu_arithmetic).trials(1)
    assert low < trial.outputs[0].error.max < high


def test_every_run_of_eager_is_in_the_arithmetic_given():
    modes = []

    def noted(mode: str):
        modes.append(mode)
        return contextlib.nullcontext()

    def best(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).max(-1)[1]

    spec = KernelSpec.from_function(best, (torch.randn(64, 8), torch.randn(8, 32)), mode="high")
    refs = References(spec, None, CPU, arithmetic=noted)
    count = len(modes)
    (trial,) = refs.trials(1)
    assert count >= 2 and modes[count:] == ["high"]
    refs.accepts_selection(trial, 0, trial.outputs[0].value)
    assert modes[count:] == ["high", "high"]


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.relu(torch.std(torch.log1p(x.abs()), -1)), lambda x: (x * 0.3).float().half().float().sum(-1)],
    ids=["std of half types", "casts in the middle"],
)
def test_float64_goes_through_where_a_computation_names_a_shorter_dtype(function, tmp_path):
    """Eager rounds to half types before it goes on in float32: its error, and so the budget, shows that."""
    spec = KernelSpec.from_function(function, (torch.randn(8, 49),), dtype="bfloat16")
    graph = capture_spec(spec)
    refs = References(spec, graph, torch.device("cpu"))
    assert len(list(refs.fresh(1))) == 1 and refs.kind == "float64"
    program = Program.start(graph)
    inner = [r.id for r in program.regions][:4]
    program = program.with_regions(merge(program.regions, inner))
    region = next(r for r in program.regions if len(r.ops) > 1)
    found = RegionReference(refs, program, region, str(tmp_path)).expected[0]
    assert found.budget.max > 1e-4, "eager's own error, far above the floor of float32"


class Cancelling(torch.nn.Module):
    """Its running mean stays at exactly 0 as long as the bias is 0, since a batch is x and -x."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(4))
        self.parts = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.BatchNorm1d(4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["a"](torch.cat([x, -x]) + self.bias)


def test_a_buffer_that_one_call_leaves_as_it_was_is_updated_all_the_same():
    spec = KernelSpec.from_module(Cancelling(), (torch.randn(8, 4),))
    updated = ("parts.a.0.running_mean", "parts.a.0.running_var", "parts.a.0.num_batches_tracked")
    assert References(spec, None, torch.device("cpu")).mutated == updated
    assert References(spec, capture_spec(spec), torch.device("cpu")).mutated == updated


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda x, y: torch.atan2(x, -y), lambda x, y: torch.atan2(x, 0.0 - y)),
        (lambda x, y: 1 / -torch.relu(x) + 0 * y, lambda x, y: 1 / (0.0 - torch.relu(x)) + 0 * y),
    ],
    ids=["atan2", "reciprocal"],
)
def test_a_sign_of_zero_that_decides_a_value_is_seen(function, wrong):
    """Zeros are among the inputs that are rounded, or have slices unlike the others."""
    refs = of_function(function, torch.randn(64, 64), torch.randn(64, 64))
    for candidate, right in ((function, True), (wrong, False)):
        found = []
        for trial in refs.every_distribution():
            y = candidate(*refs.inputs(trial.draw))
            error, text = error_budget.check(y, trial.outputs[0])
            found.append(text is None or refs.look_again(trial, 0, y, error) is not None)
        assert all(found) is right


@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_what_the_module_refuses_is_left_out_and_float64_stays_the_reference(error):
    x = torch.randn(4, 8)

    class Checked(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.abs().max() > limit:
                raise error("too large")
            return y

    module, limit = Checked(8, 8).requires_grad_(False), float("inf")
    limit = 1.05 * float(module(x).abs().max())  # other parameters and larger inputs exceed it
    refs = references(module, x)
    found = [t.draw.distribution for t in refs.every_distribution()]
    assert found[0] == "examples" and len(found) < len(DISTRIBUTIONS) and refs.kind == "float64"
    assert {"x3", "x30"} <= refs.dropped
    for _ in range(20):
        list(refs.fresh(1))
    assert refs.kind == "float64"


def test_large_outputs_are_moved_by_an_ulp_once_for_each_distribution(monkeypatch: pytest.MonkeyPatch):
    refs, runs = references(torch.nn.Linear(16, 8), torch.randn(4, 16)), []
    module = refs._exact_module(refs.state(refs._new_draw("given", None)))
    module.register_forward_hook(lambda *_: runs.append(1))

    def counted() -> int:
        runs.clear()
        assert refs.make(refs._new_draw("given", None)) is not None
        return len(runs)

    assert [counted(), counted()] == [2, 2]
    monkeypatch.setattr(exact_reference, "LARGE", 1)
    assert [counted(), counted()] == [1, 1]


def test_alternatives_of_a_region_are_compared_with_the_masks_of_the_module(tmp_path):
    """Which one is fastest depends on what the mask lets it skip."""
    spec = KernelSpec.from_module(Masked(), (torch.randn(32, 32),))
    program = Program.start(capture_spec(spec))
    refs = References(spec, program.graph, CPU)
    for _ in range(8):
        region = RegionReference(refs, program, program.regions[-1], str(tmp_path))
        assert torch.equal(refs.parameters.set(region.draw.parameter_seed)["mask"], Masked().mask)
