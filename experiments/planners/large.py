"""A planner around a large language model: imitation, PPO and decisions of one with 1.5 billion parameters.

The model has the architecture of Qwen2.5-1.5B (its published configuration) with random weights, since none can be
fetched on our machines, and a tokenizer trained here: it says how fast training runs and what memory it takes, nothing
about how well such a model plans. It goes the way of any model of Hugging Face: a folder, read by `from_hub`, LoRA.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from qimeng.bench.environment import environment
from qimeng.device import target_device
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.lm.branches import imitation_pairs
from qimeng.planner.lm.imitation import Example, Imitation, imitate
from qimeng.planner.lm.mini import train_tokenizer
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.stored import Offer, stored_tasks
from qimeng.planner.lm.training import Ppo, train
from qimeng.planner.lm.weights import add_lora, from_hub

TREES = Path(__file__).parents[2] / "benchmarks" / "trees" / "h200.xz"

SIZES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
}


def random_model(size: str, folder: Path, texts: list[str]) -> None:
    """Save a model of the architecture with random weights, and a tokenizer of `texts`, in `folder`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer(texts)
    config = Qwen2Config(**SIZES[size], tie_word_embeddings=True, eos_token_id=0, pad_token_id=0)
    with torch.random.fork_rng(devices=[]), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def large(out: Path, size: str = "1.5B", trees: int = 8, choices: int = 96, steps: int = 256, rank: int = 16) -> None:
    """Time all of it and write the figures.

    Args:
        out: JSON file of the figures.
        size: one of `SIZES`.
        trees: of benchmarks/trees/h200.xz.
        choices: imitated.
        steps: of PPO, a multiple of 128.
        rank: of the adapter.
    """
    on_gpu = torch.cuda.is_available()
    where = torch.device("cuda" if on_gpu else "cpu")
    stored = list(stored_tasks([t for _, t in zip(range(trees), read_trees(TREES), strict=False)]))
    pairs = list(imitation_pairs(stored, 2, 16))[:choices]
    examples = [Example.of(seen, choice) for seen, choice in pairs]
    texts = [part for e in examples for part in (e.text.state, *e.text.actions)]
    with tempfile.TemporaryDirectory() as folder:
        random_model(size, Path(folder), texts)
        model = from_hub(folder, dtype="bfloat16", length=1024)
    torch.manual_seed(0)
    add_lora(model, rank, 2 * rank)
    model.scorer.to(where)
    figures: dict[str, Any] = {"size": size, "environment": asdict(environment(target_device()))}
    sizes = [(p.numel(), p.requires_grad) for p in model.scorer.parameters()]
    figures |= {"parameters": sum(n for n, _ in sizes), "trained": sum(n for n, wanted in sizes if wanted)}
    figures |= {"dtype": "bfloat16 weights, float32 adapter and value head", "rank": rank}

    def timed(name: str, count: int, work: Any) -> None:
        """Figures of `work`, which does `count` things, after it was done once before."""
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        work()
        if on_gpu:
            torch.cuda.synchronize()
            figures[f"{name}: peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        figures[f"{name}: a second"] = count / (time.monotonic() - began)

    seen = [s for s, _ in pairs[:24]]
    planner = LanguageModelPlanner(model)
    planner.look(seen[0])
    timed("decisions, one by one", len(seen), lambda: [planner.look(s) for s in seen])
    settings = Imitation(epochs=1, batch=8, rate=1e-4)
    imitate(model, examples[:8], settings)
    timed("imitated choices", len(examples), lambda: imitate(model, examples, settings))
    tasks, offer = [s.task for s in stored], Offer.of(stored)
    ppo = Ppo(steps=16, environments=4, rollout=4, batch=8, epochs=1, rate=1e-4)
    train(model, tasks, ppo, offer=offer)
    longer = replace(ppo, steps=steps, rollout=32, epochs=2)
    timed("PPO steps (8 rows a batch, 2 epochs)", longer.steps, lambda: train(model, tasks, longer, offer=offer))
    out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


__all__ = ["SIZES", "large"]
