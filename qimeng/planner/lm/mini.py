"""The mini model: a small Llama and a tokenizer of its own, both made here from nothing.

Deals in sizes. Knows nothing about states or actions beyond the texts it is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qimeng.planner.lm.ranges import POSITIVE

END = "<end>"
"""The only special token: it ends an action, and pads."""

WORDS = r" ?[A-Za-z_][A-Za-z_0-9]*| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+"
"""What is looked at apart: words with the numbers in them (``f32``, ``x4096``), numbers, punctuation, white space."""


@dataclass(frozen=True)
class MiniSize:
    """Size of a mini model; the defaults have 2.9 million parameters, 5.8 MB of half-precision weights.

    Attributes:
        hidden: width; a multiple of twice the `heads`.
        layers: number of blocks.
        heads: attention heads.
        kv_heads: heads of keys and values; `heads` is a multiple of it.
        inner: width inside the feed-forward part.
        positions: longest row that positions are made for: state and action.
    """

    hidden: int = field(default=224, metadata=POSITIVE)
    layers: int = field(default=5, metadata=POSITIVE)
    heads: int = field(default=7, metadata=POSITIVE)
    kv_heads: int = field(default=1, metadata=POSITIVE)
    inner: int = field(default=576, metadata=POSITIVE)
    positions: int = field(default=1024, metadata=POSITIVE)

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads or self.hidden % (2 * self.heads):
            raise ValueError(
                "the width must be a multiple of twice the heads, and the heads one of the heads of keys and values; "
                f"got {self.hidden}, {self.heads} and {self.kv_heads}"
            )


def train_tokenizer(texts: Iterable[str], size: int = 2048, words: str = WORDS) -> Any:
    """Byte-level byte-pair encoding learnt from `texts`, as a Hugging Face tokenizer.

    A token never spans two words, two numbers or two runs of punctuation (`words`); any text can be encoded. The same
    texts give the same tokenizer.

    Args:
        texts: what is to be read: states and actions as `qimeng.planner.lm.reading` prints them.
        size: number of token ids, at most; at least 257.
        words: a regular expression of what no token spans two of.

    Raises:
        ValueError: `size` is too small to hold every byte.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if size < 257:
        raise ValueError(f"a byte-level tokenizer needs at least 257 token ids, got {size}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def make_mini(vocabulary: int, size: MiniSize | None = None, seed: int = 0) -> Any:
    """A randomly initialised Llama for `vocabulary` token ids; the same seed gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    s = size or MiniSize()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=s.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


__all__ = ["END", "MiniSize", "make_mini", "train_tokenizer"]
