"""Calling a result where there is no GPU and Triton interprets; this file is also the script that does so."""

from __future__ import annotations

import torch
from torch import nn

from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.steps.loop import optimize
from qimeng.graph.capture import capture
from qimeng.planner.greedy import GreedySearch
from qimeng.testing import ScriptedPlanner, fake_task
from tests.interpreted import ended


def main() -> None:
    """A product of bf16, which Triton's own interpreter computes wrongly."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32).bfloat16(), torch.randn(16, 64).bfloat16()
    task = fake_task(capture(lambda: layer, lambda: (x,)), coder=TemplateCoder())
    result = optimize(task, GreedySearch(ScriptedPlanner(["lowering"])))
    assert result.program is not None and "tl.dot" in result.source
    result.module.load_state_dict(layer.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(result.module(x), layer(x))


def test_a_result_is_interpreted_as_the_judge_does() -> None:
    done = ended("-m", "tests.envs.steps.test_interpreted_result")
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    main()
