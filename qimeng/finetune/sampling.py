"""Replies drawn from a model, with the log-probability that each token had where it was drawn.

Deals in conversations and in one model that is trained meanwhile. Knows nothing about how tokens are drawn
(`qimeng.finetune.decoding`) or what a reply is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qimeng.coder.llm.chat import Message
from qimeng.finetune.conversations import Row, check_head, prompts_ids
from qimeng.finetune.decoding import Decoder

LEAST_ROOM = 16
"""Tokens that a prompt must leave for the reply."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """One reply.

    Attributes:
        row: prompt and reply; the reply's last token ends it, where it ended.
        log_probabilities: of the reply's tokens, at the sampler's temperature (float32, on the CPU).
        text: what was said.
        finished: whether it ended before it was cut off.
    """

    row: Row
    log_probabilities: torch.Tensor
    text: str
    finished: bool


class Sampler:
    """Draws replies, many at once.

    Args:
        model: a causal language model, with or without an adapter; its weights may change between two calls, in place.
        tokenizer: its tokenizer.
        temperature: of sampling; nothing else changes the distribution. 0 takes the likeliest tokens, and gives their
            log-probabilities at a temperature of 1.
        max_tokens: longest reply.
        length: longest prompt and reply together.
        batch: replies drawn together.
        mixed: whether a GPU computes in bfloat16 whatever the weights are; else in the weights' own dtype.

    Raises:
        FinetuneError: replies cannot be drawn from such a model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        length: int = 4096,
        batch: int = 64,
        mixed: bool = True,
    ):
        check_head(model)
        self.model, self.tokenizer, self.max_tokens, self.length = model, tokenizer, max_tokens, length
        self._decoder = Decoder(
            model, tokenizer.eos_token_id, slots=batch, length=length, temperature=temperature, mixed=mixed
        )

    def sample(self, conversations: Sequence[Sequence[Message]], seed: int) -> list[Sampled]:
        """One reply to each conversation; an empty one, cut off, where the prompt leaves no room.

        Args:
            conversations: each up to where the model's turn begins.
            seed: the same conversations, weights and seed give the same replies.
        """
        prompts = prompts_ids(self.tokenizer, conversations)
        found = {n: _cut(p) for n, p in enumerate(prompts) if len(p) > self.length - LEAST_ROOM}
        left = [n for n in range(len(prompts)) if n not in found]
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        was = self.model.training
        self.model.eval()
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            limits = [min(self.max_tokens, self.length - len(prompts[n])) for n in left]
            for n, (said, scores) in zip(left, self._decoder.draw([prompts[n] for n in left], limits), strict=True):
                finished = said[-1] == self.tokenizer.eos_token_id
                text = self.tokenizer.decode(said, skip_special_tokens=True)
                found[n] = Sampled(Row((*prompts[n], *said), len(prompts[n])), scores, text, finished)
        self.model.train(was)
        return [found[n] for n in range(len(prompts))]


def _cut(prompt: tuple[int, ...]) -> Sampled:
    return Sampled(Row(prompt, len(prompt)), torch.zeros(0), "", False)


__all__ = ["Sampled", "Sampler"]
