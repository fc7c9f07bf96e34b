"""Submissions on a GPU: host, judge and workers share it from inside their sandboxes, and times are measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qimeng.interfaces import Asked, Evaluation
from qimeng.service.hosting import Settings, close_hosts, describe, judge_apart
from qimeng.service.messages import Answer, Candidate, Options, Reference, Submission

pytestmark = pytest.mark.gpu

REFERENCE = """import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width, slope):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.slope = slope

    def forward(self, x):
        return torch.nn.functional.leaky_relu(x * self.scale, self.slope)

def get_inputs():
    return [torch.randn(8192, 4096)]

def get_init_inputs():
    return [4096, 0.1]
"""
MODEL = """import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def scaled(x, s, o, slope, N: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, N)
    v = tl.load(x + row * N + n) * tl.load(s + n)
    tl.store(o + row * N + n, tl.where(v > 0, v, slope * v))

class ModelNew(nn.Module):
    def __init__(self, width, slope):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.width, self.slope = width, slope

    def forward(self, x):
        o = torch.empty_like(x)
        scaled[(x.shape[0],)](x, self.scale, o, self.slope, N=self.width)
        return o
"""


@pytest.fixture(scope="module", autouse=True)
def no_host_is_left() -> Iterator[None]:
    yield
    close_hosts()


def answered(candidate: str, reference: str = REFERENCE, asked: Asked = Asked.FINAL, **options: object) -> Answer:
    submission = Submission(Reference(reference), Candidate(candidate), Options(asked, **options))  # type: ignore[arg-type]
    text, _ = judge_apart(Settings(), submission.to_json())
    return Answer.of(Evaluation.from_json(text), dict(describe(Settings())["versions"]))


def test_a_fused_kernel_is_right_and_measured() -> None:
    found = answered(MODEL, compile_modes=("default",))
    assert (found.fault, found.compiled, found.correct, found.estimated) == (None, True, True, False)
    assert found.times is not None and found.eager is not None and found.times.calls > 1
    assert found.speedup is not None and found.speedup > 1, "one pass over memory instead of two"
    assert found.torch_compile and found.over_compile is not None
    assert found.generated_share is not None and found.generated_share > 0.9
    assert found.card and not found.unchecked and found.kernelbench
    assert {"landlock", "seccomp"} <= set(found.evaluation["sandbox"])


@pytest.mark.parametrize(
    ("candidate", "failures"),
    [
        (MODEL.replace("slope * v", "v"), ("wrong",)),
        (MODEL.replace("o + row * N", "o + row * N * 100000"), ("illegal-access", "wrong", "crash")),
        (MODEL.replace("tl.load(x + row", "tl.load(y + row"), ("coder",)),
        (MODEL.replace("tl.arange(0, N)", "tl.arange(0, N - 1)"), ("compile",)),
        (MODEL.replace("        return o", "        return torch.nn.functional.leaky_relu(x * self.scale, self.slope)"),
         ("not-a-kernel",)),
    ],
)  # fmt: skip
def test_a_bad_candidate_is_the_kernels_fault(candidate: str, failures: tuple[str, ...]) -> None:
    found = answered(candidate)
    assert found.fault is not None
    assert (found.fault.kind, found.fault.failure in failures, found.correct) == ("kernel", True, False), found.fault
    assert answered(MODEL, asked=Asked.TIMING).correct is True, "the next one is judged as if nothing had been"


def test_a_reference_on_the_gpu_that_harms_its_host_harms_no_other() -> None:
    harm = REFERENCE.replace("        super().__init__()", "        super().__init__()\n        import os; os.abort()")
    found = answered(MODEL, harm)
    assert found.fault is not None and found.fault.kind == "reference"
    assert answered(MODEL, asked=Asked.TIMING).correct is True
