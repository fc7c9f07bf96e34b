"""The user's own values are tried in every search and in every final verification, however the spec was made."""

from __future__ import annotations

import textwrap

import pytest
import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.interfaces import Asked
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import EXAMPLES, KernelSpec

FILE = textwrap.dedent(
    """
    import torch

    RARE = torch.randn(16, 16).where(torch.arange(256).view(16, 16) != 77, 1234.5)

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x)

    def get_inputs():
        x = torch.randn(16, 16)
        return [torch.where(x[0, 0] == FIRST, RARE, x)]

    def get_init_inputs():
        return []
    """
)


def rare() -> torch.Tensor:
    x = torch.randn(16, 16)
    x[4, 13] = 1234.5
    return x


def from_file() -> KernelSpec:
    """A file that returns a rare value under its own seed alone."""
    first = KernelSpec.from_source(FILE.replace("FIRST", "1e9")).inputs(42)[0][0, 0]
    return KernelSpec.from_source(FILE.replace("FIRST", repr(float(first))))


@pytest.mark.parametrize("way", ["file", "function"])
def test_a_program_that_is_wrong_on_the_users_own_values_alone_is_refused(way: str) -> None:
    made = {
        "file": from_file,
        "function": lambda: KernelSpec.from_function(torch.relu, (rare(),)),
    }
    spec = made[way]()
    assert spec.inputs(5, "cpu", EXAMPLES)[0][4, 13] == 1234.5 and not (spec.inputs(5)[0] == 1234.5).any()
    evaluator = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu", sandbox="basic", timeout_s=20.0)
    try:
        assert evaluator.graph is not None
        program = Program.start(evaluator.graph)
        text = "import torch\ndef entry(x):\n    return (torch.where(x == 1234.5, 0.0, x.clamp(min=0)),)\n"
        wrong = program.with_implementation(program.regions[0].id, Implementation("torch", text, "entry"))
        for found in (evaluator.evaluate(wrong), evaluator.evaluate(wrong, asked=Asked.FINAL)):
            assert found.failure == "wrong" and "on inputs 'examples'" in (found.error or ""), found
    finally:
        evaluator.close()
