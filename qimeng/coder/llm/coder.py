"""The LLM coder: an action becomes a prompt, an answer becomes a patch.

Deals in the sequence of a request: steps that need no model, the question, repeated questions after unreadable answers,
and records. Knows nothing about the wording of prompts, the parsing of answers or their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qimeng.actions import MAX_ALTERNATIVES, GraphRewrite, rewritten
from qimeng.backend import backend_named
from qimeng.coder.llm.account import Account
from qimeng.coder.llm.chat import Chat, ChatError, HasChat, Message, Reply
from qimeng.coder.llm.fence import tame
from qimeng.coder.llm.prompt import Limits, write_messages
from qimeng.coder.llm.replies import RecordedChat
from qimeng.coder.llm.reply import read_reply
from qimeng.coder.llm.shown import base_source
from qimeng.coder.llm.similar import Library
from qimeng.coder.llm.words import Words
from qimeng.graph.ops import VIEWS, category
from qimeng.graph.region import Region
from qimeng.interfaces import Coder, Memory, Patch, Request
from qimeng.interfaces.records import PatchRecord
from qimeng.program.program import Implementation
from qimeng.store import Store, StoredAttempt

QUOTED = 20_000
"""Longest answer, in characters, that is shown to the model again when it could not be read."""


class ModelMemory(Memory):
    """Answers and attempts of a model in the project's store, and what they cost.

    Args:
        chat: the model, which answers from the store where it has one.
        account: what it has cost.

    Attributes:
        library: accepted patches of the store, to be shown where they are similar; None without a store.
    """

    def __init__(self, chat: RecordedChat, account: Account):
        self._chat, self._account = chat, account
        self.library: Library | None = None

    def use_store(self, store: Store, spec: str) -> None:
        """Keep answers and attempts in `store`, answer from it, and show similar patches of it.

        Patches of `spec` itself are not shown, so that a resumed run asks the same questions again.
        """
        self._chat.store, self.library = store, Library(store, [spec])

    def check_answered(self) -> None:
        """Refuse a run whose model was asked and never answered.

        Raises:
            ChatError: it is one.
        """
        account = self._account
        failed = sorted(account.failures.keys() - {"budget"})
        if failed and not account.calls:
            what = f"{self._chat.name} never answered ({', '.join(failed)})"
            raise ChatError(f"{what}: check its server (--base-url), its key and its name", failed[0])

    def remarks(self) -> tuple[str, ...]:
        """The account, where anything was asked."""
        account = self._account
        return (f"{self._chat.name}: {account}",) if account.calls or account.failures else ()


class LLMCoder(Coder, HasChat):
    """A language model writes each kernel.

    The loop around it repairs refused patches. This class repeats a request whose answer cannot be read. A failure of
    the model (`ChatError`) is no verdict on a kernel.

    Args:
        chat: the model.
        account: what it may cost, and has cost; unlimited by default.
        candidates: answers to each request, 1 to 8; the judge keeps the fastest kernel that is right.
        again: times that a request is repeated if none of the answers could be read.
        words: the sections of the prompt.
        limits: how long a prompt may be.
        languages: what it may be asked to write kernels in; the first is usual, others by the action `language`.

    Attributes:
        account: the running account.
        chat: the model, with its account and store.
        memory: the store and the account, for the session.

    Raises:
        ValueError: `candidates` is out of range.
        QimengError: a language that has no backend.
    """

    free_hand = True

    def __init__(
        self,
        chat: Chat,
        account: Account | None = None,
        candidates: int = 1,
        again: int = 1,
        words: Words | None = None,
        limits: Limits | None = None,
        languages: Sequence[str] = ("triton",),
    ):
        if not 1 <= candidates <= MAX_ALTERNATIVES:
            raise ValueError(f"candidates must be from 1 to {MAX_ALTERNATIVES}, got {candidates}")
        self.languages = tuple(backend_named(name).language for name in languages)
        self.account = account or Account()
        self.candidates, self.again = candidates, again
        self._words, self._limits = words or Words(), limits or Limits()
        self.chat: RecordedChat = RecordedChat(chat, self.account)
        self.memory: ModelMemory = ModelMemory(self.chat, self.account)

    def __repr__(self) -> str:
        return f"LLMCoder({self.chat.name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LLMCoder:
        """Itself: branches of a search share the model and its account."""
        return self

    def can_implement(self, region: Region) -> str | None:
        """Anything that computes and is not random."""
        families = [category(n) for n in region.ops if n.packet not in VIEWS]
        if "random" in families:
            return "random operators stay on PyTorch"
        if any(n.literal is not None for n in region.ops):
            return "a piece of PyTorch code stays as it is"
        return None if families else "nothing is computed"

    def write(self, request: Request) -> Patch:
        """The patch for `request.action`. Steps that only change the graph or return to PyTorch need no model.

        Raises:
            IllegalAction: the action does not apply.
            ChatError: the model gave no answer that can be read.
        """
        rewrite = rewritten(request, self)
        region = rewrite.to_write
        return rewrite.patch() if region is None else self._ask(request, rewrite, region)

    def _ask(self, request: Request, rewrite: GraphRewrite, region: Region) -> Patch:
        """The patch from the first round of answers of which any can be read."""
        if request.failed is not None and len(request.failed.alternatives) > 1:  # the one that the reason is about
            request = replace(request, failed=request.failed.only(request.refused), refused=0)
        library = self.memory.library
        similar = library.nearest(request) if library is not None else ()
        messages = write_messages(request, similar=similar, limits=self._limits, words=self._words)
        for left in range(self.again, -1, -1):
            replies = list(self.chat.ask(messages, self.candidates, request.seconds_left))
            readings = [_read(reply, request, region) for reply in replies]
            written = tuple({i.digest: i for i in readings if isinstance(i, Implementation)}.values())
            patch = rewrite.patch(written, f"written by {self.chat.name}") if written else None
            self._record(request, messages, list(zip(replies, readings, strict=True)), patch)
            if patch is not None:
                return patch
            error = readings[0]
            assert isinstance(error, ChatError)
            self.account.failures[error.kind] += 1
            if not left:
                raise error
            messages = told(messages, replies[0], error)
        raise AssertionError("the last round raises")

    def _record(
        self,
        request: Request,
        messages: Sequence[Message],
        answers: Sequence[tuple[Reply, Implementation | ChatError]],
        patch: Patch | None,
    ) -> None:
        """Keep what came of each answer."""
        store = self.chat.store
        if store is None:
            return
        digest = store.put_patch(PatchRecord.of(patch)) if patch is not None else None
        texts = [i.digest for i in patch.alternatives] if patch is not None else []
        for number, (reply, reading) in enumerate(answers):
            key, parent = self.chat.digest(messages, number, reply), request.program.digest
            if isinstance(reading, ChatError):
                store.put_attempt(StoredAttempt(parent, request.action, key, failure=reading.failure))
            else:
                place = texts.index(reading.digest)
                store.put_attempt(StoredAttempt(parent, request.action, key, digest, place))


def _read(reply: Reply, request: Request, region: Region) -> Implementation | ChatError:
    """What `reply` holds, or why it cannot be read."""
    present = None
    if request.failed is not None and request.failed.alternatives:
        present = request.failed.alternatives[0]
    elif region in request.program.regions:
        present = request.program.implementation(region)
    try:
        return read_reply(reply, region, base_source(request), present)
    except ChatError as error:
        return error


def told(messages: Sequence[Message], reply: Reply, error: ChatError) -> tuple[Message, ...]:
    """The continued conversation: the answer, unless it is too long, and what is wrong with it.

    Args:
        messages: the conversation.
        reply: the answer that cannot be read.
        error: why.
    """
    text = f"Your answer cannot be used: {error}."
    if reply.finish == "stop" and reply.text.strip() and len(reply.text) <= QUOTED:
        return (*messages, Message("assistant", tame(reply.text)), Message("user", text))
    *before, last = messages
    return (*before, Message(last.role, f"{last.text}\n\n{text}"))


__all__ = ["LLMCoder", "ModelMemory", "told"]
