from pathlib import Path

from qimeng.bench.suite import Problem, SpecFile
from qimeng.bench.survey import (
    MODE_CONTEXT,
    MODE_COPIES,
    Facts,
    fitting,
    survey,
)

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
    return Problem("mine", str(number), "", SpecFile(path))


def test_memory_is_planned_from_the_graph_alone(tmp_path: Path) -> None:
    large = problem(tmp_path, 1)
    held = 4 * ((1 << 29) + (1 << 30)) + (4 << 29)
    assert 4 * held < survey(large).memory_bytes < 16 * held
    assert survey(large, "bfloat16").memory_bytes < survey(large).memory_bytes
    temporary = TEXT.replace("self.layer(x)", "self.layer(x).exp().sin()")
    more = survey(problem(tmp_path, 2, temporary)).memory_bytes - survey(large).memory_bytes
    assert more >= 4 << 29  # eager holds one more result of the product's size
    assert survey(large, device_bytes=1 << 34).memory_bytes < survey(large).memory_bytes  # planned for less
    modes = survey(large, modes=2).memory_bytes - survey(large).memory_bytes
    assert modes == 2 * (MODE_COPIES * held + MODE_CONTEXT)
    assert survey(problem(tmp_path, 4, "nothing here\n")) == Facts()


def test_large_problems_run_alone(tmp_path: Path) -> None:
    large, medium, other, small, unknown = (problem(tmp_path, n) for n in range(1, 6))
    sizes = {large: 50, medium: 18, other: 18, small: 1}
    known = {p: Facts(memory_bytes=gib << 30) for p, gib in sizes.items()}
    may_start = fitting(80 << 30, known)
    assert may_start(large, []) and not may_start(small, [large]) and not may_start(large, [unknown])
    assert may_start(medium, [other, medium, small]) and may_start(unknown, [medium])
    assert not may_start(medium, [other, medium, other, medium])  # more than may be planned
    assert fitting(40 << 30, known)(large, [])


def test_the_family_is_known_without_memory(tmp_path: Path) -> None:
    text = TEXT.replace("self.layer(x)", "torch.relu(x)").replace("1 << 14, 1 << 15", "1 << 20, 1 << 15")
    found = survey(problem(tmp_path, 1, text)).found
    assert found is not None and found.family == "pointwise"
