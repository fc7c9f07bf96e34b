"""A conversation with a language model: messages go in, replies come out, failures have classes.

Deals in text and token counts. Knows nothing about kernels, prompts, servers or weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qimeng.errors import CoderError

KINDS = (
    "rate-limit", "timeout", "connection", "server", "authentication", "refusal", "empty", "cut-off", "format",
    "too-long", "budget", "setup",
)  # fmt: skip
"""Classes of failure: of the server or the connection (the first five), of the answer (refusal to ``format``), a prompt
or answer that is too long, a used-up budget, and a model that cannot be used here."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        text: what was said.
    """

    role: str
    text: str


@dataclass(frozen=True)
class Reply:
    """One answer of a model.

    Attributes:
        text: what it said.
        prompt_tokens: tokens read, as the server or tokenizer counts; 0 where it does not say.
        reply_tokens: tokens written.
        seconds: wall-clock seconds that the answer took.
        finish: why it ended: ``"stop"``, ``"length"`` where it was cut off, or ``"refusal"`` where the model or its
            server declined.
    """

    text: str
    prompt_tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0
    finish: str = "stop"


class ChatError(CoderError):
    """The model gave no usable answer. This is no verdict on any kernel.

    Attributes:
        kind: one of `KINDS`.
        passing: True where asking again later may help.
        failure: ``"model-"`` and the kind; no such class is one of `qimeng.interfaces.LASTING`.
    """

    code = "model"

    def __init__(self, message: str, kind: str, passing: bool = False):
        super().__init__(message)
        self.kind, self.passing = kind, passing
        self.failure = f"model-{kind}"


class Chat(ABC):
    """A model that answers."""

    name: str
    """What it is called in the store and in reports: ``"openai:qwen2.5-coder-7b"``; holds no key."""

    settings: str = ""
    """What its answers depend on besides the messages (temperature, longest answer …), as one line of text."""

    @abstractmethod
    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterable[Reply]:
        """`count` independent answers to `messages`, as they arrive; fewer only where some of them failed.

        Args:
            messages: the conversation.
            count: how many answers.
            limit_s: seconds after which no answer is waited for.

        Raises:
            ChatError: there was no answer at all.
        """


class HasChat:
    """A coder that may have a language model.

    Attributes:
        chat: the model; None where what it hands requests on to has none.
    """

    chat: Chat | None = None


__all__ = ["KINDS", "Chat", "ChatError", "HasChat", "Message", "Reply"]
