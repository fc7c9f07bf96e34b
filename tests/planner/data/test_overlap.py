"""Signatures tell computations apart by what they compute; overlaps with a folder of problems are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qimeng.errors import QimengError
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.overlap import Signatures, overlaps, problem_signatures, reserved, signatures_of
from qimeng.planner.data.signature import signature, structure
from qimeng.spec import KernelSpec

BENCHMARK = Path(__file__).resolve().parents[3] / ".kb" / "KernelBench"


Function = Callable[..., object]


def of(function: Function, *shapes: tuple[int, ...]) -> Signatures:
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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x, w, b: x.tanh(), lambda x, w, b: torch.cat([x * 1.0 + 0]).tanh()),
        (lambda x, w, b: x.exp(), lambda x, w, b: torch.cat(x.chunk(2, 1), 1).exp()),
        (lambda x, w, b: x / 2 - 1, lambda x, w, b: x * 0.5 + 3),
        (lambda x, w, b: x.relu(), lambda x, w, b: x.clamp(min=0)),
        (lambda x, w, b: torch.nn.functional.silu(x), lambda x, w, b: torch.sigmoid(x) * x),
        (lambda x, w, b: torch.nn.functional.linear(x, w, b), lambda x, w, b: b + x @ w.t()),
        (lambda x, w, b: torch.addmm(b, x, w.t()), lambda x, w, b: x @ w.t() + b),
        (lambda x, w, b: (x.exp() + x.sin()) * (x - b[0]), lambda x, w, b: (x - b[0]) * (x.sin() + x.exp())),
    ],
)
def test_what_is_written_in_another_way_has_the_same_structure(one: Function, other: Function) -> None:
    shapes = ((4, 8), (3, 8), (3,))
    assert of(one, *shapes).structure == of(other, *shapes).structure


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x.clamp(min=0), lambda x: x.clamp(min=1)),
        (lambda x: x.clamp(min=0), lambda x: x.clamp(0, 6)),
        (lambda x: torch.sigmoid(x) * x, lambda x: torch.sigmoid(x) * x.exp()),
        (lambda x: 1 - x, lambda x: x - 1),
    ],
)
def test_what_differs_has_another_structure(one: Function, other: Function) -> None:
    assert of(one, (4, 8)).structure != of(other, (4, 8)).structure


def test_deep_networks_have_signatures() -> None:
    nodes = {"0": Node("0", "input", "0", metas=(meta := Meta((4,), (1,), "float32"),))}
    for i in range(1, 2000):
        nodes[str(i)] = Node(str(i), "op", "aten.tanh.default", (Value(str(i - 1)),), metas=(meta,))
    graph, less = OpGraph(nodes, (Value("1999"),)), OpGraph(nodes, (Value("1998"),))
    assert structure(graph) != structure(less) and signature(graph) != signature(less)


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
    pytest.importorskip("einops", reason="two problems of level 3 need it")
    levels = [problem_signatures(BENCHMARK / f"level{level}") for level in (1, 2, 3)]
    assert not any(failed for _, failed in levels)
    assert {s.structure for found, _ in levels for s in found.values()} == reserved()
