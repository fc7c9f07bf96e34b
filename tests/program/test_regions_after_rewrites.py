"""Regions that a rewrite would make need their own results are taken apart, instead of the rewrite being refused."""

from __future__ import annotations

import torch

from qimeng.actions import Context, kind_named
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}


class Images(torch.nn.Module):
    def __init__(self) -> None:
        from transformers import ViTConfig, ViTModel

        super().__init__()
        config = ViTConfig(image_size=16, patch_size=8, **SIZES)
        self.model = ViTModel(config, add_pooling_layer=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).last_hidden_state


def test_layers_on_the_same_values_become_one_after_their_readers_were_fused() -> None:
    spec = KernelSpec.from_module(Images().eval(), (torch.randn(2, 3, 16, 16),))
    program = Program.start(capture_spec(spec))
    context = Context(coder=TemplateCoder(), device=device_named("h200"), mode="default")
    clustered = program.with_regions(kind_named("cluster").apply(program, Action("cluster", ()), context).regions)
    rewrite = kind_named("algebra").apply(clustered, Action("algebra", (), "together"), context)
    assert len(rewrite.rewrites) == SIZES["num_hidden_layers"]
    after = clustered.with_rewrites(rewrite.rewrites)
    linear = [n for n in after.graph.ops() if n.packet == "aten.linear"]
    assert len(linear) < len([n for n in program.graph.ops() if n.packet == "aten.linear"])
    assert any(len(r.nodes) > 2 for r in after.called)
