"""The rows family as CUDA C++: every form runs on the CPU by a header that plays the GPU, and compiles by NVRTC.

What the CPU cannot show is left to the GPU: races, alignment, the rounding of CUDA's own functions.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.backend import backend_named
from qimeng.backend.cuda_runtime import cuda_compile
from qimeng.backend.facts import usage_of
from qimeng.coder.template.families.tile.cuda_rows import print_rows_cuda
from qimeng.coder.template.families.tile.defaults import default_schedule
from qimeng.coder.template.families.tile.plan import plan_tile
from qimeng.device import device_named
from qimeng.family import Unsupported
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region
from qimeng.program.program import Implementation, Program
from tests.coder.cuda_on_cpu import CONTRACTED, GXX, Compiled, call, cuda_on_cpu
from tests.coder.test_tile import CASES, LIMIT

needs_gxx = pytest.mark.skipif(GXX is None, reason="needs g++, which runs CUDA text on the CPU")
MISSING = backend_named("cuda").missing()
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


class _Module(torch.nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def region_of(function: Any, inputs: list[torch.Tensor]) -> Region:
    graph = capture(lambda: _Module(function), lambda: tuple(torch.empty_like(x) for x in inputs))
    return make_region(graph, [n.name for n in graph.ops()])


def printed(function: Any, inputs: list[torch.Tensor], name: str, **changes: Any) -> Implementation:
    return of_region(region_of(function, inputs), name, **changes)


def of_region(region: Region, name: str, **changes: Any) -> Implementation:
    plan = plan_tile(region)
    schedule = default_schedule(plan, device_named("h200")).but(**changes)
    return print_rows_cuda(plan, schedule, f"k_{name}")


def text_of(implementation: Implementation) -> str:
    return implementation.source.split('r"""')[1].split('"""')[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def contracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is compiled with `CONTRACTED`."""
    return tmp_path_factory.mktemp("contracted")


FORMS: dict[str, dict[str, Any]] = {
    "loop": {"form": "loop", "block_p": 2, "warps": 4},
    "split": {"form": "split", "block_p": 1, "splits": 3, "warps": 2},
    "resident": {"form": "resident", "block_p": 2, "warps": 4},
}
EVERY_FORM = {"softmax", "softmax_columns", "argmax", "group_norm", "std", "two_levels", "two_outputs"}
"""Each other case takes one of the forms."""
POINTWISE = {"gelu", "broadcast", "permuted", "sliced", "triu", "activations", "bytes"}


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_pytorch_does(case: str, folder: Path) -> None:
    function, shapes = CASES[case]
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]
    expected = function(*(x.double() for x in inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    one = "tiles" if case in POINTWISE else list(FORMS)[list(CASES).index(case) % len(FORMS)]
    region = region_of(function, inputs)
    forms = list(FORMS) if case in EVERY_FORM else [one]
    made = {form: of_region(region, case, **FORMS.get(form, {"warps": 2})) for form in forms}
    with cuda_on_cpu(folder) as cpu:
        cpu.together(made.values())
        results = {form: (call(implementation, *inputs), cpu.launches.copy()) for form, implementation in made.items()}
    counts = [len(launches) for _, launches in results.values()]
    assert all(a < b for a, b in zip([0, *counts], counts, strict=False)), "its own kernels compute each"
    for form, (found, _) in results.items():
        for a, b in zip(found, expected, strict=True):
            error = float((a.double() - b.double()).abs().max() / (b.double().abs().max() + 1e-30))
            assert error < LIMIT, f"{case}, {form}: {error:.2e}"
            assert a.shape == b.shape and a.stride() == b.stride()


@needs_gxx
@pytest.mark.skipif("fma" not in Path("/proc/cpuinfo").read_text(), reason="needs a CPU with multiply-adds")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_a_softmax_of_large_products_is_pytorchs(form: str, dtype: torch.dtype, contracted: Path) -> None:
    """The largest product is rounded before it is subtracted, and both of two equal ones count."""
    torch.manual_seed(0)
    x = torch.randn(9, 64, dtype=dtype).mul(1e12 if dtype == torch.float32 else 1e22).repeat(1, 2)

    def function(x: torch.Tensor) -> Any:
        return functional.softmax(x * 0.3, 1), functional.log_softmax(x * 0.3, 1)

    made = printed(function, [x], "large", **FORMS[form])
    with cuda_on_cpu(contracted, *CONTRACTED) as cpu:
        found = call(made, x)
    assert cpu.launches
    for a, b in zip(found, function(x), strict=True):
        torch.testing.assert_close(a, b)


@needs_gxx
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_computed_as_pytorch_does(dtype: str, folder: Path) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(9, 136).to(getattr(torch, dtype)), torch.randn(136).to(getattr(torch, dtype))]
    made = printed(lambda x, w: functional.layer_norm(functional.silu(x), (136,), w), inputs, "half", form="loop")
    with cuda_on_cpu(folder) as cpu:
        (found,) = call(made, *inputs)
    expected = functional.layer_norm(functional.silu(inputs[0].double()), (136,), inputs[1].double())
    assert found.dtype == inputs[0].dtype and cpu.launches == ["k_half_rows"]
    limit = {"bfloat16": 2**-8, "float16": 2**-11, "float64": 1e-14}[dtype]
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < limit
    width = {"bfloat16": 8, "float16": 8, "float64": 2}[dtype]
    assert f", {width}>" in text_of(made), "16 bytes an access"


@needs_gxx
def test_special_values_are_pytorchs(folder: Path) -> None:
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-45, -2.5]
    x = torch.tensor(values * 4).reshape(8, 5)

    def function(x: torch.Tensor) -> Any:
        top = x.amax(1, keepdim=True)
        return (
            -x,
            x.abs(),
            torch.maximum(x, top * 0),
            torch.sigmoid(x),
            x.argmax(1),
            torch.isinf(x),
            1 / x,
            torch.sign(x),
        )

    made = printed(function, [x], "special", form="loop", warps=1)
    with cuda_on_cpu(folder):
        found = call(made, x)
    for number, (a, b) in enumerate(zip(found, function(x), strict=True)):
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        assert bool(same.all()), (number, a, b)
        if a.is_floating_point() and number in (0, 1, 6):
            assert bool((torch.signbit(a) == torch.signbit(b))[~a.isnan()].all()), f"sign of zero, output {number}"


@needs_gxx
def test_the_variance_of_a_long_row_is_as_exact_as_that_of_a_short_one(folder: Path) -> None:
    x = torch.rand(1, 1 << 20, generator=torch.Generator().manual_seed(0))
    made = printed(lambda x: x.var(1), [x], "long", form="loop", warps=1)
    with cuda_on_cpu(folder) as cpu:
        (found,) = call(made, x)
    assert cpu.launches and abs(found.item() / x.double().var(1).item() - 1) < 5e-7


@needs_gxx
def test_a_tensor_that_begins_anywhere_is_read_element_by_element(folder: Path) -> None:
    held = torch.randn(1 + 64 * 8)
    x = held[1:].reshape(64, 8)
    made = printed(torch.tanh, [torch.empty(64, 8)], "odd")
    with cuda_on_cpu(folder) as cpu:
        (found,) = call(made, x)
        call(made, x.clone())
    assert cpu.launches == ["k_odd_tiles_narrow", "k_odd_tiles"]
    torch.testing.assert_close(found, torch.tanh(x))


@needs_nvrtc
@pytest.mark.parametrize("case", ["activations", "softmax", "batch_norm", "argmax", "two_levels"])
def test_it_compiles_for_a_named_device(case: str) -> None:
    function, shapes = CASES[case]
    made = printed(function, [torch.randn(s) for s in shapes], case, **({} if case in POINTWISE else FORMS["loop"]))
    names = backend_named("cuda").kernel_names(made.source)
    _, ptx, lowered = cuda_compile(text_of(made), tuple(names), "sm_90")
    assert set(lowered) == set(names) and not {"div.approx", "sqrt.approx", "div.full"} & set(
        re.findall(r"\w+\.\w+", ptx)
    )


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_compile_and_spill_nothing(dtype: str, tmp_path: Path) -> None:
    inputs = [torch.randn(64, 8192).to(getattr(torch, dtype)), torch.randn(8192).to(getattr(torch, dtype))]
    made = printed(lambda x, w: functional.layer_norm(functional.silu(x), (8192,), w), inputs, "half", warps=8)
    binary, _, _ = cuda_compile(text_of(made), ("k_half_rows", "k_half_rows_narrow"), "sm_90")
    (tmp_path / "k.cubin").write_bytes(binary)
    found = usage_of(str(tmp_path / "k.cubin"))
    assert [u.spills for u in found.values()] == [0, 0] and all((u.registers or 0) <= 128 for u in found.values())


def test_what_it_cannot_say_is_unsupported() -> None:
    x = torch.randn(4, 70_000)
    with pytest.raises(Unsupported, match="a row of 70000 elements is 548 for each of 128 threads; at most 64 stay"):
        printed(lambda x: functional.softmax(x, 1), [x], "long", form="resident", block_p=1, warps=4)
    with pytest.raises(Unsupported, match="64 for each of 1024 threads; at most 32 stay"):
        printed(lambda x: functional.softmax(x, 1), [x[:, :65536]], "long", form="resident", block_p=1, warps=32)
    with pytest.raises(Unsupported, match="64 warps are 2048 threads"):
        printed(torch.tanh, [x], "wide", warps=64)


@needs_gxx
def test_a_program_with_cuda_stands_alone(folder: Path) -> None:
    """The emitted file has the runtime in it and nothing of this library; on a CPU it refuses with one clear error."""
    x = torch.randn(6, 40)
    function = lambda x: (functional.softmax(x, 1) * 2).abs()  # noqa: E731
    graph = capture(lambda: _Module(function), lambda: (torch.empty(6, 40),))
    start = Program.start(graph)
    softmax = next(r for r in start.regions if "softmax" in r.label())
    plan = plan_tile(softmax)
    schedule = default_schedule(plan, device_named("h200"))
    made = print_rows_cuda(plan, schedule, f"k{softmax.signature[:8]}")
    program = start.with_implementation(softmax.id, made)
    assert not re.search(r"(import|from) (qimeng|triton)", program.source)
    assert "pip install 'cuda-bindings>=13,<14'" in program.source.split('"""')[1]
    module = program.load()
    with pytest.raises(ValueError, match="made for an NVIDIA GPU, got tensors on cpu"):
        module.Model()(x)
    module._check_cuda = lambda device: None
    module.CudaKernel.launch = Compiled(folder).run_as_method()
    torch.testing.assert_close(module.Model()(x), function(x))
