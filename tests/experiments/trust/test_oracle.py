"""The oracle on programs whose verdict is known, and that it is no relative of the judge."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.trust import oracle
from experiments.trust.oracle import Problem, Question, compare
from experiments.trust.oracle_process import OracleProcess

TEXT = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 24)

    def forward(self, x):
        return torch.softmax(self.linear(x), -1)

def get_inputs():
    return [torch.randn(8, 16)]

def get_init_inputs():
    return []
"""

RIGHT = """
import os
import torch
import triton
import triton.language as tl


@triton.jit
def rows(x_ptr, y_ptr, RB: tl.constexpr):
    p = tl.program_id(0)
    r = tl.arange(0, RB)
    ok = r < 24
    x = tl.load(x_ptr + p * 24 + r, mask=ok, other=float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + p * 24 + r, e / tl.sum(e, axis=0), mask=ok)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 24)

    def forward(self, x):
        h = self.linear(x)
        y = torch.empty_like(h)
        rows[(8,)](h, y, RB=32)
        return y
"""


@pytest.fixture(scope="module")
def process() -> Iterator[OracleProcess]:
    with OracleProcess(Question(TEXT, inputs=40)) as made:
        yield made


def test_a_right_kernel_is_not_seen_wrong(process: OracleProcess) -> None:
    seen = process.ask(RIGHT, 60.0)
    assert (seen.found, seen.inputs, seen.stock, seen.loose) == ("right", 40, True, True), seen
    assert seen.times is not None and 0 < seen.times <= 10


@pytest.mark.parametrize(
    ("old", "new", "found", "words"),
    [
        ("- tl.max(x, axis=0)", "", "right", ""),  # of these inputs none is large enough
        ("r < 24", "r < 23", "wrong", "output 0"),
        ("rows[(8,)]", "rows[(7,)]", "wrong", "output 0"),  # the last row holds what memory held
        ("e / tl.sum", "e.to(tl.bfloat16).to(tl.float32) / tl.sum", "wrong", "output 0"),
        ("return y", "return y, y", "wrong", "2 outputs instead of 1"),
        ("return y", "return y.double()", "wrong", "float64"),
        ("tl.exp(", "tl.no_such_function(", "refused", "no_such_function"),
        ("y = torch.empty_like(h)", "os.abort()", "crash", "status"),
    ],
)
def test_a_wrong_kernel_is(process: OracleProcess, old: str, new: str, found: str, words: str) -> None:
    assert old in RIGHT
    seen = process.ask(RIGHT.replace(old, new), 60.0)
    assert seen.found == found and words in seen.words, seen


def test_kernelbench_misses_what_is_seen_here(process: OracleProcess) -> None:
    seen = process.ask(RIGHT.replace("e / tl.sum", "(1 + 4e-5) * e / tl.sum"), 60.0)
    assert seen.found == "wrong" and seen.stock and seen.loose, seen


def test_it_shares_no_code_with_the_judge() -> None:
    names = {
        name
        for node in ast.walk(ast.parse(Path(oracle.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert {n for n in names if n.startswith("qimeng")} == {"qimeng.envs.estimate.interpreter"}


def test_inputs_differ_and_can_be_made_again() -> None:
    problem, again = Problem(Question(TEXT)), Problem(Question(TEXT))
    drawn = [problem.inputs(i)[0] for i in range(8)]
    assert all(torch.equal(x, again.inputs(i)[0]) for i, x in enumerate(drawn))
    assert len({float(x.sum()) for x in drawn}) == 8
    first, moved = (problem.model(torch.float32, m).state_dict() for m in (False, True))
    assert not any(torch.equal(first[key], moved[key]) for key in first)


def tensors(*values: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=dtype)]


@pytest.mark.parametrize(
    ("y", "e", "r", "found"),
    [
        ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), "right"),
        ((1.0, 2.0 + 1e-6), (1.0, 2.0), (1.0, 2.0), "right"),  # under 10 times half an ulp
        ((1.0, 2.0 + 1e-5), (1.0, 2.0), (1.0, 2.0), "wrong"),
        ((1.0, 2.0 + 1e-5), (1.0, 2.0 + 2e-6), (1.0, 2.0), "right"),  # eager is off as well
        ((1.0, math.nan), (1.0, 2.0), (1.0, 2.0), "wrong"),
        ((1.0, 7.0), (1.0, math.inf), (1.0, math.inf), "right"),  # not compared
    ],
)
def test_the_limit_is_ten_times_eagers_error(y, e, r, found):
    assert compare(tensors(*y), tensors(*e), tensors(*r, dtype=torch.float64)).found == found


def test_integers_are_eagers_or_the_exact_ones() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert compare([two], [one], [two]).found == "right"
    assert compare([two], [one], [one]).found == "wrong"
