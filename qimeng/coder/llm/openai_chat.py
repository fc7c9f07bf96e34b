"""Any OpenAI-compatible endpoint: hosted models, vLLM, SGLang, Ollama, llama.cpp's server, `transformers serve`.

Deals in requests, bytes and waiting. Servers are not trusted: replies are limited in size and time. No key appears in
any text, error or result of this module. Knows nothing about the content of requests.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib import import_module
from threading import Event
from typing import Any

from qimeng.coder.llm.chat import Chat, ChatError, Message, Reply
from qimeng.coder.llm.keys import key_for
from qimeng.coder.llm.protocol import Answer, Failure, failure_of, reply_of

MOST_BYTES = 4 << 20
"""Most bytes of a reply that are read."""

CONNECT_S = 10.0
LONGEST_WAIT_S = 120.0
"""A server that asks to wait longer is not waited for."""

NO_KEY = "none"
"""What is sent to servers that ask for no key; the client insists on one."""

FIRST_WAIT_S = 1.0
"""Before the first repetition; twice as long before each further one. The wait is drawn between half and all of it."""


class OpenAIChat(Chat):
    """A model behind an OpenAI-compatible endpoint.

    Args:
        model: its name there.
        base_url: of the endpoint (``"http://localhost:8000/v1"``); OpenAI's own by default.
        temperature: of sampling; None leaves it to the server.
        max_tokens: longest reply.
        timeout_s: seconds that one request may take.
        patience_s: seconds after which nothing is retried, if the run has that many left.
        retries: times that a request is made again after a failure that may pass.
        parallel: most requests at a time.
        key: tells the key; `qimeng.coder.llm.keys.key_for` by default.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.
        draw: a number from 0 to 1, for jitter.

    Raises:
        ChatError: (``"setup"``) the package `openai` is not installed; (``"authentication"``) the keyring is unusable.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        temperature: float | None = 0.7,
        max_tokens: int = 8192,
        timeout_s: float = 300.0,
        patience_s: float = 900.0,
        retries: int = 4,
        parallel: int = 8,
        key: Callable[[str | None], str | None] = key_for,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ):
        self.model, self.base_url, self.name = model, base_url, f"openai:{model}"
        self.timeout_s, self.patience_s, self.retries, self.parallel = timeout_s, patience_s, retries, parallel
        self._options: dict[str, Any] = {"max_tokens": max_tokens}
        if temperature is not None:
            self._options["temperature"] = temperature
        self.settings = json.dumps(self._options, sort_keys=True)
        self._key, self._clock, self._sleep, self._draw = key, clock, sleep, draw
        self._made: Any = None
        self._client()

    def __repr__(self) -> str:
        return f"OpenAIChat({self.model!r}, {self.base_url!r})"

    def __getstate__(self) -> dict[str, Any]:
        """All but the connection, which holds the key."""
        return {**self.__dict__, "_made": None}

    def ask(self, messages: Sequence[Message], count: int = 1, limit_s: float = math.inf) -> Iterator[Reply]:
        """`count` answers from as many requests, in parallel, as they arrive.

        Raises:
            ChatError: all requests failed; the first failure.
        """
        if count == 1:
            yield self._one(messages, limit_s)
            return
        pool = ThreadPoolExecutor(min(count, self.parallel))
        given, failed, over = 0, None, Event()
        try:
            for future in as_completed([pool.submit(self._one, messages, limit_s, over) for _ in range(count)]):
                error = future.exception()
                if error is None:
                    given += 1
                    yield future.result()
                elif not isinstance(error, ChatError):
                    raise error
                failed = failed or error
        finally:
            over.set()  # nobody waits for the others: they are not tried again
            pool.shutdown(wait=False, cancel_futures=True)
        if not given and failed is not None:
            raise failed

    def close(self) -> None:
        """Give the connections up; who asks again gets new ones."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    # -- one request and its repetitions

    def _one(self, messages: Sequence[Message], limit_s: float, over: Event | None = None) -> Reply:
        began, tried, patience_s = self._clock(), 0, min(self.patience_s, limit_s)
        while True:
            asked = self._clock()
            options = dict(self._options)
            answer = self._post(messages, options, min(self.timeout_s, max(began + limit_s - asked, 0.1)))
            failure = answer if isinstance(answer, Failure) else failure_of(*answer, sent=options)
            if failure is None:
                assert not isinstance(answer, Failure)
                found = reply_of(answer[2], self._clock() - asked)
                if isinstance(found, Reply):
                    return replace(found, text=self._hide(found.text))
                failure = found
            failure = replace(failure, text=self._hide(failure.text))
            if failure.option and self._without(failure.option):
                continue
            wait_s = failure.wait_s
            if wait_s is None:
                wait_s = FIRST_WAIT_S * 2**tried * (0.5 + 0.5 * self._draw())
            if not failure.passing or tried >= self.retries or (over is not None and over.is_set()):
                raise ChatError(failure.text, failure.kind, failure.passing)
            if wait_s > LONGEST_WAIT_S or self._clock() - began + wait_s > patience_s:
                text = f"{failure.text} (not tried again: the next attempt would be {wait_s:.0f} s later)"
                raise ChatError(text, failure.kind, True)
            self._sleep(wait_s)
            tried += 1

    def _without(self, option: str) -> bool:
        """Stop sending an option that the server does not know; False if it was dropped before."""
        value = self._options.pop(option, None)
        if option == "max_tokens" and value is not None:
            self._options["max_completion_tokens"] = value
        return value is not None

    def _post(self, messages: Sequence[Message], options: Mapping[str, Any], limit_s: float) -> Answer | Failure:
        """The server's answer. Nothing else leaves this method, because the request's headers hold the key."""
        import openai

        http = import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])  # httpx or its heir
        client, until = self._client(), self._clock() + limit_s
        limits = openai.Timeout(limit_s, connect=min(CONNECT_S, limit_s))
        said = [{"role": m.role, "content": m.text} for m in messages]
        try:
            with client.chat.completions.with_streaming_response.create(
                model=self.model, messages=said, timeout=limits, **options
            ) as response:
                return response.status_code, response.headers, self._read(response.iter_bytes(), until, limit_s)
        except _Stopped as stopped:
            return stopped.answer
        except (openai.APITimeoutError, http.TimeoutException):
            return Failure("timeout", f"no answer within {limit_s:g} s", True)
        except (openai.APIConnectionError, http.HTTPError) as error:
            cause = error.__cause__
            if isinstance(cause, _Stopped):
                return cause.answer
            where = self.base_url or "the server"
            return Failure(
                "connection", f"{where} cannot be reached, or broke off ({type(cause or error).__name__})", True
            )
        except openai.OpenAIError as error:
            return Failure("server", f"the client could not go on ({type(error).__name__})")

    def _read(self, chunks: Iterable[bytes], until: float, limit_s: float) -> str:
        """The text, as far as it is UTF-8.

        Raises:
            _Stopped: it is too long, or drips in for too long.
        """
        data = bytearray()
        for chunk in chunks:
            data += chunk
            if len(data) > MOST_BYTES:
                text = f"the answer is longer than {MOST_BYTES >> 20} MiB and was not read"
                raise _Stopped(Failure("too-long", text))
            if self._clock() > until:
                raise _Stopped(Failure("timeout", f"no whole answer within {limit_s:g} s", True))
        return data.decode(errors="replace")

    def _refuse(self, response: Any) -> None:
        """Called for each response before its body is read: an error's is read here, within the same limits."""
        if response.status_code >= 400:
            text = self._read(response.iter_bytes(), self._clock() + self.timeout_s, self.timeout_s)
            raise _Stopped((response.status_code, dict(response.headers), text))

    def _client(self) -> Any:
        if self._made is None:
            try:
                import openai
            except ImportError:
                raise ChatError("models behind an endpoint need openai: pip install 'qimeng[llm]'", "setup") from None
            limits = openai.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s))
            self._made = openai.OpenAI(
                api_key=self._key(self.base_url) or NO_KEY,
                base_url=self.base_url,
                max_retries=0,
                timeout=limits,
                http_client=openai.DefaultHttpxClient(event_hooks={"response": [self._refuse]}, timeout=limits),
            )
        return self._made

    def _hide(self, text: str) -> str:
        """`text` without the key, should a server repeat it."""
        key = self._client().api_key
        return text if key == NO_KEY else text.replace(key, "[key]")


class _Stopped(Exception):
    """Reading ended before its time, with what is known."""

    def __init__(self, answer: Answer | Failure):
        super().__init__()
        self.answer = answer


__all__ = ["LONGEST_WAIT_S", "MOST_BYTES", "OpenAIChat"]
