"""Optimize a module of your own, use the result in its place, and save it.

python examples/optimize_module.py
"""

import torch
from torch import nn

from qimeng import plan_and_code


class GatedNorm(nn.Module):
    """Gate the input, then normalize its rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * torch.sigmoid(self.gate))


def main(rows: int = 2048, width: int = 1024, seconds: float = 30.0, folder: str = "runs/gated_norm") -> None:
    module = GatedNorm(width)
    result = plan_and_code(module, (torch.rand(rows, width),), seconds=seconds)
    print(result.report())
    result.save(folder)

    # The result has the same parameters and names as the original, so you can load other weights later.
    faster = result.module
    faster.load_state_dict(module.state_dict())
    print(f"{type(faster).__name__} with {sum(p.numel() for p in faster.parameters())} parameters, saved in {folder}")


if __name__ == "__main__":
    main()
