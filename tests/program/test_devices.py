"""Programs compute with tensors of one device: run on fake CUDA tensors, which need no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qimeng.graph.capture import capture
from qimeng.graph.region import BESIDE_NUMBERS, merge
from qimeng.graph.rewrites import find_rewrites, options
from qimeng.program.program import Program


class OneDevice(TorchDispatchMode):
    """Raises where an operator meets tensors on the CPU in a program of CUDA's.

    PyTorch lets some operators take a number on the CPU, but copies it to the GPU for most of those, which cannot be
    recorded. Those of `BESIDE_NUMBERS` hand it to their kernel.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The results of `func`, whose tensors lie on one device."""
        tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = func(*args, **(kwargs or {}))
        results = [x for x in _pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        name = str(func.overloadpacket)
        number = name in BESIDE_NUMBERS and any(x.device.type == "cuda" for x in tensors)
        for x in [*results, *(x for x in tensors if not (number and x.dim() == 0))]:
            constant = name in ("aten.scalar_tensor", "aten.full") and x.dim() == 0
            assert x.device.type == "cuda" or constant, f"{name} has a tensor on {x.device}"
        return made


def on_cuda(program: Program) -> None:
    """Run `program` on fake CUDA tensors; raises where a tensor lies elsewhere."""
    loaded = program.load()
    model: Any = loaded.Model()
    prepared = [made.function for made in vars(model).get("_qimeng_prepared", [])]
    loaded.__dict__.update(_check=lambda *_: None, _check_state=lambda *_: None)  # which refuse fake tensors

    def placed(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")

    with FakeTensorMode(), torch.no_grad():
        for part in model.modules():
            for held in (part._parameters, part._buffers):
                held.update({k: placed(t.shape, t.stride(), t.dtype) for k, t in held.items()})
        vars(model)["_qimeng_prepared"] = prepared
        nodes = [n for n in program.graph.nodes.values() if n.kind == "input"]
        metas = [n.metas[0] for n in nodes]
        inputs = [placed(m.shape, m.stride, getattr(torch, m.dtype)) for m in metas if m is not None]
        with OneDevice():
            model(*inputs)


def forms_of(make: Callable[[], torch.nn.Module], *inputs: torch.Tensor) -> list[Program]:
    """The program of PyTorch's calls: operator by operator, in one region, and rewritten by each option."""
    start = Program.start(capture(make, lambda: inputs))
    programs = [start]
    for option in options():
        rewrites, _ = find_rewrites(start.graph, option)
        if rewrites:
            programs.append(start.with_rewrites(rewrites))
    for program in tuple(programs):
        if len(program.called) > 1:
            whole = merge(program.called, [r.id for r in program.called])
            programs.append(program.with_regions((*(r for r in program.regions if program.is_settled(r)), *whole)))
    return programs


class Bounded(torch.nn.Module):
    """A scale clamped by the logarithm of a constant, as in Swin V2."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores times the scale."""
        most = torch.log(torch.tensor(1.0 / 0.01, device=x.device))
        return x * torch.clamp(self.scale, max=most).exp()


class Segments(torch.nn.Module):
    """Masked sums along steps, as in Mamba 2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """exp of the sums between each two steps; 0 above the diagonal."""
        total = torch.cumsum(x, -1)
        kept = torch.tril(torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device))
        return (total[..., :, None] - total[..., None, :]).masked_fill(~kept, -torch.inf).exp()


class Constants(torch.nn.Module):
    """Constants of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One result for each kind."""
        two = torch.tensor(2.0, device=x.device)
        places = torch.arange(8, device=x.device)
        return (
            x * two,
            torch.where(x > 0, x, math.pi),
            torch.where(x > 0, two, x) + self.weight,
            torch.full_like(x, 3.0) - x,
            torch.where(places < 5, x, -1.0),
            x.index_put((places[::2],), two),
            torch.maximum(x, two) / (two + two),
            torch.clamp(x, two.log(), two.exp()),
            torch.lerp(x, self.weight, two),
            torch.stack([two, two * two, x[0]]),
            x + torch.hann_window(8, device=x.device) + torch.linspace(0, 1, 8, device=x.device),
            torch.nn.functional.one_hot(places % 4, 4) * x[:4],
            two.expand(8) * self.weight,
            torch.bucketize(x, torch.tensor([0.0, 0.5, 1.0], device=x.device)),
        )


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Bounded, (2, 4, 8, 8)), (Segments, (2, 3, 8)), (Constants, (8,))],
    ids=["bounded", "segments", "constants"],
)
def test_all_tensors_lie_on_the_device_of_the_program(make: Any, shape: tuple[int, ...]) -> None:
    for program in forms_of(make, torch.rand(shape)):
        on_cuda(program)


def test_a_number_goes_into_arithmetic_without_a_copy() -> None:
    """PyTorch hands it to the kernel, unrounded; a tensor on the GPU would be filled first."""
    program = Program.start(capture(lambda: Numbers(), lambda: (torch.rand(8),)))
    assert "torch.ops.aten.mul.Tensor(x0, torch.scalar_tensor(2.0, dtype=torch.float32))" in program.source


class Numbers(torch.nn.Module):
    """A number as a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice the input."""
        return x * torch.tensor(2.0)
