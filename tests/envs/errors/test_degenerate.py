import pytest
import torch

from qimeng.envs.judge.reference import References
from qimeng.spec import KernelSpec

TEXT = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return BODY
def get_inputs():
    return [torch.rand(16, 32)]
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x * 1e-6", "zeros pass"),
        ("x * 1e-6 + 3", "a constant passes"),
        ("torch.arange(4.0) + 0 * x.sum()", "the output does not depend on the inputs"),
        ("x.mean(-1, keepdim=True) + 1e-7 * x", "the mean of each row passes"),
        ("torch.argmax(x, 1)", ""),
        ("x + 1", ""),
    ],
)
def test_degenerate_problems_are_flagged(body: str, reason: str) -> None:
    spec = KernelSpec.from_source(TEXT.replace("BODY", body))
    assert References(spec, None, torch.device("cpu")).degenerate == reason
