"""Replies drawn from a model, with the log-probability that each token had where it was drawn.

Deals in conversations, tokens and one model that is trained meanwhile. The cache has a fixed size, so that
`transformers` compiles the step of one token and replays it as a CUDA graph on a GPU. Knows nothing about what a reply
is worth.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qimeng.coder.llm.chat import Message
from qimeng.finetune.conversations import Row, prompt_ids

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
    """Draws replies in batches of one size.

    Args:
        model: a causal language model, with or without an adapter; its weights may change between two calls.
        tokenizer: its tokenizer.
        temperature: of sampling; nothing else changes the distribution. 0 takes the likeliest tokens, and gives their
            log-probabilities at a temperature of 1.
        max_tokens: longest reply.
        length: longest prompt and reply together; also the size of the cache.
        batch: replies drawn together.
        mixed: whether a GPU computes in bfloat16 whatever the weights are; else in the weights' own dtype.
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
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.max_tokens, self.length, self.batch = max_tokens, length, batch
        self.mixed = mixed
        self._cache: Any = None

    def sample(self, conversations: Sequence[Sequence[Message]], seed: int) -> list[Sampled]:
        """One reply to each conversation; an empty one, cut off, where the prompt leaves no room.

        Args:
            conversations: each up to where the model's turn begins.
            seed: the same conversations, weights and seed give the same replies.
        """
        prompts = [prompt_ids(self.tokenizer, messages) for messages in conversations]
        found = {n: _cut(p) for n, p in enumerate(prompts) if len(p) > self.length - LEAST_ROOM}
        left = sorted((n for n in range(len(prompts)) if n not in found), key=lambda n: len(prompts[n]))
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        was = self.model.training
        self.model.eval()
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            for first in range(0, len(left), self.batch):
                some = left[first : first + self.batch]
                found |= zip(some, self._drawn([prompts[n] for n in some]), strict=True)
        self.model.train(was)
        return [found[n] for n in range(len(prompts))]

    def _drawn(self, prompts: Sequence[tuple[int, ...]]) -> list[Sampled]:
        """Replies to one batch, filled up with copies of its last prompt, as a compiled step has one size."""
        from transformers import LogitsProcessorList

        device, longest = self.model.device, max(map(len, prompts))
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        full = [*prompts, *([prompts[-1]] * (self.batch - len(prompts)))]
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in full], device=device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in full], device=device)
        recorder = _Recorder(self.temperature or 1.0)
        chance: dict[str, Any] = {"do_sample": False}
        if self.temperature:
            chance = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self.mixed and device.type == "cuda"):
            out = self.model.generate(
                input_ids=ids,
                attention_mask=seen,
                max_new_tokens=min(self.max_tokens, self.length - longest),
                eos_token_id=end,
                pad_token_id=pad,
                logits_processor=LogitsProcessorList([recorder]),
                **self._held(),
                **chance,
            )
        scores = recorder.of(out, longest).cpu()
        replies = out[:, longest:].cpu().tolist()
        return [self._sampled(p, replies[n], scores[n]) for n, p in enumerate(prompts)]

    def _held(self) -> dict[str, Any]:
        """The cache, empty, as `generate` takes it: one for all calls, so that a recorded CUDA graph finds it."""
        from transformers import StaticCache

        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if self._cache is None:
            self._cache = StaticCache(config=base.config, max_cache_len=self.length)
        else:
            self._cache.reset()
        named = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
        return {named: self._cache}

    def _sampled(self, prompt: tuple[int, ...], reply: list[int], scores: torch.Tensor) -> Sampled:
        end = self.tokenizer.eos_token_id
        finished = end in reply
        said = reply[: reply.index(end) + 1] if finished else reply
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return Sampled(Row((*prompt, *said), len(prompt)), scores[: len(said)].clone(), text, finished)


class _Recorder:
    """Looks at the logits of each step, and at the token that the next step shows was drawn from them.

    It comes before the temperature is put on, so it does that itself. Only one step's distribution is held.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self._last: torch.Tensor | None = None
        self._found: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are."""
        if self._last is not None:
            self._found.append(self._last.gather(1, input_ids[:, -1:]))
        self._last = (scores.float() / self.temperature).log_softmax(-1)
        return scores

    def of(self, out: torch.Tensor, head: int) -> torch.Tensor:
        """Log-probabilities of the tokens of `out` (batch x length) after the first `head`."""
        if self._last is not None and len(self._found) < out.shape[1] - head:
            self._found.append(self._last.gather(1, out[:, -1:]))
        return torch.cat(self._found[: out.shape[1] - head], 1)


def _cut(prompt: tuple[int, ...]) -> Sampled:
    return Sampled(Row(prompt, len(prompt)), torch.zeros(0), "", False)


__all__ = ["Sampled", "Sampler"]
