"""Which schedules a product starts from and tries, and what its text says of packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional

from tests.coder.product_cases import Call, mm, planned, shapes


def plan_of(function: Callable[..., Any], *sizes: tuple[int, ...], **parameters: tuple[int, ...]) -> Any:
    return planned(lambda: Call(function, **parameters), shapes(*sizes))[-1]


def test_the_start_is_plain_and_every_configuration_fits() -> None:
    from qimeng.coder.template.families.gemm.sweeps import default_schedule, schedule_for_precision, shared_bytes
    from qimeng.device import DEVICES

    plan = plan_of(lambda s, x: functional.linear(x, s.w), (1000, 4096), w=(3000, 4096))
    for device in DEVICES.values():
        start = default_schedule(plan, device, "default")
        assert start.precision == "ieee" and not start.packed
        assert default_schedule(plan, device, "high").precision == "tf32"
        for precision in ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6", "fp16x3", "fp16"):
            found = schedule_for_precision(plan, start, precision, device)
            assert 1 <= len(found) <= 8 and len(set(found)) == len(found)
            assert all(shared_bytes(plan, s) <= device.shared_per_block for s in found)
            assert all(s.precision == precision for s in found)


def test_deep_products_are_split_and_promoted() -> None:
    from qimeng.coder.template.families.gemm.sweeps import default_schedule, schedule_for_precision
    from qimeng.device import device_named

    device = device_named("h200")
    plan = plan_of(mm, (256, 500000), (500000, 256))
    start = default_schedule(plan, device, "default")
    assert start.splits > 1
    assert all(s.splits > 1 and s.promote > 0 for s in schedule_for_precision(plan, start, "fp16x3", device))
    shallow = plan_of(mm, (4096, 64), (64, 4096))
    assert all(s.promote == 0 and s.splits == 1 for s in schedule_for_precision(shallow, start, "fp16x3", device))


def test_narrow_operands_are_packed_in_full_tiles() -> None:
    from qimeng.coder.template.families.gemm.host import print_gemm
    from qimeng.coder.template.families.gemm.schedule import GemmSchedule

    _, _, plan = planned(lambda: Call(mm), shapes((16, 8192), (8192, 16)))
    schedule = GemmSchedule(block_m=16, block_n=16, block_k=64, precision="fp16x3")
    source = print_gemm(plan, schedule, "g").source
    assert f"g_pack_b_kernel[({8192 * 16 // 1024},)]" in source, source


def test_only_parameters_are_packed_once() -> None:
    from qimeng.coder.template.families.gemm.host import print_gemm
    from qimeng.coder.template.families.gemm.schedule import GemmSchedule

    graph, region, plan = planned(lambda: Call(lambda s, x: functional.linear(x, s.w), w=(64, 50)), shapes((40, 50)))
    schedule = GemmSchedule(block_m=32, block_n=32, block_k=32, precision="fp16x3", packed="ab")
    impl = print_gemm(plan, schedule, "g")
    assert [graph.nodes[region.inputs[i].node].kind for i in impl.prepare_inputs] == ["parameter"]
    assert "g_pack_a(x0)" in impl.source.split("def g_run")[1] and "g_pack_b(" not in impl.source.split("def g_run")[1]
    assert all(
        line.startswith(("def g_", "from triton", "@triton"))
        for line in impl.source.splitlines()
        if line and not line.startswith((" ", '"'))
    )


def test_weights_that_depend_on_an_input_are_not_packed_beforehand() -> None:
    import torch

    from qimeng.coder.template.families.gemm.plan import plan_gemm
    from qimeng.graph.capture import capture
    from qimeng.graph.region import partition

    def b_is_held(function: Callable[..., Any]) -> bool:
        graph = capture(lambda: Call(function, w=(64, 64)), lambda: (torch.empty(64, 64), torch.empty(64)))
        region = next(r for r in partition(graph) if r.label() in ("mm", "linear"))
        return plan_gemm(region).b.held

    assert b_is_held(lambda m, x, s: x @ m.w)
    assert not b_is_held(lambda m, x, s: x @ torch.tanh(m.w * s))
