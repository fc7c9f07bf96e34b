"""The analytic model: what must hold whatever its constants are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from qimeng.backend.facts import KernelFacts
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.device import DEVICES
from qimeng.envs.cost.kernel_time import program_ms, region_ms, resident_blocks, tile_share
from qimeng.envs.cost.roofline import LAUNCH_MS, eager_ms, floor_ms, product_flops
from qimeng.graph.capture import capture
from qimeng.graph.loops.loop import is_loop
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.rewrites import find_rewrites
from qimeng.interfaces import Action, Request
from qimeng.program.program import Implementation, Program
from qimeng.spec.origin import FunctionModule

H200, A100 = DEVICES["h200"], DEVICES["a100"]


def graph(function: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> OpGraph:
    return capture(lambda: FunctionModule(function), lambda: tuple(torch.empty(tuple(s), dtype=dtype) for s in shapes))


def matmul(n: int, dtype: torch.dtype = torch.float32) -> OpGraph:
    return graph(torch.matmul, (n, n), (n, n), dtype=dtype)


def test_larger_takes_longer_and_the_floor_is_below() -> None:
    for make in (lambda n: graph(torch.relu, (n, 4096)), matmul, lambda n: graph(lambda x: x.softmax(-1), (n, 4096))):
        graphs = [make(n) for n in (1024, 2048, 4096)]
        times = [eager_ms(g, H200) for g in graphs]
        assert times == sorted(times) and times[2] > 1.8 * times[1]
        assert all(0 < floor_ms(g, H200) <= t for g, t in zip(graphs, times, strict=True))
        assert all(eager_ms(g, A100) > t for g, t in zip(graphs, times, strict=True))


def test_precision_modes_and_dtypes_order_products() -> None:
    g = matmul(4096)
    assert eager_ms(g, H200, "high") < eager_ms(g, H200, "default") == eager_ms(g, H200, "highest")
    assert floor_ms(g, H200, "high") < floor_ms(g, H200, "default")
    assert eager_ms(matmul(4096, torch.bfloat16), H200) < eager_ms(g, H200, "high")
    assert eager_ms(g, H200) == pytest.approx(2.68, rel=0.1), "cuBLAS on the H200"


def test_operators_cost_their_bytes_and_views_nothing() -> None:
    one = eager_ms(graph(torch.relu, (4096, 4096)), H200)
    assert eager_ms(graph(lambda x: x.relu().view(-1, 2).t(), (4096, 4096)), H200) == pytest.approx(one, rel=0.01)
    assert eager_ms(graph(lambda x: x.relu().exp().sin(), (4096, 4096)), H200) == pytest.approx(3 * one, rel=0.1)
    assert eager_ms(graph(torch.relu, (8,)), H200) == pytest.approx(LAUNCH_MS, rel=0.01)
    assert eager_ms(graph(torch.add, (4096, 4096), (4096,)), H200) == pytest.approx(one, rel=0.01)


def test_scans_take_what_pytorch_takes() -> None:
    wide = graph(lambda x: x.cumsum(1), (32768, 32768))
    assert eager_ms(wide, H200) == pytest.approx(4.48, rel=0.05), "measured on an H200"
    assert floor_ms(wide, H200) < 2.0


def test_few_rows_leave_the_device_idle() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[1:])

    assert eager_ms(graph(norm, (16, 1 << 20)), H200) > 5 * eager_ms(graph(norm, (1 << 12, 1 << 12)), H200)


def test_flops_of_products() -> None:
    def of(g: OpGraph) -> int:
        return sum(product_flops(g, node) for node in g.ops())

    assert of(matmul(64)) == 2 * 64**3
    assert of(graph(torch.nn.functional.conv2d, (2, 8, 16, 16), (4, 8, 3, 3))) == 2 * (2 * 4 * 14 * 14) * 8 * 9
    transposed = graph(torch.nn.functional.conv_transpose2d, (2, 8, 16, 16), (8, 4, 3, 3))
    assert of(transposed) == 2 * (2 * 8 * 16 * 16) * 4 * 9
    attention = graph(torch.nn.functional.scaled_dot_product_attention, *[(2, 4, 32, 16)] * 3)
    assert of(attention) == 4 * (2 * 4 * 32 * 16) * 32


def kernel(**changes: Any) -> KernelFacts:
    """A pointwise kernel over 64 MiB in and 64 MiB out."""
    base = KernelFacts("k", False, (16384, 1, 1), 1, 4, 128, 3, 0, 32, 0, 2 << 26, (), False, 60)
    return replace(base, **changes)


def fused() -> tuple[Program, Implementation]:
    program = Program.start(graph(torch.relu, (4096, 4096)))
    return program, Implementation("triton", "", "f", schedule=TileSchedule(block_r=1024))


def test_a_fused_kernel_beats_its_operators() -> None:
    program = Program.start(graph(lambda x: (x.relu() * 2).exp(), (4096, 4096)))
    apart = sum(program_ms(program, {}, H200).values())
    assert apart == pytest.approx(eager_ms(program.graph, H200))
    assert region_ms(program.regions[0], fused()[1], [kernel()], H200) < 0.5 * apart


def test_what_makes_a_kernel_slower() -> None:
    program, implementation = fused()

    def ms(*kernels: KernelFacts, device: Any = H200, of: Program = program, **schedule: Any) -> float:
        made = replace(implementation, schedule=TileSchedule(block_r=1024).but(**schedule))
        return region_ms(of.regions[0], made, kernels, device)

    base = ms(kernel())
    assert base == pytest.approx(eager_ms(program.graph, H200), rel=0.2)
    assert ms(kernel(), device=replace(H200, bandwidth_gbs=2400)) == pytest.approx(2 * base, rel=0.05)
    assert ms(kernel(spills=512)) > base
    assert ms(kernel(instructions=20000)) > 2 * base, "arithmetic counts"
    assert ms(kernel(grid=(16, 1, 1))) > 3 * base, "16 blocks do not fill 132 SMs"
    assert ms(kernel(shared_bytes=200_000)) > base, "one block an SM asks for too little at a time"
    assert ms(kernel(launches=2)) == pytest.approx(2 * base)
    assert ms(kernel(prepares=True)) == 0.0, "preparation is no part of a call"
    rows, long_rows = (
        Program.start(graph(lambda x: torch.softmax(x, 1), shape)) for shape in ((4096, 4096), (4, 1 << 22))
    )
    assert ms(kernel(), of=rows, form="loop") > ms(kernel(), of=rows, form="resident")
    apart, together = (ms(kernel(), of=long_rows, form=f, block_p=4) for f in ("loop", "wave"))
    assert apart > together, "the wave reads from L2"


def test_what_makes_a_product_slower() -> None:
    program = Program.start(matmul(4096))

    def ms(dots: tuple[str, ...], warpgroup: bool = True, **schedule: Any) -> float:
        chosen = GemmSchedule(block_m=128, block_n=256).but(**schedule)
        launch = KernelFacts("k", False, (512, 1, 1), 1, 8, 256, 4, 196608, 168, 0, 3 << 26, dots, warpgroup, 900)
        return region_ms(program.regions[0], Implementation("triton", "", "f", schedule=chosen), [launch], H200)

    half = ms(("bf16",))
    assert half == pytest.approx(0.19, rel=0.15), "measured on the H200: 0.189 to 0.198 ms"
    assert ms((), block_n=128) == pytest.approx(3.02, rel=0.2), "plain fp32: 3.02 ms"
    assert ms(("bf16",), precision="bf16x3") == pytest.approx(0.55, rel=0.15), "three products: 0.52 to 0.57 ms"
    assert ms(("bf16",), precision="bf16x6") > 1.8 * ms(("bf16",), precision="bf16x3")
    assert ms(("tf32",), False) > 3 * ms(("tf32",)) > half
    assert ms(("bf16",), block_m=64, block_n=64) > half
    assert all(0.5 * half < ms((dots,)) < 0.75 * half for dots in ("e4m3", "s8")), "half the arithmetic, the same bytes"
    unknown = Implementation("triton", "", "f")
    waves = [region_ms(program.regions[0], unknown, [launch], H200) for launch in _grids(132, 133)]
    assert waves[1] > 1.5 * waves[0], "one tile more than SMs is another wave"


def _grids(*blocks: int) -> list[KernelFacts]:
    return [KernelFacts("k", False, (b, 1, 1), 1, 8, 256, 4, 0, 168, 0, 1 << 20, ("bf16",), True, 9) for b in blocks]


def test_tiles_and_occupancy() -> None:
    shares = [tile_share(n, n) for n in (16, 32, 64, 128, 256)]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] <= 0.8
    assert resident_blocks(kernel(registers=32), H200) == 16
    assert resident_blocks(kernel(registers=255), H200) == 2
    assert resident_blocks(kernel(shared_bytes=100_000), H200) == 2
    assert resident_blocks(kernel(shared_bytes=10**6), H200) == 1


def test_steps_come_one_after_the_other() -> None:
    def layer(steps: int) -> OpGraph:
        return capture(lambda: torch.nn.GRU(8, 16, 2, bidirectional=True), lambda: (torch.empty(steps, 3, 8),))

    found = [eager_ms(layer(steps), H200) for steps in (100, 200)]
    assert found[0] > 100 * 4 * 0.01 and found[1] > 1.9 * found[0]
    rewritten = Program.start(layer(200)).with_rewrites(find_rewrites(layer(200), "layers")[0])
    loops = [r for r in rewritten.regions if any(is_loop(n) for n in r.ops)]
    on_torch = program_ms(rewritten, {}, H200)
    assert all(on_torch[r.id] > 200 * 10 * LAUNCH_MS for r in loops)
    lowered = TemplateCoder().write(Request(rewritten, Action("lowering", (loops[0].id,)), H200)).alternatives[0]
    assert 0.05 < region_ms(loops[0], lowered, (), H200) < on_torch[loops[0].id] / 10
