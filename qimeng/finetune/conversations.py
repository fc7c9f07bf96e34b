"""Conversations as tokens, packed into rows of one length, and how likely a model finds the replies in them.

Deals in messages, tokens and log-probabilities. Fine-tuning and reinforcement learning both ask `log_probabilities`.
Knows nothing about losses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qimeng.coder.llm.chat import Message
from qimeng.finetune.weights import FinetuneError


@dataclass(frozen=True)
class Row:
    """One conversation.

    Attributes:
        ids: tokens of the prompt and of the reply.
        head: how many of them are the prompt's.
    """

    ids: tuple[int, ...]
    head: int

    @property
    def reply(self) -> tuple[int, ...]:
        """Tokens of the reply, which alone are learnt."""
        return self.ids[self.head :]


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """A conversation as tokens, up to where the model's turn begins."""
    said = [{"role": m.role, "content": m.text} for m in messages]
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encoded(tokenizer: Any, messages: Sequence[Message]) -> Row:
    """A conversation whose last turn is the reply that is learnt, with the token that ends it.

    Raises:
        FinetuneError: the last turn is not the model's.
    """
    *before, last = messages
    if last.role != "assistant" or not before:
        raise FinetuneError("a conversation to learn from ends with a turn of the role assistant, after another turn")
    head = prompt_ids(tokenizer, before)
    tail = tokenizer(last.text, add_special_tokens=False)["input_ids"]
    return Row((*head, *tail, tokenizer.eos_token_id), len(head))


def read_conversations(path: Path) -> Iterator[tuple[Message, ...]]:
    """The conversations of a file: JSON lines with ``messages``, each with ``role`` and ``content``.

    Raises:
        FinetuneError: a line holds something else; the message has its number.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield tuple(Message(m["role"], m["content"]) for m in json.loads(line)["messages"])
                except (ValueError, KeyError, TypeError):
                    text = 'a line is JSON as {"messages": [{"role": "user", "content": "…"}, …]}'
                    raise FinetuneError(f"{path}, line {number} is no conversation: {text}") from None
    except OSError as error:
        raise FinetuneError(f"{path} cannot be read: {error.strerror}") from None


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of rows that share one of `room` tokens, the longest first into the first that has place left.

    Rows longer than `room` are in none.

    >>> packed([5, 9, 4, 3, 12], 10)
    [[1], [0, 2], [3]]
    """
    found: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if lengths[number] > room:
            continue
        place = next((n for n, free in enumerate(left) if free >= lengths[number]), len(found))
        if place == len(found):
            found.append([])
            left.append(room)
        found[place].append(number)
        left[place] -= lengths[number]
    return found


@dataclass(frozen=True)
class Batch:
    """Several packs of rows.

    Attributes:
        ids: tokens (packs x length).
        positions: place of each token in its own row (packs x length); a row is seen by itself alone.
        places: places before each reply's token, counted through `ids` (n).
        wanted: these tokens (n).
        owner: number of the row that each is of (n).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    wanted: torch.Tensor
    owner: torch.Tensor

    def to(self, device: str | torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(t.to(device) for t in (self.ids, self.positions, self.places, self.wanted, self.owner)))


def batch_of(rows: Sequence[Row], packs: Sequence[Sequence[int]]) -> Batch:
    """The batch of `packs` of numbers of `rows`, as long as the longest pack."""
    length = max(sum(len(rows[n].ids) for n in pack) for pack in packs)
    ids = torch.zeros(len(packs), length, dtype=torch.long)
    positions = torch.zeros(len(packs), length, dtype=torch.long)
    places: list[int] = []
    wanted: list[int] = []
    owner: list[int] = []
    for number, pack in enumerate(packs):
        at = 0
        for n in pack:
            row = rows[n]
            ids[number, at : at + len(row.ids)] = torch.tensor(row.ids)
            positions[number, at : at + len(row.ids)] = torch.arange(len(row.ids))
            begin = number * length + at
            places += range(begin + row.head - 1, begin + len(row.ids) - 1)
            wanted += row.reply
            owner += [n] * len(row.reply)
            at += len(row.ids)
    return Batch(ids, positions, torch.tensor(places), torch.tensor(wanted), torch.tensor(owner))


def batches(rows: Sequence[Row], room: int, tokens: int) -> list[list[list[int]]]:
    """Packs of `room` tokens, as many together as `tokens` allow, at least one."""
    packs = packed([len(row.ids) for row in rows], room)
    each = max(1, tokens // room)
    return [packs[first : first + each] for first in range(0, len(packs), each)]


def reply_logits(model: Any, batch: Batch, mixed: bool = True) -> torch.Tensor:
    """Logits of the tokens after the batch's places (n x vocabulary, float32).

    Args:
        model: a causal language model of `transformers`, with or without an adapter; on the batch's device.
        batch: what it reads.
        mixed: whether a GPU computes in bfloat16 whatever the weights are; else in the weights' own dtype.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind, head = batch.ids.device.type, base.get_output_embeddings()
    with torch.autocast(kind, torch.bfloat16, enabled=mixed and kind == "cuda"):
        read = base.base_model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
        hidden = read.last_hidden_state.flatten(0, 1)[batch.places]
        logits: torch.Tensor = head(hidden.to(head.weight.dtype))
    return logits.float()


def log_probabilities(model: Any, batch: Batch, temperature: float = 1.0, mixed: bool = True) -> torch.Tensor:
    """Log-probability of each wanted token (n, float32).

    Args:
        model: as for `reply_logits`.
        batch: what it reads.
        temperature: that tokens are sampled with; logits are divided by it.
        mixed: as for `reply_logits`.
    """
    logits = reply_logits(model, batch, mixed) / temperature
    return -torch.nn.functional.cross_entropy(logits, batch.wanted, reduction="none")


def rows_that_fit(rows: Iterable[Row], room: int) -> list[Row]:
    """Rows of at most `room` tokens, with a reply."""
    return [row for row in rows if len(row.ids) <= room and row.head < len(row.ids)]


__all__ = [
    "Batch",
    "Row",
    "batch_of",
    "batches",
    "encoded",
    "log_probabilities",
    "packed",
    "prompt_ids",
    "read_conversations",
    "reply_logits",
    "rows_that_fit",
]
