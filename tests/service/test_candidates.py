"""Candidates as programs: the order of arguments and results, `prepare`, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.coder.llm.chat import ChatError
from qimeng.graph.opgraph import OpGraph
from qimeng.program.verify import capture_spec
from qimeng.service.candidates import NoProgram, arguments_of, program_of
from qimeng.service.messages import Candidate, Form
from qimeng.spec import KernelSpec

REFERENCE = """import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.first = torch.nn.Parameter(torch.rand(3))
        self.second = torch.nn.Parameter(torch.rand(3))
        self.unused = torch.nn.Parameter(torch.rand(3))

    def forward(self, x, y):
        self.seen += 1
        return y * self.second + x * self.first, x - self.seen

def get_inputs():
    return [torch.rand(2, 3), torch.rand(2, 3)]

def get_init_inputs():
    return []
"""
ENTRY = """
def pack(w):
    return w

def prepare(second, first):
    return (pack(second * 2), first * 2)

def entry(x, y, first, second, seen, twice, again):
    return ((y * twice + x * again) / 2, x - seen - 1, seen + 1)
"""
PLAIN = """
import torch.nn as nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return x, y
"""


@pytest.fixture(scope="module")
def spec() -> KernelSpec:
    return KernelSpec.from_source(REFERENCE)


@pytest.fixture(scope="module")
def graph(spec: KernelSpec) -> OpGraph:
    return capture_spec(spec, verify=False)


def test_an_entry_has_a_stable_order_of_arguments_and_results(spec: KernelSpec, graph: OpGraph) -> None:
    program = program_of(Candidate(ENTRY), graph, spec)
    (region,) = program.regions
    said = [graph.nodes[value.node].target for value in arguments_of(graph, region)]
    assert said == ["0", "1", "first", "second", "seen"]
    space: dict[str, Any] = {}
    exec(program.source, space)
    made, expected = space["Model"](), spec.module("cpu")
    made.load_state_dict(expected.state_dict())
    x, y = spec.origin.inputs(1, "cpu")
    for _ in range(2):
        torch.testing.assert_close(made(x, y), expected(x, y))
    torch.testing.assert_close(made.seen, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", "neither a function `entry` nor a class `ModelNew`"),
        ("def entry(x, y):\n    return x\n", "this reference has 5: input 0, input 1, first, second, seen"),
        ("def entry(a, b, c, d, e, f):\n    return a\n", "there is no `prepare`"),
        ("def entry(*all):\n    return all\n", "takes 0 arguments"),
        (PLAIN, "updates no buffer"),
        ("x = '\0'\n", "zero byte"),
    ],
)
def test_what_is_no_program_says_what_to_change(spec: KernelSpec, graph: OpGraph, text: str, says: str) -> None:
    with pytest.raises(NoProgram, match=says):
        program_of(Candidate(text), graph, spec)


def test_an_import_of_anything_else_is_refused(spec: KernelSpec, graph: OpGraph) -> None:
    text = "import os\n" + ENTRY.replace("return w", "return os.getpid()")
    with pytest.raises(ChatError, match="import os"):
        program_of(Candidate(text, Form.PROGRAM), graph, spec)
