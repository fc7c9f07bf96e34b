"""Encoders of torch.nn with padding are captured as PyTorch runs them without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.graph.capture import CaptureError
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

AT_END = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
INSIDE = torch.tensor([[False] * 6, [False, True] * 3])
ALL = torch.tensor([[False] * 6, [True] * 6])


class Encoded(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, **options)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding).tanh()


@pytest.mark.parametrize("options", [{}, {"norm": torch.nn.LayerNorm(8)}, {"mask_check": False}])
def test_padding_is_what_the_module_makes_of_it(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = Encoded(**options).eval(), torch.randn(2, 6, 8)
    model = Program.start(capture_spec(KernelSpec.of(module, (x, AT_END)))).load().Model().eval()
    model.load_state_dict(module.state_dict())
    hidden = x.masked_fill(AT_END[..., None], float("nan"))
    given = [(x, AT_END), (hidden, AT_END), (x, ALL), *([] if "mask_check" in options else [(x, INSIDE)])]
    with torch.no_grad():
        for inputs in given:
            expected = module(*inputs)
            torch.testing.assert_close(model(*inputs), expected, rtol=1e-5, atol=1e-5)
            assert expected.isfinite().all()


class Twice(Encoded):
    """Without padding, and with another mask, where PyTorch fills nothing."""

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
        return self.encoder(x), self.encoder(x, torch.zeros(6, 6), padding)


def test_without_padding_or_beside_another_mask_nothing_is_filled() -> None:
    torch.manual_seed(0)
    module, x = Twice().eval(), torch.randn(2, 6, 8)
    model = Program.start(capture_spec(KernelSpec.of(module, (x, AT_END)))).load().Model().eval()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x, AT_END), module(x, AT_END), rtol=1e-5, atol=1e-5)
        assert (module(x, AT_END)[1][1, 4:] != 0).any()


def test_in_training_mode_padding_is_computed_like_the_rest() -> None:
    torch.manual_seed(0)
    module, x = Encoded().train(), torch.randn(2, 6, 8)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    for layer in module.encoder.layers:
        layer.self_attn.dropout = 0.0
    model = Program.start(capture_spec(KernelSpec.of(module, (x, AT_END)))).load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x, AT_END), module(x, AT_END), rtol=1e-5, atol=1e-5)
        assert (module(x, AT_END)[1, 4:] != 0).any()


def test_an_example_that_is_all_padding_in_a_single_layer_stays_on_pytorch() -> None:
    layer, x = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 6, 8)
    with pytest.raises(CaptureError, match="differs"):  # PyTorch's own has NaN there
        capture_spec(KernelSpec.of(layer, (x,), kwargs={"src_key_padding_mask": ALL}))
