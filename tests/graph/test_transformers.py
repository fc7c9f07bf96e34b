"""Blocks of `transformers`, from tiny configurations, are captured into operators, output classes included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qimeng.envs.workers.outputs import describe, difference
from qimeng.family import covering
from qimeng.graph.loops.loop import is_loop, loop_of
from qimeng.graph.rewrites import find_rewrites
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

HIDDEN, LENGTH = 32, 7
SMALL = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 50,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def decoder(name: str, layer: str, attention: str = "sdpa") -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A decoder layer with position embeddings by keyword; an attention mask where the attention is eager."""
    import importlib

    home = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(home, f"{layer}Config")(**GROUPED)
    config._attn_implementation = attention
    module = getattr(home, f"{layer}DecoderLayer")(config, 0)
    places = (torch.randn(1, LENGTH, 8), torch.randn(1, LENGTH, 8))
    mask = {} if attention == "sdpa" else {"attention_mask": torch.zeros(2, 1, LENGTH, LENGTH)}
    return module, (torch.randn(2, LENGTH, HIDDEN),), {"position_embeddings": places, **mask}


def whole(kind: str, **options: Any) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A whole model on token ids; Llama's returns its cache of keys and values, as by default."""
    import transformers

    config = getattr(transformers, f"{kind.removesuffix('Model')}Config")(**options)
    config.use_cache = kind == "LlamaModel"
    return getattr(transformers, kind)(config), (torch.randint(0, 50, (2, LENGTH)),), {}


def t5() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers.models.t5.modeling_t5 import T5Block, T5Config

    config = T5Config(d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=50)
    config._attn_implementation = "eager"
    return T5Block(config, has_relative_attention_bias=True), (torch.randn(2, LENGTH, HIDDEN),), {}


def mixtral() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(**GROUPED, num_local_experts=4)
    module = MixtralSparseMoeBlock(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module, (torch.randn(2, LENGTH, HIDDEN),), {}


BLOCKS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]], int, str]] = {
    "llama_layer": (lambda: decoder("llama", "Llama"), 30, "Tensor"),
    "llama_layer_with_mask": (lambda: decoder("llama", "Llama", "eager"), 40, "Tensor"),
    "qwen3_layer": (lambda: decoder("qwen3", "Qwen3"), 40, "Tensor"),
    "gemma_layer": (lambda: decoder("gemma", "Gemma"), 30, "Tensor"),
    "llama": (lambda: whole("LlamaModel", **GROUPED), 45, "BaseModelOutputWithPast"),
    "gpt2": (
        lambda: whole("GPT2Model", n_embd=HIDDEN, n_head=4, n_layer=1, n_positions=64, vocab_size=50),
        20,
        "BaseModelOutputWithPastAndCrossAttentions",
    ),
    "bert": (lambda: whole("BertModel", **SMALL), 20, "BaseModelOutputWithPoolingAndCrossAttentions"),
    "t5_block": (t5, 40, "tuple"),
    "mixtral_experts": (mixtral, 6, "Tensor"),
}


SLOW = ("gemma_layer", "llama_layer_with_mask", "bert")
"""Like others here."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in BLOCKS])
def test_captured_into_operators(name: str) -> None:
    pytest.importorskip("transformers")
    make, least, returned = BLOCKS[name]
    torch.manual_seed(0)
    module, inputs, keywords = make()
    module.eval()
    program = Program.start(capture_spec(KernelSpec.from_module(module, inputs, kwargs=keywords)))
    assert len(program.regions) >= least
    model = program.load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        expected, found = module(*inputs, **keywords), model(*inputs, **keywords)
    assert type(found) is type(expected) and type(found).__name__ == returned
    (facts, values), (wanted, others) = describe(found, {}), describe(expected, {})
    assert difference(facts, wanted) is None
    for a, b in zip(values, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_block_of_mamba_in_half_precision_is_one_loop() -> None:
    pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    torch.manual_seed(0)
    config = MambaConfig(hidden_size=6, state_size=4, time_step_rank=2, num_hidden_layers=1)
    module, x = MambaMixer(config, 0).eval().to(torch.bfloat16), torch.randn(2, 70, 6, dtype=torch.bfloat16)
    graph = capture_spec(KernelSpec.from_module(module, (x,)), verify=False)
    assert [loop_of(n).count for n in graph.ops() if is_loop(n)] == [70] and sum(1 for _ in graph.ops()) < 70
    program = Program.start(graph)
    program = program.with_rewrites(find_rewrites(graph, "layers")[0])
    (loop,) = [r for r in program.regions if any(is_loop(n) for n in r.ops)]
    assert covering(loop)[0].name == "recurrent"
    model = program.load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=2e-2, atol=2e-3)
