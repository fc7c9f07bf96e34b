"""A saved result where there is only torch and triton: same numbers, and ValueError for what it was not made for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng import plan_and_code
from qimeng.testing import FakeEvaluator

SCRIPT = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("qimeng", "networkx", "transformers", "stable_baselines3", "cloudpickle", "rich"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Forbidden())
import torch
import program

state, x, n, expected = torch.load("given.pt")
model = program.Model()
print("loaded", model.load_state_dict(state))
with torch.no_grad():
    torch.testing.assert_close(model(x, n, 0.5), expected, rtol=1e-5, atol=1e-5)
    x.mul_(2)
    state["map.weight"].mul_(0.5)
    model.load_state_dict(state)  # what was prepared from the old weights is prepared again
    torch.testing.assert_close(model(x, n, 0.5), expected, rtol=1e-5, atol=1e-5)
    x.mul_(0.5)
for wrong in (
    (x[:3], n, 0.5), (x.double(), n, 0.5), (x.t().contiguous().t(), n, 0.5), (x.to("meta"), n, 0.5), (x, n.int(), 0.5),
    (x, n), (x.numpy(), n, 0.5), (x, n, "half"),
):
    try:
        model(*wrong)
    except ValueError as error:
        print("refused", str(error)[:100])
    else:
        raise SystemExit(f"took {[type(w) for w in wrong]}")
"""


class Gated(nn.Module):
    """Parameters in a list, a buffer outside the state_dict, a number among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.scales = nn.Linear(24, 40, bias=False), nn.ParameterList([nn.Parameter(torch.rand(40))])
        self.register_buffer("ramp", torch.arange(40.0), persistent=False)

    def forward(self, x: Tensor, n: Tensor, t: float) -> Tensor:
        return functional.softmax(torch.relu(self.map(x)) * self.scales[0] * t + self.ramp, -1) + n[:, None]


def test_a_saved_result_stands_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x, n = Gated(), torch.randn(16, 24), torch.randint(0, 9, (16,))
    # A program that uses what Triton's interpreter lacks, such as bfloat16, says so instead.
    evaluator = FakeEvaluator(wrong=lambda program: "bfloat16" if "_check_interpreter" in program.source else None)
    result = plan_and_code(module, (x, n, 0.5), evaluator=evaluator, evaluations=12, planner="heuristic")
    assert "tl.dot" in result.source
    folder = result.save(tmp_path / "saved")
    torch.save((module.state_dict(), x, n, module(x, n, 0.5).detach()), folder / "given.pt")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loaded <All keys matched" in done.stdout and done.stdout.count("refused") == 8
