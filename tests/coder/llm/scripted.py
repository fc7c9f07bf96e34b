"""A model that answers from a script, and a kernel for it to answer with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from tests.coder.llm.endpoint import fence

KERNEL = "def region({arguments}):\n    # {remark}\n    return (x0,)\n"


class ScriptedChat(Chat):
    """Answers from a script; an error is raised."""

    name, settings = "fake:model", "{}"

    def __init__(self, *script: Reply | ChatError | str):
        self.script = list(script)
        self.asked: list[tuple[Message, ...]] = []

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = 0.0) -> Iterable[Reply]:
        for _ in range(count):
            self.asked.append(tuple(messages))
            entry = self.script.pop(0) if self.script else ChatError("nothing left", "server")
            if isinstance(entry, ChatError):
                raise entry
            yield Reply(entry, 100, 10, 0.5) if isinstance(entry, str) else entry


def kernel(remark: str = "", arguments: str = "x0, x1=None, x2=None") -> str:
    return fence(KERNEL.format(remark=remark, arguments=arguments))
