"""The suite of real networks: its problems are found, and one is a computation."""

from __future__ import annotations

import pytest
import torch

import experiments.networks as networks
from qimeng.bench.suite import problems_of
from qimeng.bench.suites import suite_named
from qimeng.errors import SpecError
from qimeng.graph.capture import capture
from qimeng.graph.on_device import for_device
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from tests.graph.other_layouts import OtherLayouts


def test_the_suite_lists_networks_and_blocks_without_loading_them() -> None:
    found = {p.id for p in problems_of(suite_named("module:experiments.networks"))}
    assert {"llama", "qwen3", "bert", "t5", "vit", "mamba", "whisper_encoder", "rotary", "llama_layer"} <= found
    assert {"resnet50", "convnext_tiny", "efficientnet_b0", "swin_tiny", "torchvision_resnet50"} <= found


def test_a_block_is_captured_in_bfloat16_without_memory() -> None:
    spec = networks.llama_mlp()
    graph = capture(spec.module, lambda: spec.inputs(0))
    assert [n.packet for n in graph.ops()] == ["aten.linear", "aten.silu", "aten.linear", "aten.mul", "aten.linear"]
    assert spec.dtype == "bfloat16" and not spec.training and spec.reduced() is not spec


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match="needs the package torchvision, which is not installed"):
        networks.torchvision_resnet50()


def test_the_rotary_embedding_runs() -> None:
    small = networks.rotary().reduced()
    with torch.no_grad():
        q, k = small.module()(*small.inputs(0))
    assert q.shape[1] > k.shape[1] and bool(q.isfinite().all())


@pytest.mark.slow
def test_a_network_runs_where_attentions_and_convolutions_are_laid_out_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured there and captured here."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(networks, "_VIT", {**sizes, "image_size": 32, "patch_size": 8})
    monkeypatch.setattr(networks, "IMAGES", ("BATCH = 2", "torch.randn(BATCH, 3, 32, 32)"))
    spec = networks.vit()
    captured, module, inputs = capture_spec(spec, verify=False), spec.module(), spec.inputs(0)
    with OtherLayouts(), torch.no_grad():
        moved = for_device(spec, "cpu:0", captured)
        assert moved is not captured
        for graph in (captured, moved):
            model = Program.start(graph).load("network").Model()
            model.load_state_dict(module.state_dict())
            torch.testing.assert_close(model(*inputs), module(*inputs))
