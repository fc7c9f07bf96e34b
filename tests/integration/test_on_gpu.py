"""Whole models on a GPU, with the real judge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng.integration import Record, optimize

pytestmark = pytest.mark.gpu


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@torch.no_grad()
def test_layers_run_programs_and_torch_compile_takes_them() -> None:
    model = nn.Sequential(*(Layer(512) for _ in range(3))).cuda().bfloat16().eval()
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    fast = optimize(model, (x,), parts=["?"], seconds=60, planner="heuristic", compile_modes=(), cache=False)
    record = vars(fast)["qimeng"]
    assert isinstance(record, Record)
    assert [part.names for part in record.parts] == [("0", "1", "2")] and not record.parts[0].reason, record.report()
    assert record.speedup is not None and record.compared[0].same
    assert torch.allclose(fast(x), model(x), rtol=2e-2, atol=2e-2)
    layers = {str(i): {"program": 1} for i in range(3)}
    recorded = record.recorded  # then the layers run while it is recorded, and no more
    assert record.calls == ({"": {"program": 1}} | dict.fromkeys(layers, {}) if recorded else layers)
    compiled = torch.compile(fast, fullgraph=True)
    assert torch.allclose(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    assert all(record.calls[str(i)]["program"] == (1 if recorded else 2) for i in range(3))
