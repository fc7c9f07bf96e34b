"""What the writers answer: all requests together, before anything is judged, on every GPU of the machine.

Deals in requests, answers and a file of them, to which a run adds what is missing. A writer has learnt no
conversations: its first answer is the likeliest, and asked to repair it answers the same question anew, by chance.
Knows nothing about what an answer is worth.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from experiments.writer.examples import Example
from qimeng.bench.pool import Place, Pool
from qimeng.bench.row import append_line, whole_lines
from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.coder.llm.local_chat import LocalChat

TEMPERATURE = 0.7
"""Of answers after the first."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        writer: name of the writer's folder.
        key: of the example that asks.
        number: 0 is the first try, the others are repairs.
        reply: what it said.
    """

    writer: str
    key: str
    number: int
    reply: Reply

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The answer that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "reply": Reply(**data["reply"])})


@dataclass(frozen=True)
class Sheet:
    """Requests that are answered together by one writer, each for the `number`-th time."""

    folder: Path
    number: int
    max_tokens: int
    asked: tuple[tuple[str, tuple[Message, ...]], ...]

    def answers(self) -> list[Answer]:
        """The answers; a question that is too long for the writer gets an empty one that counts as cut off.

        Raises:
            ChatError: the writer cannot be used.
        """
        chat = _chat(self.folder, TEMPERATURE if self.number else 0.0, self.max_tokens, len(self.asked))
        short = {key: messages for key, messages in self.asked if chat.fits(messages)}
        replies = dict(zip(short, chat.ask_many(list(short.values()), self.number), strict=True))
        cut = Reply("", finish="length")
        return [Answer(self.folder.name, key, self.number, replies.get(key, cut)) for key, _ in self.asked]


@lru_cache(4)
def _chat(folder: Path, temperature: float, max_tokens: int, batch: int) -> LocalChat:
    return LocalChat(folder, temperature=temperature, max_tokens=max_tokens, batch=batch)


def sheets(
    folder: Path, examples: Iterable[Example], done: Iterable[Answer], repairs: int, max_tokens: int, batch: int
) -> Iterator[Sheet]:
    """What the writer in `folder` has still to answer for the first time; without any, what may want repairs.

    An answer that is the accepted one word for word wants none. Requests of like length go together.
    """
    known = {(a.key, a.number): a.reply.text for a in done if a.writer == folder.name}
    some = sorted(examples, key=lambda e: -len(e.prompt[1]))
    unanswered = any((e.key, 0) not in known for e in some)
    some = some if unanswered else [e for e in some if known[e.key, 0] != e.reply]
    for number in range(1) if unanswered else range(1, 1 + repairs):
        left = [(e.key, e.messages) for e in some if (e.key, number) not in known]
        for first in range(0, len(left), batch):
            yield Sheet(folder, number, max_tokens, tuple(left[first : first + batch]))


def answer(
    some: Sequence[Sheet],
    out: Path,
    places: Sequence[Place],
    seconds: float = math.inf,
    on_sheet: Callable[[Sheet, str], None] = lambda sheet, failure: None,
) -> None:
    """Have `some` answered and append the answers to `out`.

    Args:
        some: what is asked.
        out: JSON lines.
        places: where, and how many at once.
        seconds: wall-clock limit; what is not ready by then is left to another run.
        on_sheet: told each sheet that is done, or why it is not.
    """
    with Pool(places) as pool:
        stop_at = time.monotonic() + seconds
        for outcome in pool.run(some, Sheet.answers, limit_s=seconds, stop_at=stop_at, start_before=stop_at):
            for row in outcome.result or ():
                append_line(out, row.to_json())
            on_sheet(outcome.task, outcome.failure or "")


def read_answers(path: Path) -> tuple[Answer, ...]:
    """The answers in a file; none where it is not there."""
    return tuple(Answer.from_json(line) for line in whole_lines(path)) if path.exists() else ()


class Written(Chat):
    """A chat whose answers are ready: to each question, asked again and again, one after another.

    Args:
        name: of the writer.
        answers: its answers, by the question's key and the number of the try.
        questions: conversation to key.
    """

    def __init__(self, name: str, answers: Iterable[Answer], questions: Iterable[Example]):
        self.name = f"writer:{name}"
        self._keys = {e.messages: e.key for e in questions}
        self._ready = {(a.key, a.number): a.reply for a in answers if a.writer == name}
        self._asked: dict[str, int] = {}

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterator[Reply]:
        """The next `count` answers.

        Raises:
            ChatError: (``"empty"``) there are no more, or the question was never asked.
        """
        key = self._keys.get(tuple(messages[:2]), "")
        for _ in range(count):
            number = self._asked.get(key, 0)
            self._asked[key] = number + 1
            if (key, number) not in self._ready:
                raise ChatError(f"{self.name} wrote no answer number {number} to this question", "empty")
            yield self._ready[key, number]


__all__ = ["Answer", "Sheet", "Written", "answer", "read_answers", "sheets"]
