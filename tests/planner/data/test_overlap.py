"""Signatures tell computations apart by what they compute; overlaps with a folder of problems are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qimeng.errors import QimengError
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.overlap import Signatures, overlaps, problem_signatures, reserved, signatures_of
from qimeng.spec import KernelSpec

BENCHMARK = Path(__file__).resolve().parents[3] / ".kb" / "KernelBench"


def of(function: Callable[..., object], *shapes: tuple[int, ...]) -> Signatures:
    return signatures_of(KernelSpec.from_function(function, tuple(torch.randn(s) for s in shapes)))


def test_names_numbers_and_the_order_of_a_sum_do_not_matter() -> None:
    one = of(lambda x, y: torch.relu(x) * 2 + y, (4, 8), (4, 8))
    other = of(lambda a, b: b + torch.relu(a) * 3, (4, 8), (4, 8))
    assert one.structure == other.structure
    assert one.whole != other.whole  # another number


def test_shapes_matter_to_the_whole_alone() -> None:
    one = of(lambda x: torch.softmax(x.tanh(), dim=-1), (4, 8))
    other = of(lambda x: torch.softmax(x.tanh(), dim=-1), (4, 16))
    assert one.structure == other.structure and one.whole != other.whole
    assert one == of(lambda z: torch.softmax(torch.tanh(z), dim=-1), (4, 8))


def test_views_do_not_make_another_structure() -> None:
    one = of(lambda x, y: torch.relu(x @ y), (4, 8), (8, 4))
    other = of(lambda x, y: torch.relu(x @ y.t()), (4, 8), (4, 8))
    assert one.structure == other.structure and one.whole != other.whole


def test_wiring_matters() -> None:
    square = of(lambda x, y: x * x, (4, 8), (4, 8))
    product = of(lambda x, y: x * y, (4, 8), (4, 8))
    assert square.structure != product.structure
    assert of(lambda x, y: x - y.exp(), (4,), (4,)).structure != of(lambda x, y: x.exp() - y, (4,), (4,)).structure


def test_overlaps_with_a_folder_are_found(tmp_path: Path) -> None:
    drawn = {str(i): draw(0, i, Bytes(1 << 12, 1 << 14)).spec for i in range(3)}
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_same.py").write_text(draw(0, 1, Bytes(1 << 12, 1 << 14)).spec.source)
    (tmp_path / "level1" / "2_larger.py").write_text(draw(0, 2, Bytes(1 << 17, 1 << 18)).spec.source)
    found = overlaps({n: signatures_of(s.with_(dtype="float32")) for n, s in drawn.items()}, tmp_path)
    assert found.same == (("1", "level1/1_same.py"),)
    assert set(found.alike) == {("1", "level1/1_same.py"), ("2", "level1/2_larger.py")}
    assert found.problems == 2 and not found.not_captured
    with pytest.raises(QimengError, match="no problem files"):
        problem_signatures(tmp_path / "elsewhere")


def test_reserved_structures_are_hashes() -> None:
    assert len(reserved()) > 100 and all(len(h) == 16 and int(h, 16) >= 0 for h in reserved())
    relu = of(torch.relu, (4, 8))
    assert relu.structure in reserved()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of problems, which warn when they are made
@pytest.mark.skipif(not BENCHMARK.is_dir(), reason="needs KernelBench in .kb/KernelBench")
def test_every_structure_of_the_benchmark_is_reserved() -> None:
    found, failed = problem_signatures(BENCHMARK)
    assert not failed
    assert {s.structure for s in found.values()} == reserved()
