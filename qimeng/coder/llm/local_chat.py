"""A causal language model of `transformers` in this process, with its chat template and, if there is one, an adapter.

Deals in conversations, batches and tokens. Knows nothing about what is asked. Weights are read at the first request.
Code that comes with weights is never run. On a GPU it may run beside the checks of other runs. Between two tokens it
waits for runs that measure there, because its kernels would slow them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.device_lock import DeviceLock, lock_path

if TYPE_CHECKING:
    import torch

LEAST_ROOM = 16
"""Tokens that must be left for the answer."""


class LocalChat(Chat):
    """A model in a folder, or of the Hugging Face hub.

    Equal questions have equal answers: the seed of sampling comes from the conversations.

    Args:
        model: folder or name; ``"BASE+ADAPTER"`` puts the `peft` adapter in the folder (or of the name) ADAPTER on it.
        temperature: of sampling; 0 always takes the likeliest token.
        max_tokens: longest answer.
        batch: answers that are written at the same time.
        device: where it runs; the GPU where there is one, by default.

    Raises:
        ChatError: (``"setup"``) a folder is missing.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        temperature: float = 0.7,
        max_tokens: int = 4096,
        batch: int = 8,
        device: str | None = None,
    ):
        text = str(model)
        self.base, _, self.adapter = (text, "", "") if Path(text).is_dir() else text.partition("+")
        for part in filter(None, (self.base, self.adapter)):
            if not Path(part).is_dir() and (part.startswith((".", "/", "~")) or part.count("/") > 1):
                raise ChatError(f"there is no folder {part} with a language model", "setup")
        self.temperature, self.max_tokens, self.batch, self._device = temperature, max_tokens, batch, device
        self.name = f"transformers:{text}"
        stamps = [_stamp(Path(part)) for part in (self.base, self.adapter) if part]
        self.settings = json.dumps({"temperature": temperature, "max_tokens": max_tokens, "files": stamps})
        self._loaded: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"LocalChat({self.name.partition(':')[2]!r})"

    def __getstate__(self) -> dict[str, Any]:
        """All but the weights, which a copy reads again."""
        return {**self.__dict__, "_loaded": None}

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterator[Reply]:
        """`count` answers, written together in batches.

        Raises:
            ChatError: `limit_s` is over, the conversation is too long for the model, or the model cannot be used.
        """
        began, prompt = time.monotonic(), self._prompt(messages)
        for first in range(0, count, self.batch):
            number, left = min(self.batch, count - first), limit_s - (time.monotonic() - began)
            if left <= 0:
                raise ChatError(f"no answer within {limit_s:g} s", "timeout", True)
            yield from self._write([prompt] * number, seed_of(messages, first), left)

    def ask_many(self, conversations: Sequence[Sequence[Message]], number: int = 0) -> list[Reply]:
        """One answer to each conversation, written together in batches.

        Args:
            conversations: what is asked.
            number: with a temperature, other numbers give other answers.

        Raises:
            ChatError: a conversation is too long for the model, or the model cannot be used.
        """
        replies: list[Reply] = []
        for first in range(0, len(conversations), self.batch):
            some = conversations[first : first + self.batch]
            seed = seed_of(some[0], first + number * len(conversations))
            replies += self._write([self._prompt(m) for m in some], seed)
        return replies

    def fits(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation and an answer are within the model's length."""
        try:
            return bool(self._prompt(messages))
        except ChatError as error:
            if error.kind != "too-long":
                raise
            return False

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation as tokens."""
        from jinja2 import TemplateError

        tokenizer, model = self._load()
        if tokenizer.chat_template is None:
            text = "".join(f"{m.role}: {m.text}\n\n" for m in messages) + "assistant: "
            ids = tokenizer(text)["input_ids"]
        else:
            said = [{"role": m.role, "content": m.text} for m in messages]
            try:
                text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            except TemplateError:  # many templates know no system's turn
                head, *rest = said
                if head["role"] != "system" or not rest:
                    raise ChatError("the model's chat template does not take this conversation", "setup") from None
                rest[0] = {**rest[0], "content": f"{head['content']}\n\n{rest[0]['content']}"}
                text = tokenizer.apply_chat_template(rest, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and len(ids) > most - LEAST_ROOM:
            raise ChatError(f"the prompt has {len(ids)} tokens, the model takes {most - LEAST_ROOM}", "too-long")
        return [int(i) for i in ids]

    def _write(self, prompts: Sequence[list[int]], seed: int, limit_s: float = math.inf) -> list[Reply]:
        """The answers to `prompts`, as tokens, in one batch; cut off where they take longer."""
        import torch

        tokenizer, model = self._load()
        began, longest = time.monotonic(), max(map(len, prompts))
        most = getattr(model.config, "max_position_embeddings", None)
        room = self.max_tokens if most is None else min(self.max_tokens, most - longest)
        ends = _ends(model, tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=model.device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        sampling: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            sampling["temperature"] = self.temperature
        if limit_s < math.inf:
            sampling["max_time"] = limit_s
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with _beside(model.device) as between, torch.no_grad(), torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed)
                out = model.generate(
                    input_ids=ids,
                    attention_mask=seen,
                    max_new_tokens=room,
                    pad_token_id=pad,
                    stopping_criteria=between,
                    **sampling,
                ).cpu()
        except torch.OutOfMemoryError:
            text = f"no memory is left for {len(prompts)} answers to {longest} tokens; take a smaller batch or model"
            raise ChatError(text, "setup") from None
        seconds = (time.monotonic() - began) / len(prompts)
        return [
            _reply(tokenizer, p, row[longest:].tolist(), ends, seconds) for p, row in zip(prompts, out, strict=True)
        ]

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
            try:
                tokenizer = AutoTokenizer.from_pretrained(self.base)
                model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype="auto")
                if self.adapter:
                    from peft import PeftModel

                    model = PeftModel.from_pretrained(model, self.adapter)
            except (OSError, ValueError, ImportError) as error:
                reason = " ".join(str(error).split())[:300]
                raise ChatError(f"{self.name} cannot be loaded: {reason}", "setup") from None
            self._loaded = tokenizer, model.to(device).eval()
        return self._loaded


@contextmanager
def _beside(device: torch.device) -> Iterator[list[Callable[..., torch.Tensor]]]:
    """Generate on `device` beside running checks; yields a function to call after every token."""
    import torch

    path = _lock_path(device)
    if path is None:
        yield []
        return
    with closing(DeviceLock(path)) as lock, lock.beside():

        def step_aside(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            lock.step_aside()
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)  # nothing ends by it

        yield [step_aside]


def _lock_path(device: torch.device) -> str | None:
    """The lock file of what is shared with those who measure: of a GPU."""
    return lock_path(device) if device.type == "cuda" else None


def seed_of(messages: Sequence[Message], number: int) -> int:
    """A seed that says which answers to `messages` these are."""
    text = json.dumps([[m.role, m.text] for m in messages] + [[str(number)]])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    ids = ends if isinstance(ends, list) else [ends]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


def _reply(tokenizer: Any, prompt: list[int], ids: list[int], ends: frozenset[int], seconds: float) -> Reply:
    end = next((n for n, i in enumerate(ids) if i in ends), None)
    said = ids if end is None else ids[:end]
    text = tokenizer.decode(said, skip_special_tokens=True)
    return Reply(text, len(prompt), len(said), seconds, "length" if end is None else "stop")


def _stamp(folder: Path) -> str:
    """A stamp that changes with the weights in a folder; empty for a name of the hub."""
    if not folder.is_dir():
        return ""
    found = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())
    return hashlib.blake2b(repr(found).encode(), digest_size=6).hexdigest()


__all__ = ["LocalChat", "seed_of"]
