"""The shorter way of taking operators apart gives the graphs of the public one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from qimeng.graph import capture, decompose
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


class Kept(torch.nn.Module):
    """Operators that stay whole, beside others that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gru, self.norm = torch.nn.Linear(8, 8), torch.nn.GRU(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(functional.relu6(self.linear(x))) + self.gru(x)[0]
        return functional.scaled_dot_product_attention(y[None], y[None], y[None]) * functional.selu(y).var(1).sum()


class Images(torch.nn.Module):
    """Composite operators for which PyTorch's table has a text of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.interpolate(self.norm(self.layer(x)), scale_factor=2, mode="bicubic")
        return functional.interpolate(functional.max_pool2d(y, 2), size=(5, 5), mode="nearest-exact").flatten(1)


class Plain(torch.nn.Module):
    """Composite operators that PyTorch takes apart by itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.einsum("bij,bkj->bik", x, y) @ torch.tril(torch.ones(x.shape[1], x.shape[1]))
        return torch.cdist(x, y), functional.one_hot(z.argmax(-1), 7), torch.broadcast_tensors(z, x[:, :, :1])[1]


CASES: list[tuple[Callable[[], torch.nn.Module], tuple[tuple[int, ...], ...]]] = [
    (Kept, ((6, 8),)),
    (Images, ((2, 3, 9, 9),)),
    (Plain, ((2, 7, 5), (2, 7, 5))),
]


def graph_of(module: Callable[[], torch.nn.Module], shapes: tuple[tuple[int, ...], ...]) -> str:
    return repr(vars(capture.capture(module, lambda: tuple(torch.empty(s) for s in shapes))))


@pytest.mark.parametrize(("module", "shapes"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_graph_is_that_of_the_public_way(
    module: Callable[[], torch.nn.Module], shapes: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch.export.ExportedProgram, "run_decompositions")  # it is not asked
        found = graph_of(module, shapes)

    def unknown(namespaces: tuple[str, ...]) -> tuple[decompose.Table, decompose.Table]:
        raise AttributeError("a version of PyTorch that splits its table in another way")

    monkeypatch.setattr(decompose, "_parts", unknown)
    assert graph_of(module, shapes) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64])
def test_tensors_made_from_numbers_have_the_values_of_their_dtype(dtype: torch.dtype) -> None:
    class Made(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            window = torch.hann_window(8, dtype=dtype if dtype.is_floating_point else None)
            return x * torch.linspace(-3, 9.7, 8, dtype=dtype), torch.linspace(0, 1.9, 8, dtype=dtype), x + window

    module, x = Made(), torch.rand(8)
    model = Program.start(capture_spec(KernelSpec.of(module, (x,)))).load().Model()
    for found, expected in zip(model(x), module(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if dtype is not torch.float32 else 1e-6)


def test_a_margin_loss_of_rows_without_targets_is_0() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.multilabel_margin_loss(x, torch.full((3, 4), -1), reduction="none") * 2

    model = Program.start(capture_spec(KernelSpec.of(loss, (torch.rand(3, 4),)))).load().Model()
    assert model(torch.randn(3, 4)).tolist() == [0.0, 0.0, 0.0]
