"""Outputs have the module's strides, also where eager takes another way than the exported graph."""

from __future__ import annotations

import pytest
import torch

from qimeng.graph.capture import CaptureError
from qimeng.graph.layout import laid_out, order_of
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec, verify_graph
from qimeng.spec import KernelSpec

X = torch.rand(4, 3, 5)


def test_order_of_dimensions() -> None:
    turned = X.permute(2, 0, 1)
    assert order_of(tuple(turned.shape), turned.stride()) == (1, 2, 0)
    assert order_of((1, 3), (7, 1)) == (0, 1), "a size of 1 says nothing"
    assert order_of((4, 3), (6, 1)) is None and order_of((4, 3), (0, 1)) is None


def test_another_layout_is_seen_and_given() -> None:
    spec = KernelSpec.of(lambda x: (x * 2).permute(1, 2, 0).contiguous().permute(2, 0, 1), (X,))
    plain = capture_spec(KernelSpec.of(lambda x: x * 2, (X,)))
    with pytest.raises(CaptureError, match="output 0 has strides"):
        verify_graph(spec, plain)
    orders = {0: (1, 2, 0)}
    verify_graph(spec, plain, orders)
    graph = laid_out(plain, orders)
    out = Program.start(graph).load().Model()(X)
    assert out.stride() == graph.meta(graph.outputs[0]).stride == (1, 20, 4) and torch.equal(out, X * 2)


def test_the_fast_path_of_a_transformer_layer() -> None:
    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.layer(x, src_mask=mask, is_causal=True)

    module = Encoder().eval()
    x = torch.rand(2, 6, 16)
    graph = capture_spec(KernelSpec.of(module, (x,)))
    model = Program.start(graph).load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        expected, found = module(x), model(x)
    assert len(list(graph.ops())) > 20 and found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
