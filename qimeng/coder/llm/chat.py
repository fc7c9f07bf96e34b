"""A conversation with a language model: messages go in, replies come out, failures have classes.

Deals in text and token counts. Knows nothing about kernels, prompts, servers or weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.errors import CoderError


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
        finish: why it ended: ``"stop"``, or ``"length"`` where it was cut off.
    """

    text: str
    prompt_tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0
    finish: str = "stop"


class ChatError(CoderError):
    """The model gave no usable answer; says nothing about any kernel.

    Attributes:
        kind: ``"rate-limit"``, ``"timeout"``, ``"connection"``, ``"server"``, ``"authentication"``, ``"refusal"``,
            ``"empty"``, ``"cut-off"``, ``"format"``, ``"too-long"`` or ``"budget"``.
        passing: True where asking again later may help.
    """

    def __init__(self, message: str, kind: str, passing: bool = False):
        super().__init__(message)
        self.kind, self.passing = kind, passing


class Chat(ABC):
    """A model that answers."""

    name: str
    """What it is called in the store and in reports: ``"openai:qwen2.5-coder-7b"``; holds no key."""

    @abstractmethod
    def ask(self, messages: Sequence[Message], count: int = 1) -> list[Reply]:
        """`count` independent answers to `messages`; fewer only where some of them failed.

        Raises:
            ChatError: there was no answer at all.
        """


__all__ = ["Chat", "ChatError", "Message", "Reply"]
