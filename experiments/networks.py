"""Real networks and single blocks of them, with random weights: ``qimeng bench run module:experiments.networks``.

Each public function is a problem; its name is the id. The models are those of `transformers` and `torchvision`, made
from a configuration in the text of a file, so that nothing is downloaded and a worker process makes its own weights.
All run in evaluation mode, in bf16 unless ``--dtype float32`` says otherwise. Sizes are those of models in use; the
largest (`llama`) has 4.2 GB of weights in float32. Where `torchvision` is not installed, its problems are rows with an
error that says so.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from qimeng import KernelSpec
from qimeng.errors import SpecError

TEXT = """
import torch
{imports}

SIZES = {sizes}
{shapes}


class Model(torch.nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        {build}
        self.eval()

    def forward(self, {arguments}):
        return {result}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return SIZES
""".lstrip()
"""A file in KernelBench's form. Sizes stand at the top, where the library can make them smaller for its checks."""

IMAGES = ("BATCH = 32", "torch.randn(BATCH, 3, 224, 224)")
"""Shapes and inputs of a network for images."""


def _spec(
    name: str,
    imports: str,
    sizes: dict[str, Any],
    build: str,
    result: str,
    shapes: str,
    inputs: str,
    arguments: str = "x",
) -> KernelSpec:
    """The problem of a file.

    Args:
        name: for people.
        imports: lines that import the classes.
        sizes: arguments of the configuration.
        build: lines of the constructor, which see `sizes`.
        result: the expression that `forward` returns.
        shapes: lines with the sizes of the inputs.
        inputs: what `get_inputs` returns, without brackets.
        arguments: names of the inputs in `forward`.

    Raises:
        SpecError: the package is not installed.
    """
    package = imports.split()[1].partition(".")[0]
    if find_spec(package) is None:
        raise SpecError(
            f"the network {name} needs the package {package}, which is not installed: pip install {package}"
        )
    text = TEXT.format(
        imports=imports,
        sizes=repr(sizes),
        build=build.replace("\n", "\n        "),
        result=result,
        shapes=shapes,
        inputs=inputs,
        arguments=arguments,
    )
    return KernelSpec.from_source(text, name, dtype="bfloat16", training=False)


# ---- language models

_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
_QWEN = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
}  # fmt: skip
_BERT = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "vocab_size": 30522,
}  # fmt: skip
_T5 = {
    "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_MAMBA = {"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "vocab_size": 50280}


def llama() -> KernelSpec:
    """A decoder of the size of Llama 3.2 1B: 16 layers with 32 heads, which share 8 heads of keys and values."""
    return _tokens("llama", "Llama", _LLAMA, 2048)


def qwen3() -> KernelSpec:
    """A decoder of the size of Qwen3 0.6B: 28 layers; heads are normalized, and there are fewer of keys and values."""
    return _tokens("qwen3", "Qwen3", _QWEN, 2048)


def mamba() -> KernelSpec:
    """Mamba 130M: 24 layers, each a selective scan; without its own kernels a Python loop over 512 positions."""
    return _tokens("mamba", "Mamba", _MAMBA, 512)


def bert() -> KernelSpec:
    """BERT base on 32 texts of 512 tokens, padded, with the mask that says where."""
    return _spec(
        "bert",
        "from transformers import BertConfig, BertModel",
        _BERT,
        "self.network = BertModel(BertConfig(**sizes))",
        "self.network(input_ids=x, attention_mask=mask).last_hidden_state",
        "BATCH, LENGTH, WORDS = 32, 512, 30522",
        "torch.randint(0, WORDS, (BATCH, LENGTH)), "
        "(torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (BATCH, 1))).to(torch.int64)",
        "x, mask",
    )


def t5() -> KernelSpec:
    """T5 base (version 1.1): 12 layers each of encoder and decoder, with a learned bias of relative positions."""
    return _spec(
        "t5",
        "from transformers import T5Config, T5Model",
        _T5,
        "self.network = T5Model(T5Config(**sizes))",
        "self.network(input_ids=x, decoder_input_ids=y, use_cache=False).last_hidden_state",
        "BATCH, LENGTH, ANSWER, WORDS = 16, 512, 128, 32128",
        "torch.randint(0, WORDS, (BATCH, LENGTH)), torch.randint(0, WORDS, (BATCH, ANSWER))",
        "x, y",
    )


def _tokens(name: str, family: str, sizes: dict[str, Any], length: int) -> KernelSpec:
    """A decoder that reads 4 texts of `length` tokens."""
    return _spec(
        name,
        f"from transformers import {family}Config, {family}Model",
        sizes,
        f"self.network = {family}Model({family}Config(**sizes))",
        "self.network(input_ids=x, use_cache=False).last_hidden_state",
        f"BATCH, LENGTH, WORDS = 4, {length}, {sizes['vocab_size']}",
        "torch.randint(0, WORDS, (BATCH, LENGTH))",
    )


# ---- speech and images

_VIT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_WHISPER = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}


def whisper_encoder() -> KernelSpec:
    """The encoder of Whisper small on eight pieces of 30 seconds: two convolutions and 12 layers of attention."""
    return _spec(
        "whisper_encoder",
        "from transformers import WhisperConfig\n"
        "from transformers.models.whisper.modeling_whisper import WhisperEncoder",
        _WHISPER,
        "self.network = WhisperEncoder(WhisperConfig(**sizes))",
        "self.network(x).last_hidden_state",
        "BATCH = 8",
        "torch.randn(BATCH, 80, 3000)",
    )


def vit() -> KernelSpec:
    """ViT base: 12 layers on patches of 16 x 16."""
    return _images("vit", "ViT", _VIT, "last_hidden_state")


def resnet50() -> KernelSpec:
    """ResNet-50."""
    return _images("resnet50", "ResNet", {}, "pooler_output")


def convnext_tiny() -> KernelSpec:
    """ConvNeXt tiny: depthwise convolutions of 7 x 7, each with a layer norm and two linear layers."""
    return _images("convnext_tiny", "ConvNext", {}, "last_hidden_state")


def efficientnet_b0() -> KernelSpec:
    """EfficientNet B0: depthwise convolutions with squeeze and excitation."""
    sizes = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 224}
    return _images("efficientnet_b0", "EfficientNet", sizes, "pooler_output")


def swin_tiny() -> KernelSpec:
    """Swin tiny: attention in windows of 7 x 7, which every other layer shifts."""
    return _images("swin_tiny", "Swin", {}, "last_hidden_state")


def _images(name: str, family: str, sizes: dict[str, Any], output: str) -> KernelSpec:
    """A network of `transformers` for images."""
    return _spec(
        name,
        f"from transformers import {family}Config, {family}Model",
        sizes,
        f"self.network = {family}Model({family}Config(**sizes))",
        f"self.network(x).{output}",
        *IMAGES,
    )


def torchvision_resnet50() -> KernelSpec:
    """ResNet-50 with its classifier."""
    return _torchvision("resnet50")


def torchvision_convnext_tiny() -> KernelSpec:
    """ConvNeXt tiny with its classifier."""
    return _torchvision("convnext_tiny")


def torchvision_efficientnet_v2_s() -> KernelSpec:
    """EfficientNet V2 small with its classifier."""
    return _torchvision("efficientnet_v2_s")


def torchvision_swin_t() -> KernelSpec:
    """Swin tiny with its classifier."""
    return _torchvision("swin_t")


def _torchvision(name: str) -> KernelSpec:
    """A network of `torchvision` for images."""
    return _spec(
        f"torchvision_{name}",
        f"from torchvision.models import {name}",
        {},
        f"self.network = {name}(weights=None)",
        "self.network(x)",
        *IMAGES,
    )


# ---- single blocks

_LLAMA_FROM = "from transformers import LlamaConfig\nfrom transformers.models.llama.modeling_llama import "


def llama_layer() -> KernelSpec:
    """One decoder layer of Llama 3 8B on 2048 positions, causal."""
    sizes = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 1, "attn_implementation": "sdpa",
    }  # fmt: skip
    return _spec(
        "llama_layer",
        _LLAMA_FROM + "LlamaDecoderLayer",
        sizes,
        "self.layer = LlamaDecoderLayer(LlamaConfig(**sizes), 0)",
        "self.layer(x, position_embeddings=(cos, sin))",
        "BATCH, LENGTH, HIDDEN, HEADS = 2, 2048, 4096, 32",
        "torch.randn(BATCH, LENGTH, HIDDEN), *torch.randn(2, BATCH, LENGTH, HIDDEN // HEADS).unbind()",
        "x, cos, sin",
    )


def llama_mlp() -> KernelSpec:
    """The feed-forward part of such a layer: two linear layers, their product, a third."""
    return _spec(
        "llama_mlp",
        _LLAMA_FROM + "LlamaMLP",
        {"hidden_size": 4096, "intermediate_size": 14336},
        "self.layer = LlamaMLP(LlamaConfig(**sizes))",
        "self.layer(x)",
        "ROWS, HIDDEN = 4096, 4096",
        "torch.randn(ROWS, HIDDEN)",
    )


def rotary() -> KernelSpec:
    """Rotary embedding of queries and keys: 32 heads and 8 of 128 values on 2048 positions."""
    return _spec(
        "rotary",
        "from transformers.models.llama.modeling_llama import apply_rotary_pos_emb",
        {},
        "pass",
        "apply_rotary_pos_emb(q, k, cos, sin)",
        "BATCH, HEADS, GROUPS, LENGTH, DEPTH = 4, 32, 8, 2048, 128",
        "torch.randn(BATCH, HEADS, LENGTH, DEPTH), torch.randn(BATCH, GROUPS, LENGTH, DEPTH), "
        "*torch.randn(2, BATCH, LENGTH, DEPTH).unbind()",
        "q, k, cos, sin",
    )


def bert_layer() -> KernelSpec:
    """One layer of BERT base on 32 texts of 512 tokens."""
    return _spec(
        "bert_layer",
        "from transformers import BertConfig\nfrom transformers.models.bert.modeling_bert import BertLayer",
        {**_BERT, "num_hidden_layers": 1, "attn_implementation": "sdpa"},
        "self.layer = BertLayer(BertConfig(**sizes))",
        "self.layer(x)",
        "BATCH, LENGTH, HIDDEN = 32, 512, 768",
        "torch.randn(BATCH, LENGTH, HIDDEN)",
    )


def convnext_layer() -> KernelSpec:
    """One layer of ConvNeXt base's third stage."""
    return _spec(
        "convnext_layer",
        "from transformers import ConvNextConfig\n"
        "from transformers.models.convnext.modeling_convnext import ConvNextLayer",
        {"dim": 512},
        "self.layer = ConvNextLayer(ConvNextConfig(), **sizes)",
        "self.layer(x)",
        "BATCH, CHANNELS, SIDE = 64, 512, 14",
        "torch.randn(BATCH, CHANNELS, SIDE, SIDE)",
    )


def mamba_layer() -> KernelSpec:
    """One mixer of Mamba 130M on 512 positions: the scan is a Python loop."""
    return _spec(
        "mamba_layer",
        "from transformers import MambaConfig\nfrom transformers.models.mamba.modeling_mamba import MambaMixer",
        {"hidden_size": 768, "state_size": 16, "num_hidden_layers": 1},
        "self.layer = MambaMixer(MambaConfig(**sizes), 0)",
        "self.layer(x)",
        "BATCH, LENGTH, HIDDEN = 4, 512, 768",
        "torch.randn(BATCH, LENGTH, HIDDEN)",
    )
