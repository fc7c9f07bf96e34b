"""The writer: a small Llama with a tokenizer of its own, saved as any model is.

Deals in texts and tokens. A writer is a folder that `qimeng.coder.llm.local_chat.LocalChat` reads. Knows nothing about
what the texts mean or how a writer is trained and asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.writer.examples import Example
from qimeng.finetune.weights import CHAT_TEMPLATE, WORDS
from qimeng.planner.lm.mini import END, MiniSize, make_mini, train_tokenizer

TOGETHER = 1000
"""Examples that are made tokens of together: what a tokenizer keeps meanwhile does not grow with all of them."""

Row = tuple[NDArray[np.uint16], int]
"""Tokens of an example, and how many of them are the prompt's."""

SIZES = {
    "toy": MiniSize(hidden=128, layers=3, heads=4, kv_heads=2, inner=352, positions=4096),
    "small": MiniSize(hidden=512, layers=9, heads=8, kv_heads=4, inner=1408, positions=8192),
}
"""About 1 and 30 million parameters."""


def new_writer(examples: Sequence[Example], size: str, folder: Path, seed: int = 0, vocabulary: int = 4096) -> None:
    """Save an untrained writer in `folder`, its tokenizer learnt from the texts of `examples` if there is none yet."""
    if not (folder / "tokenizer.json").exists():
        rng = random.Random(seed)
        some = rng.sample(list(examples), min(len(examples), 4000))
        tokenizer = train_tokenizer((t for e in some for t in (*e.prompt, e.answer)), vocabulary, WORDS)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
    make_mini(len(_tokenizer(folder)), SIZES[size], seed).save_pretrained(folder)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encoded(folder: Path, examples: Iterable[Example]) -> list[Row]:
    """Tokens of each example for the writer in `folder`, and how many of them are the prompt's."""
    tokenizer, some = _tokenizer(folder), iter(examples)
    rows: list[Row] = []
    while part := list(islice(some, TOGETHER)):
        rows += _encoded(tokenizer, part)
    return rows


def _encoded(tokenizer: Any, examples: Sequence[Example]) -> list[Row]:
    said = [[{"role": m.role, "content": m.text} for m in e.messages] for e in examples]
    prompts = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    heads = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    tails = tokenizer([f"{e.reply}{END}" for e in examples], add_special_tokens=False)["input_ids"]
    return [(np.array([*head, *tail], np.uint16), len(head)) for head, tail in zip(heads, tails, strict=True)]


def kept(file: Path, folder: Path, examples: Iterable[Example]) -> list[Row]:
    """What `encoded` gives, read from `file` where it was kept before, else kept there: it takes minutes."""
    if not file.exists():
        rows = encoded(folder, examples)
        ids = np.concatenate([row for row, _ in rows]) if rows else np.zeros(0, np.uint16)
        part = file.with_suffix(".part")
        with open(part, "wb") as to:
            np.savez_compressed(to, ids=ids, lengths=[len(row) for row, _ in rows], heads=[head for _, head in rows])
        part.replace(file)
        return rows
    with np.load(file) as found:
        ids, lengths, heads = found["ids"], found["lengths"], found["heads"]
    return list(zip(np.split(ids, np.cumsum(lengths)[:-1]), map(int, heads), strict=True)) if len(lengths) else []


__all__ = ["SIZES", "encoded", "kept", "new_writer"]
