"""Stores a model's answers: a repeated request is answered from the store, so nothing is paid for twice.

Deals in look-ups by content hash. An answer is stored durably before it is used. Knows nothing about the source or the
use of answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from qimeng.coder.llm.account import Account
from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.store import Store, content_hash, reply_key


class RecordedChat(Chat):
    """`chat`, with a store and an account.

    Answers to the same messages are numbered from 0 in the order of arrival, and replayed in that order. So a run can
    be repeated without the model. Failed requests have no answer and are sent again.

    Args:
        chat: answers what the store does not know.
        account: of all answers; its limits are kept.
        store: where answers are kept; None keeps none.
    """

    def __init__(self, chat: Chat, account: Account, store: Store | None = None):
        self.chat, self.account, self.store = chat, account, store
        self.name, self.settings = chat.name, chat.settings

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterator[Reply]:
        """`count` answers, those from the store first; as many fewer as the budget of calls has no room for.

        Raises:
            ChatError: there was no answer at all, or (``"budget"``) the budget is used up.
        """
        given = 0
        try:
            for reply in self._answers(messages, self.account.room(count), limit_s):
                given += 1
                yield reply
        except ChatError as error:
            self.account.failures[error.kind] += 1
            if not given:
                raise

    def question(self, messages: Sequence[Message], number: int) -> str:
        """Hash of all that answer `number` to `messages` depends on."""
        return content_hash("\n".join((self.name, self.settings, _json(messages), str(number))))

    def digest(self, messages: Sequence[Message], number: int, reply: Reply) -> str:
        """Digest of answer `number` to `messages` in the store."""
        return reply_key(self.question(messages, number), _body(reply))

    def _answers(self, messages: Sequence[Message], count: int, limit_s: float) -> Iterator[Reply]:
        known = 0
        while known < count and (reply := self._stored(messages, known)) is not None:
            self.account.add(messages, reply, replayed=True)
            known += 1
            yield reply
        if known == count:
            return
        fresh = self.chat.ask(messages, self.account.room(count - known), limit_s)
        for number, reply in enumerate(fresh, known):
            if self.store is not None:
                self.store.put_reply(self.question(messages, number), self.name, _json(messages), _body(reply))
            self.account.add(messages, reply)
            yield reply

    def _stored(self, messages: Sequence[Message], number: int) -> Reply | None:
        body = self.store.answer(self.question(messages, number)) if self.store is not None else None
        return None if body is None else Reply(**json.loads(body))


def _body(reply: Reply) -> str:
    return json.dumps(asdict(reply), sort_keys=True)


def _json(messages: Sequence[Message]) -> str:
    return json.dumps([asdict(m) for m in messages], sort_keys=True)


__all__ = ["RecordedChat"]
