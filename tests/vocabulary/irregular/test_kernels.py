"""What is printed for reductions by segment, and what the compiler makes of it for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qimeng import KernelSpec
from qimeng.device import DEVICES
from qimeng.envs.cost.kernel_time import cost_of
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.graph.region import Region
from qimeng.program.implementation import Implementation
from qimeng.program.program import Program
from qimeng.vocabulary.irregular.schedules import SegmentSchedule
from tests.vocabulary.irregular.samples import CONTEXT, Bags, Layer, action_of, after, graph, reducing, start_of


def aggregated(reduce: str, dtype: torch.dtype, *, buffer: bool, width: int = 64) -> Program:
    pairs = graph(100, 900)
    module = Layer(reduce, pairs if buffer else None).to(dtype)
    inputs = torch.randn(100, width).to(dtype), torch.rand(900).to(dtype), *(() if buffer else (pairs,))
    start = start_of(KernelSpec.from_module(module, inputs))
    return after(start, action_of(start, "aggregate"))


def printed(region: Region, **changes: object) -> Implementation:
    """The implementation under the default schedule with some fields changed."""
    family, plan = covering(region)
    schedule: SegmentSchedule = family.default(plan, CONTEXT.device, "default")
    return CONTEXT.coder.print(region, schedule.but(**changes))


@pytest.mark.parametrize(
    ("name", "reduce", "buffer", "form"),
    [
        ("sorted", "index_add", True, "sorted"),
        ("bucket", "amax apart", False, "bucket"),
        ("atomic", "mean joined", False, "atomic"),
    ],
)
def test_the_printed_kernel(
    name: str, reduce: str, buffer: bool, form: str, golden: Callable[[str, str], None]
) -> None:
    region = reducing(aggregated(reduce, torch.bfloat16, buffer=buffer))
    golden(f"{name}.py.txt", printed(region, form=form).source)


def bags(dtype: torch.dtype, *, even: bool = False) -> Region:
    numbers = torch.randint(0, 40, (30, 30))
    inputs = (numbers,) if even else (numbers.view(-1), torch.arange(0, 900, 30) // 2)
    start = start_of(KernelSpec.from_module(Bags("mean", width=64).to(dtype), inputs))
    return reducing(after(start, action_of(start, "aggregate")) if even else start)


def test_the_printed_kernels_of_long_segments(golden: Callable[[str, str], None]) -> None:
    region = reducing(aggregated("index_add", torch.float32, buffer=True))
    golden("pieces.py.txt", printed(region, longest=256).source)


def test_the_printed_kernel_of_bags(golden: Callable[[str, str], None]) -> None:
    golden("bags.py.txt", printed(bags(torch.bfloat16)).source)
    golden("even_bags.py.txt", printed(bags(torch.float32, even=True)).source)


def test_the_estimate_counts_a_row_for_each_that_is_gathered() -> None:
    region = reducing(aggregated("index_add", torch.float32, buffer=False))
    cost = cost_of(region, printed(region))
    assert (cost.again_reads, cost.again_bytes) == (900 // 100 - 1, 100 * 64 * 4)


@pytest.mark.parametrize("even", [False, True])
def test_bags_compile_without_spills(even: bool, tmp_path: Path) -> None:
    region = bags(torch.bfloat16, even=even)
    made = printed(region, block_s=2, block_e=16, warps=4)
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job_of(region, made)])
    assert found.error is None and [k.spills for k in found.kernels] == [0]


@pytest.mark.parametrize(
    ("reduce", "dtype", "changes"),
    [
        ("index_add", torch.float32, {}),
        ("index_add", torch.float32, {"form": "atomic"}),
        ("mean joined", torch.bfloat16, {"form": "atomic", "block_s": 1, "block_e": 32}),
        ("amax apart", torch.bfloat16, {"block_s": 4, "block_e": 8, "warps": 4}),
        ("amax apart", torch.float16, {"block_s": 1, "block_e": 16, "warps": 1}),
        ("mean apart", torch.float32, {"form": "sorted", "block_s": 16, "block_e": 1}),
        ("mean apart", torch.float32, {"longest": 128}),
        ("amax apart", torch.bfloat16, {"longest": 128, "block_s": 2, "block_e": 16, "warps": 4}),
    ],
)
def test_it_compiles_without_spills(
    reduce: str, dtype: torch.dtype, changes: dict[str, object], tmp_path: Path
) -> None:
    region = reducing(aggregated(reduce, dtype, buffer=False, width=96))
    made = printed(region, **changes)
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    (found,) = compilers.compile([job_of(region, made)])
    assert found.error is None
    assert made.schedule is not None
    family, plan = covering(region)
    said = family.needs(plan, made.schedule).shared_bytes
    assert all(kernel.spills == 0 for kernel in found.kernels)
    assert max(kernel.shared_bytes for kernel in found.kernels) <= max(said, 4 * 32 * 128)
