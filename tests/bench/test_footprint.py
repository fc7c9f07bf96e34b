from pathlib import Path

from qimeng.bench.footprint import CONTEXTS, COPIES, fitting, footprint
from qimeng.bench.suite import Problem

TEXT = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1 << 15, 1 << 15, bias=False)
    def forward(self, x):
        return self.layer(x)
def get_inputs():
    return [torch.rand(1 << 14, 1 << 15)]
def get_init_inputs():
    return []
"""


def problem(folder: Path, number: int, text: str = TEXT) -> Problem:
    path = folder / f"{number}_Problem.py"
    path.write_text(text)
    return Problem(1, number, "Problem", path)


def test_large_problems_do_not_run_beside_each_other(tmp_path: Path) -> None:
    large, twin = problem(tmp_path, 1), problem(tmp_path, 2)
    small = problem(tmp_path, 3, TEXT.replace("15", "5").replace("14", "5"))
    unknown = problem(tmp_path, 4, "nothing here\n")
    held = 4 * ((1 << 29) + (1 << 30) + (1 << 29))
    assert footprint(large, "float32") == COPIES * held + CONTEXTS
    assert footprint(large, "bfloat16") == COPIES * held // 2 + CONTEXTS
    assert footprint(unknown, "float32") == 0
    may_start = fitting(80 << 30, "float32")
    assert may_start(large, []) and may_start(small, [large]) and may_start(unknown, [large])
    assert not may_start(twin, [large])
