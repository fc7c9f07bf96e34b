"""Write your own planner: a class with one method that chooses one of the legal actions.

python examples/own_planner.py
"""

import torch

from qimeng import Action, Observation, Planner, plan_and_code


class FuseThenLower(Planner):
    """Fuse while anything can be fused, lower what is left, stop."""

    def choose(self, observation: Observation) -> Action:
        for kind in ("fusion", "lowering"):
            for action in observation.actions:
                if action.kind == kind:
                    return action
        return Action("stop")


def gelu_residual(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x * y + 1.0) + x


def main(rows: int = 1024, width: int = 1024, seconds: float = 30.0) -> None:
    inputs = (torch.rand(rows, width), torch.rand(rows, width))
    result = plan_and_code(gelu_residual, inputs, planner=FuseThenLower(), search="greedy", seconds=seconds)
    for step in result.steps:
        print("accepted" if step.accepted else "refused ", step.action)
    print(result.report())


if __name__ == "__main__":
    main()
