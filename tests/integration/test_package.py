"""Programs of a model as a package that needs torch only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qimeng.errors import QimengError
from qimeng.integration import Record, optimize
from tests.integration.small_models import Block, Stack, fakes

X = torch.randn(4, 8)

USER = """
import sys
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=float("inf")):
        return torch.relu(self.linear(x)).clamp(max=scale)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, float("inf"))
        return x
"""

OTHER = """
import fast_net
torch.manual_seed(3)
model, x = fast_net.apply(Net().eval()), torch.randn(4, 8)
with torch.no_grad():
    found = model(x)
    assert [m.forward.calls["program"] for m in model.layers] == [1, 1]
    assert torch.allclose(found, Layer.forward(model.layers[1], Layer.forward(model.layers[0], x)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), found)
assert not any(name.split(".")[0] == "qimeng" for name in sys.modules)
try:
    fast_net.apply(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8)])}))
except (ValueError, AttributeError) as error:
    print("refused:", error)
"""


def test_a_package_runs_without_qimeng(tmp_path: Path) -> None:
    space: dict[str, type[torch.nn.Module]] = {}
    exec(USER, space)
    fast = optimize(space["Net"]().eval(), (X,), parts=["layers.*"], seconds=40, **fakes())
    record = vars(fast)["qimeng"]
    assert isinstance(record, Record)
    assert record.save(tmp_path / "fast_net") == tmp_path / "fast_net"
    (tmp_path / "use.py").write_text(USER + OTHER)
    done = subprocess.run(
        [sys.executable, "-P", "use.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:")
    assert "import fast_net" in (tmp_path / "fast_net" / "__init__.py").read_text()


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with pytest.raises(QimengError, match="no programs to save"):
        Record(Stack(), "h100").save(tmp_path / "package")
    fast = optimize(Block().eval(), (X,), seconds=40, **fakes())
    with pytest.raises(QimengError, match="'my_package'"):
        vars(fast)["qimeng"].save(tmp_path / "my-package")
