"""The evaluator without a GPU: every gate, every kind of failure, and times that say they are estimates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.estimate.interpret import round_to_tf32
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Asked, Evaluation, Gate, Patch, Request
from qimeng.program.program import Implementation, Program
from qimeng.spec import DISTRIBUTIONS, KernelSpec

H200 = DEVICES["h200"]
CODER = TemplateCoder()
Made = tuple[EstimatingEvaluator, Program]

SCALE = """
@triton.jit
def {name}_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, {body}, at < n)


def {name}(x):
    y = torch.empty_like(x)
    {name}_kernel[({grid},)](x, y, x.numel(), BLOCK=256, num_warps={warps})
    return (y,)
"""

PRODUCT = """
@triton.jit
def {name}_kernel(x, w, y, K, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    acc = tl.zeros((BM, N), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        a, b = tl.load(x + m[:, None] * K + at[None, :]), tl.load(w + at[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc, input_precision="{precision}")
    tl.store(y + m[:, None] * N + n[None, :], acc)


def {name}(x, w):
    y = torch.empty((x.shape[0], w.shape[1]), dtype=torch.float32, device=x.device)
    {name}_kernel[(x.shape[0] // {rows},)](x, w, y, x.shape[1], N=w.shape[1], BM={rows}, BK=32, num_stages={stages})
    return (y,)
"""


LINEAR = """
import torch

rows = 4096
columns = 2048


class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.line = torch.nn.Linear(n, n)

    def forward(self, x):
        return torch.relu(self.line(x)) * 2


def get_inputs():
    return [torch.rand(rows, columns)]


def get_init_inputs():
    return [columns]
"""
THRICE, ALL = "tl.load(x + at, at < n) * 3", "triton.cdiv(x.numel(), 256)"


def scale(name: str, body: str = THRICE, grid: str = ALL, warps: int = 4) -> Implementation:
    return Implementation("triton", SCALE.format(name=name, body=body, grid=grid, warps=warps), name)


def product(name: str, precision: str = "ieee", stages: int = 2, rows: int = 16) -> Implementation:
    text = PRODUCT.format(name=name, precision=precision, stages=stages, rows=rows)
    return Implementation("triton", text, name)


def make(spec: KernelSpec, folder: Path) -> Made:
    graph = capture(spec.module, lambda: spec.inputs(0))
    return EstimatingEvaluator(spec, H200, CODER, str(folder), any_text=True), Program.start(graph)


def put(program: Program, *alternatives: Implementation) -> Patch:
    return Patch(target=program.regions[0].id, alternatives=alternatives)


@pytest.fixture(scope="module")
def tripled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Three times a small tensor, which the interpreter takes at full size."""
    spec = KernelSpec.from_function(lambda x: x * 3, (torch.randn(32, 48),))
    evaluator, program = make(spec, tmp_path_factory.mktemp("cache"))
    yield evaluator, program
    evaluator.close()


@pytest.fixture(scope="module")
def multiplied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A small product."""
    spec = KernelSpec.from_function(torch.matmul, (torch.randn(64, 128), torch.randn(128, 64)))
    evaluator, program = make(spec, tmp_path_factory.mktemp("cache"))
    yield evaluator, program
    evaluator.close()


def check_estimated(found: Evaluation) -> None:
    assert found.ok, found.error
    assert found.timing is not None and found.timing.estimated and found.timing.device_ms > 0
    assert found.eager is not None and found.eager.estimated
    assert found.ms == pytest.approx(sum(found.region_ms.values()))
    assert Evaluation.from_json(found.to_json()) == found


def test_the_start_program(tripled: Made) -> None:
    found = tripled[0].evaluate(tripled[1])
    check_estimated(found)
    assert found.speedup == pytest.approx(1.0) and found.generated_share == 0.0
    assert set(found.seconds) == {"compile", "time", "check"} and "interpreter" in found.notes[0]


def test_the_fastest_right_alternative_is_kept(tripled: Made) -> None:
    evaluator, program = tripled
    wrong = scale("wrong", "tl.load(x + at, at < n) * 2")
    unfinished = scale("unfinished", grid="1")
    slow = scale("slow", "tl.load(x + at, at < n) " + "* 1 " * 5 + "* 3", grid="5000", warps=8)
    right = scale("right")
    found = evaluator.evaluate(program, put(program, wrong, unfinished, slow, right))
    check_estimated(found)
    assert found.chosen == 3 and found.configurations == 4 and found.generated_share == 1.0
    assert found.accuracy is not None and found.accuracy.max_error <= found.accuracy.max_budget
    assert found.resources is not None and found.resources.kernels == 1 and found.resources.registers
    none = evaluator.evaluate(program, put(program, wrong, unfinished))
    assert (none.gate, none.failure) == (Gate.PROGRAM, "wrong") and none.timing is None
    assert "error" in (none.error or "") and "2 alternatives were refused" in (none.error or "")


@pytest.mark.parametrize(
    ("change", "gate", "failure", "words"),
    [
        ({"body": "tl.load(x + at, at < n) * nothing"}, Gate.COMPILE, "compile", "nothing is not defined"),
        ({"warps": 64}, Gate.RESOURCES, "resources", "2048 threads"),
        ({"grid": "__import__('os').abort()"}, Gate.COMPILE, "crash", "SIGABRT"),
        ({"grid": "int(x.sum().item())"}, Gate.COMPILE, "unsupported", "meta"),
        ({"grid": "5 if x.is_meta else __import__('os')._exit(0)"}, Gate.PROGRAM, "exit", "exit status 0"),
        ({"grid": "5 if x.is_meta else 1 // 0"}, Gate.PROGRAM, "error", "ZeroDivisionError"),
    ],
)
def test_failures_are_typed(tripled: Made, change: dict[str, Any], gate: Gate, failure: str, words: str) -> None:
    evaluator, program = tripled
    found = evaluator.evaluate(program, put(program, scale("bad", **change)))
    assert (found.gate, found.failure) == (gate, failure), found
    assert words in (found.error or "") and found.timing is None


def test_an_accident_among_the_alternatives_leaves_the_question_open(tripled: Made) -> None:
    """The one that is wrong came farther, but the other may be right."""
    evaluator, program = tripled
    wrong = scale("wrong", "tl.load(x + at, at < n) * 2")
    found = evaluator.evaluate(program, put(program, wrong, scale("died", grid="__import__('os').abort()")))
    assert (found.failure, found.lasting, found.chosen) == ("crash", False, 1)
    assert "2 alternatives were refused" in (found.error or "")


def test_the_next_candidate_is_judged_as_if_nothing_had_happened(tripled: Made) -> None:
    evaluator, program = tripled
    check_estimated(evaluator.evaluate(program, put(program, scale("after"))))


def test_too_much_shared_memory(multiplied: Made) -> None:
    evaluator, program = multiplied
    found = evaluator.evaluate(program, put(program, product("large", stages=40)))
    assert (found.gate, found.failure) == (Gate.RESOURCES, "resources")
    assert "sm_90 allows 232448 B a block" in (found.error or "")
    assert found.resources is not None and (found.resources.shared_bytes or 0) > 232448


def test_tf32_is_what_a_tensor_core_makes_of_it(multiplied: Made) -> None:
    """Triton's interpreter would multiply in full precision, and a wrong precision would pass."""
    evaluator, program = multiplied
    check_estimated(evaluator.evaluate(program, put(program, product("exact"))))
    found = evaluator.evaluate(program, put(program, product("short", "tf32")))
    assert (found.gate, found.failure) == (Gate.PROGRAM, "wrong")


def test_mode_high_allows_rounded_tf32(tmp_path: Path) -> None:
    spec = KernelSpec.from_function(torch.matmul, (torch.randn(64, 128), torch.randn(128, 64)), mode="high")
    evaluator, program = make(spec, tmp_path)
    request = Request(program, Action("lowering", (program.regions[0].id,)), H200, "high")
    patch = CODER.write(request)
    assert patch.alternatives[0].schedule is not None and patch.alternatives[0].schedule.precision == "tf32"
    found = evaluator.evaluate(program, patch)
    evaluator.close()
    check_estimated(found)
    assert found.accuracy is not None and 1e-5 < found.accuracy.max_error < 1e-2


def test_a_large_bfloat16_module_is_checked_smaller(tmp_path: Path) -> None:
    spec = KernelSpec.from_source(LINEAR, "linear", dtype="bfloat16")
    evaluator, program = make(spec, tmp_path)
    for region in program.regions:
        program = CODER.write(Request(program, Action("lowering", (region.id,)), H200)).apply(program)
    found = evaluator.evaluate(program)
    evaluator.close()
    check_estimated(found)
    assert found.notes == ("checked at reduced size in Triton's interpreter",)
    assert found.accuracy is not None and found.accuracy.trials >= 1


def test_what_no_template_printed_and_nothing_can_check_is_refused(tmp_path: Path) -> None:
    spec = KernelSpec.from_function(lambda x: x * 3, (torch.empty(4096, 2048),), domains=("real",))
    evaluator, program = make(spec, tmp_path)
    found = evaluator.evaluate(program, put(program, scale("foreign")))
    opaque = evaluator.evaluate(Program(program.graph, (), {}, "class Model: ..."))
    evaluator.close()
    assert (found.gate, found.failure) == (Gate.PROGRAM, "unsupported") and found.timing is None
    assert "not checked: region mul was not printed from a schedule" in (found.error or "")
    assert (opaque.gate, opaque.failure) == (Gate.TIMING, "unsupported") and opaque.timing is None


def test_final_judges_again_on_every_distribution(tmp_path: Path) -> None:
    spec = KernelSpec.from_function(lambda x: torch.relu(x * 3), (torch.randn(64, 64),))
    evaluator, program = make(spec, tmp_path)
    program = CODER.write(Request(program, Action("lowering", (program.regions[0].id,)), H200)).apply(program)
    searched, final = evaluator.evaluate(program), evaluator.evaluate(program, asked=Asked.FINAL)
    evaluator.close()
    assert searched.ok and final.ok and not final.unchecked
    assert searched.accuracy is not None and final.accuracy is not None
    assert final.accuracy.trials > len(DISTRIBUTIONS) > searched.accuracy.trials
    assert "no time" not in " ".join(final.notes)


def test_what_the_interpreter_cannot_check_is_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.envs.estimate.interpret.MOST_ELEMENTS", 100)
    spec = KernelSpec.from_function(lambda x: torch.relu(x * 3), (torch.randn(64, 64),))
    evaluator, program = make(spec, tmp_path)
    program = CODER.write(Request(program, Action("lowering", (program.regions[0].id,)), H200)).apply(program)
    found, final = evaluator.evaluate(program), evaluator.evaluate(program, asked=Asked.FINAL)
    evaluator.close()
    assert found.ok and final.ok and found.accuracy is None and final.accuracy is None
    assert "too large for the interpreter" in found.unchecked and found.unchecked == final.unchecked
    assert Evaluation.from_json(final.to_json()) == final


def test_rounding_to_tf32() -> None:
    x = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-10, 1 + 3 * 2**-11, -(1 + 2**-10), float("inf"), float("nan")])
    expected = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10, 1 + 2**-9, -(1 + 2**-10), float("inf"), float("nan")])
    torch.testing.assert_close(round_to_tf32(x), expected, rtol=0, atol=0, equal_nan=True)
    assert round_to_tf32(x.half()).dtype is torch.float16
