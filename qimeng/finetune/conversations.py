"""Conversations as tokens, batches of like length, and how likely a model finds the replies in them.

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
from torch.nn.attention import sdpa_kernel

from qimeng.coder.llm.chat import Message
from qimeng.finetune.kernels import ANY_LENGTH, exact_logits
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


def prompts_ids(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
    """Each conversation as tokens, up to where the model's turn begins."""
    said = [[{"role": m.role, "content": m.text} for m in messages] for messages in conversations]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in said]
    return _tokens(tokenizer, texts)


def encoded(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> list[Row]:
    """Conversations whose last turn is the reply that is learnt, with the token that ends it.

    Raises:
        FinetuneError: a last turn is not the model's.
    """
    for *before, last in conversations:
        if last.role != "assistant" or not before:
            raise FinetuneError(
                "a conversation to learn from ends with a turn of the role assistant, after another turn"
            )
    heads = prompts_ids(tokenizer, [some[:-1] for some in conversations])
    tails = _tokens(tokenizer, [some[-1].text for some in conversations])
    return [Row((*head, *tail, tokenizer.eos_token_id), len(head)) for head, tail in zip(heads, tails, strict=True)]


def _tokens(tokenizer: Any, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """All at once: a tokenizer uses every core."""
    return [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []


def read_conversations(path: Path) -> Iterator[tuple[Message, ...]]:
    """The conversations of a file: JSON lines with ``messages``, each with ``role`` and ``content``, which are texts.

    Raises:
        FinetuneError: a line holds something else, and the message has its number; or there is none.
    """
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield tuple(_message(m) for m in json.loads(line)["messages"])
                except (ValueError, KeyError, TypeError):
                    text = 'a line is JSON as {"messages": [{"role": "user", "content": "…"}, …]}'
                    raise FinetuneError(f"{path}, line {number} is no conversation: {text}") from None
    except OSError as error:
        raise FinetuneError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FinetuneError(f"{path} is no text in UTF-8: {error.reason} after line {number}") from None
    if not number:
        raise FinetuneError(f"{path} is empty: write a conversation a line")


def _message(turn: Any) -> Message:
    if not (isinstance(turn["role"], str) and isinstance(turn["content"], str)):
        raise TypeError
    return Message(turn["role"], turn["content"])


WINDOW = 32
"""Batches' worth of rows among which those of like length are put together."""


@dataclass(frozen=True)
class Batch:
    """Several rows, side by side.

    Rows begin at the same place and are filled up at their ends, where a causal model does not look: it needs no mask,
    and the fastest kernels of attention take it.

    Attributes:
        ids: tokens (rows x length).
        places: places before each reply's token, counted through `ids` (n).
        wanted: these tokens (n).
        owner: number of the row that each is of (n).
    """

    ids: torch.Tensor
    places: torch.Tensor
    wanted: torch.Tensor
    owner: torch.Tensor

    def to(self, device: str | torch.device) -> Batch:
        """The same on a device."""
        parts = [self.ids, self.places, self.wanted, self.owner]
        if torch.device(device).type == "cuda":  # what is not pinned is copied once the GPU has nothing else to do
            parts = [part.pin_memory() for part in parts]
        return Batch(*(part.to(device, non_blocking=True) for part in parts))


def batch_of(rows: Sequence[Row], numbers: Sequence[int]) -> Batch:
    """The batch of `rows` with these numbers, as long as the longest of them."""
    length = max(len(rows[n].ids) for n in numbers)
    ids = torch.zeros(len(numbers), length, dtype=torch.long)
    places: list[torch.Tensor] = []
    for place, n in enumerate(numbers):
        row = rows[n]
        ids[place, : len(row.ids)] = torch.tensor(row.ids)
        places.append(torch.arange(row.head - 1, len(row.ids) - 1) + place * length)
    before = torch.cat(places)
    owner = torch.tensor(numbers).repeat_interleave(torch.tensor([len(part) for part in places]))
    return Batch(ids, before, ids.flatten()[before + 1], owner)


def batches(rows: Sequence[Row], tokens: int) -> list[list[int]]:
    """Numbers of rows of like length that are read together, padding included at most `tokens`, at least one.

    Rows that are near one another stay so, since a training draws their order: like ones are looked for among a few
    batches' worth.

    >>> batches([Row((0,) * n, 1) for n in (5, 2, 6, 3, 9)], 12)
    [[1, 3], [0, 2], [4]]
    """
    found: list[list[int]] = []
    window: list[int] = []
    held = 0
    for number, row in enumerate(rows):
        window.append(number)
        held += len(row.ids)
        if held >= WINDOW * tokens or number == len(rows) - 1:
            found += _alike(rows, window, tokens)
            window, held = [], 0
    return found


def _alike(rows: Sequence[Row], numbers: Sequence[int], tokens: int) -> list[list[int]]:
    found: list[list[int]] = []
    for number in sorted(numbers, key=lambda n: len(rows[n].ids)):
        if found and (len(found[-1]) + 1) * len(rows[number].ids) <= tokens:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def reply_logits(model: Any, batch: Batch, mixed: bool = True, exact: bool = False) -> torch.Tensor:
    """Logits of the tokens after the batch's places (n x vocabulary, float32).

    Args:
        model: a causal language model of `transformers`, with or without an adapter; on the batch's device.
        batch: what it reads.
        mixed: whether a GPU computes in bfloat16 whatever the weights are; else in the weights' own dtype.
        exact: whether the last layer computes in float32 all the same (`qimeng.finetune.kernels`).
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind, head = batch.ids.device.type, base.get_output_embeddings()
    with torch.autocast(kind, torch.bfloat16, enabled=mixed and kind == "cuda"), sdpa_kernel(ANY_LENGTH):
        read = base.base_model(input_ids=batch.ids, use_cache=False)
        hidden = read.last_hidden_state.flatten(0, 1)[batch.places]
        logits: torch.Tensor = exact_logits(head, hidden) if exact else head(hidden.to(head.weight.dtype))
    return logits.float()


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose scores are not what its last layer gives, which is all that `reply_logits` asks for.

    Raises:
        FinetuneError: it scales them, caps them, or has no such layer.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, was = base.get_output_embeddings(), model.training
    what = f"models of the kind {base.config.model_type!r}"
    if head is None:
        raise FinetuneError(f"{what} have no last layer that scores tokens: take a causal language model")
    ids = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    read: list[torch.Tensor] = []  # by the same pass: another would round otherwise
    hook = base.base_model.register_forward_hook(lambda module, given, result: read.append(result.last_hidden_state))
    model.eval()
    try:
        whole = base(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
        model.train(was)
    plain = head(read[0].to(head.weight.dtype)).float()
    if not torch.allclose(plain, whole, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise FinetuneError(f"{what} scale or cap the scores of tokens, which training does not follow: take another")


def log_probabilities(
    model: Any, batch: Batch, temperature: float = 1.0, mixed: bool = True, exact: bool = False
) -> torch.Tensor:
    """Log-probability of each wanted token (n, float32).

    Args:
        model: as for `reply_logits`.
        batch: what it reads.
        temperature: that tokens are sampled with; logits are divided by it.
        mixed: as for `reply_logits`.
        exact: as for `reply_logits`.
    """
    logits = reply_logits(model, batch, mixed, exact) / temperature
    return -torch.nn.functional.cross_entropy(logits, batch.wanted, reduction="none")


def rows_that_fit(rows: Iterable[Row], room: int) -> list[Row]:
    """Rows of at most `room` tokens, with a reply."""
    return [row for row in rows if len(row.ids) <= room and row.head < len(row.ids)]


__all__ = [
    "Batch",
    "Row",
    "batch_of",
    "batches",
    "check_head",
    "encoded",
    "log_probabilities",
    "prompts_ids",
    "read_conversations",
    "reply_logits",
    "rows_that_fit",
]
