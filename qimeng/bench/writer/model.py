"""The writer: a small Llama with a tokenizer of its own, trained within a time limit, saved as any model is.

Deals in tokens, batches and seconds. What it saves is a folder that `qimeng.coder.llm.local_chat.LocalChat` reads.
Knows nothing about what the texts mean.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qimeng.bench.writer.examples import Example
from qimeng.coder.llm.chat import Chat, Message, Reply
from qimeng.coder.llm.local_chat import LocalChat
from qimeng.planner.lm.mini import END, MiniSize, make_mini, train_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""How a conversation is one text."""

WORDS = r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z_0-9]+|\s+"
"""What no token spans two of: each digit is a token, so that any number can be copied."""

SIZES = {
    "toy": MiniSize(hidden=128, layers=3, heads=4, kv_heads=2, inner=352, positions=4096),
    "small": MiniSize(hidden=512, layers=9, heads=8, kv_heads=4, inner=1408, positions=6144),
}
"""About 1 and 30 million parameters."""


@dataclass(frozen=True)
class Training:
    """How a writer is trained.

    Attributes:
        seconds: wall-clock limit.
        steps: most updates.
        tokens: tokens of a batch, padding included.
        rate: highest learning rate; it rises over a twentieth of the time and falls to a tenth along a cosine.
        prompt_weight: weight of a prompt's token in the loss; an answer's has 1.
        seed: of weights and order.
    """

    seconds: float = 1080.0
    steps: int = 1_000_000
    tokens: int = 65_536
    rate: float = 1e-3
    prompt_weight: float = 0.1
    seed: int = 0


def new_writer(examples: Sequence[Example], size: str, folder: Path, seed: int = 0, vocabulary: int = 4096) -> None:
    """Save an untrained writer in `folder`, its tokenizer learnt from the texts of `examples`."""
    rng = random.Random(seed)
    some = rng.sample(list(examples), min(len(examples), 4000))
    tokenizer = train_tokenizer((t for e in some for t in (*e.prompt, e.answer)), vocabulary, WORDS)
    tokenizer.chat_template = TEMPLATE
    model = make_mini(len(tokenizer), SIZES[size], seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def train(
    source: Path,
    target: Path,
    examples: Sequence[Example],
    how: Training,
    device: str = "cpu",
    on_row: Callable[[dict[str, float]], None] = lambda row: None,
) -> dict[str, float]:
    """Train the writer in `source` and save it in `target`; the last row of figures.

    Args:
        source: folder of a writer.
        target: folder of the trained one.
        examples: what it learns.
        how: for how long, and how.
        device: where.
        on_row: told loss and speed every 50 updates.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.to(device).train()
    rows = [row for row in encoded(tokenizer, examples) if len(row[0]) <= model.config.max_position_embeddings]
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.rate, betas=(0.9, 0.95), weight_decay=0.1)
    began, step, tokens, row = time.monotonic(), 0, 0, {"examples": float(len(rows))}
    for ids, weights in _forever(rows, how):
        share = max((time.monotonic() - began) / how.seconds, step / how.steps)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = how.rate * schedule(share)
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=device.startswith("cuda")):
            logits = model(input_ids=ids.to(device), attention_mask=(weights >= 0).to(device)).logits
        loss = weighted_loss(logits, ids.to(device), weights.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        if step % 50 == 0 or step == how.steps:
            seconds = time.monotonic() - began
            row |= {"step": step, "loss": loss.item(), "seconds": seconds, "tokens_per_s": tokens / seconds}
            on_row(row)
    tokenizer.save_pretrained(target)
    model.to(torch.bfloat16 if device.startswith("cuda") else torch.float32).save_pretrained(target)
    return row


def schedule(share: float) -> float:
    """The learning rate over its highest, `share` of the way through.

    >>> [round(schedule(s), 2) for s in (0.0, 0.025, 0.05, 1.0)]
    [0.0, 0.5, 1.0, 0.1]
    """
    if share < 0.05:
        return share / 0.05
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (share - 0.05) / 0.95))


def encoded(tokenizer: Any, examples: Iterable[Example]) -> Iterator[tuple[list[int], int]]:
    """Tokens of each example, and how many of them are the prompt's."""
    for e in examples:
        said = [{"role": m.role, "content": m.text} for m in e.messages]
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tail = tokenizer(f"```python\n{e.answer}```{END}", add_special_tokens=False)["input_ids"]
        yield [*head, *tail], len(head)


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token.

    Args:
        logits: batch x length x vocabulary.
        ids: batch x length.
        weights: of each token in the mean, batch x length; padding has less than 0.
    """
    count = weights[:, 1:].clamp(min=0).float()
    each = torch.nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
    return (each * count).sum() / count.sum()


def _forever(rows: Sequence[tuple[list[int], int]], how: Training) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of rows of like length: ids and weights, padded on the right."""
    rng = random.Random(how.seed)
    if not rows:
        raise ValueError("there is nothing to learn from: no example fits the model")
    while True:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + rng.uniform(0, 64))
        batches: list[list[int]] = [[]]
        for i in order:
            if batches[-1] and len(rows[i][0]) * (len(batches[-1]) + 1) > how.tokens:
                batches.append([])
            batches[-1].append(i)
        rng.shuffle(batches)
        for batch in batches:
            length = max(len(rows[i][0]) for i in batch)
            ids = torch.zeros(len(batch), length, dtype=torch.long)
            weights = torch.full((len(batch), length), -1.0)
            for place, i in enumerate(batch):
                tokens, head = rows[i]
                ids[place, : len(tokens)] = torch.tensor(tokens)
                weights[place, :head], weights[place, head : len(tokens)] = how.prompt_weight, 1.0
            yield ids, weights


class WriterChat(Chat):
    """A writer as a chat: first the likeliest answer, then draws.

    It has learnt no conversations: asked to repair, it answers the first question anew, by chance.

    Args:
        folder: of the writer.
        max_tokens: longest answer.
        batch: answers that are written at the same time.
        device: where it runs.
        temperature: of the draws.
    """

    def __init__(
        self, folder: Path, max_tokens: int = 3000, batch: int = 64, device: str | None = None, temperature: float = 0.7
    ):
        options: dict[str, Any] = {"max_tokens": max_tokens, "batch": batch, "device": device}
        self._first = LocalChat(folder, temperature=0.0, **options)
        self._again = LocalChat(folder, temperature=temperature, **options)
        self._again._loaded = self._first._load()
        self.name, self.settings = f"writer:{folder.name}", self._again.settings
        self._ready: dict[tuple[Message, ...], list[Reply]] = {}
        self._asked: dict[tuple[Message, ...], int] = {}

    def prepare(self, conversations: Sequence[Sequence[Message]], draws: int = 0) -> None:
        """Answer first questions together, which is many times faster than one by one.

        Args:
            conversations: that will be asked.
            draws: how many more answers to each may be asked for.
        """
        new = sorted({tuple(c[:2]) for c in conversations} - set(self._ready), key=lambda c: len(c[1].text))
        first = self._first.ask_many(new)
        drawn = self._again.ask_many([c for c in new for _ in range(draws)])
        for number, question in enumerate(new):
            self._ready[question] = [first[number], *drawn[number * draws : (number + 1) * draws]]

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterator[Reply]:
        """`count` answers, other ones each time."""
        question = tuple(messages[:2])
        ready = self._ready.get(question, [])
        for _ in range(count):
            number = self._asked.get(question, 0)
            self._asked[question] = number + 1
            if number < len(ready):
                yield ready[number]
            elif number == 0:
                yield next(iter(self._first.ask(question, 1, limit_s)))
            else:
                yield list(self._again.ask(question, number, limit_s))[-1]


__all__ = ["SIZES", "Training", "WriterChat", "new_writer", "train"]
