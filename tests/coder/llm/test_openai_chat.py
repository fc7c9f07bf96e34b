"""The client against a scripted endpoint: every way a server can fail has its class, and no key gets out."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from qimeng.coder.llm.chat import KINDS, ChatError, Message, Reply
from qimeng.coder.llm.keys import key_for
from qimeng.coder.llm.openai_chat import LONGEST_WAIT_S, MOST_BYTES, OpenAIChat
from qimeng.coder.named import coder_named
from qimeng.interfaces import LASTING
from tests.coder.llm.endpoint import KEY, Endpoint, Says, served

pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="needs the extra llm")

ASKED = [Message("system", "you write"), Message("user", "write")]


class Time:
    """A clock that sleeping sets forward, and nothing else."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def client(endpoint: Endpoint, **options: Any) -> tuple[OpenAIChat, Time]:
    time = Time()
    parts: dict[str, Any] = {"clock": time, "sleep": time.sleep, "draw": lambda: 1.0, "key": lambda url: KEY}
    return OpenAIChat("m", endpoint.url, **{**parts, **options}), time


def ask(*script: Says, **options: Any) -> tuple[Reply | ChatError, Time, Endpoint]:
    with served(script) as endpoint:
        chat, time = client(endpoint, **options)
        try:
            (found,) = chat.ask(ASKED)
        except ChatError as error:
            return error, time, endpoint
        return found, time, endpoint


def test_who_was_closed_connects_again() -> None:
    with served([Says("one"), Says("two")]) as endpoint:
        chat, _ = client(endpoint)
        first = chat._client()
        said = [reply.text for reply in chat.ask(ASKED)]
        chat.close()
        assert first.is_closed()
        assert said + [reply.text for reply in chat.ask(ASKED)] == ["one", "two"]
        chat.close()
        chat.close()


def test_an_answer_with_its_tokens() -> None:
    found, time, endpoint = ask(Says("hello"))
    assert isinstance(found, Reply)
    assert (found.text, found.prompt_tokens, found.reply_tokens, found.finish) == ("hello", 100, 10, "stop")
    assert endpoint.keys == [f"Bearer {KEY}"] and not time.slept
    (asked,) = endpoint.asked
    assert asked["model"] == "m" and asked["messages"][1] == {"role": "user", "content": "write"}
    assert (asked["temperature"], asked["max_tokens"]) == (0.7, 8192)


ERROR: dict[str, tuple[Says, str, bool]] = {
    "no key": (Says("wrong key", 401), "authentication", False),
    "forbidden": (Says("not for you", 403), "authentication", False),
    "no such model": (Says("no model m", 404), "setup", False),
    "prompt too long": (Says("maximum context length is 4096 tokens", 400), "too-long", False),
    "body too large": (Says("", 413), "too-long", False),
    "filtered": (Says("blocked by the content filter", 400), "refusal", False),
    "bad request": (Says("what?", 400), "server", False),
    "quota": (
        Says(status=429, body=b'{"error": {"code": "insufficient_quota", "message": "pay"}}'),
        "budget",
        False,
    ),
    "rate limit": (Says("slow down", 429), "rate-limit", True),
    "server error": (Says("oops", 500), "server", True),
    "overloaded": (Says("busy", 529), "server", True),
    "request timeout": (Says("late", 408), "timeout", True),
    "a page": (Says(body=b"<html>hello</html>"), "server", True),
    "JSON of something else": (Says(body=b"[1, 2]"), "server", True),
    "no choices": (Says(body=b'{"choices": []}'), "server", True),
    "deep JSON": (Says(body=b"[" * 100_000), "server", True),
    "too much": (Says("x" * 10_000_000), "too-long", False),
    "too much of an error": (Says(status=500, body=b"x" * (MOST_BYTES + 1)), "too-long", False),
    "nothing sent": (Says(chunks=[b""]), "server", True),
}


@pytest.mark.parametrize("name", ERROR)
def test_each_failure_has_its_class(name: str) -> None:
    says, kind, passing = ERROR[name]
    found, time, endpoint = ask(*[says] * 3, retries=2)
    assert isinstance(found, ChatError)
    assert (found.kind, found.passing) == (kind, passing), str(found)
    assert kind in KINDS and found.failure == f"model-{kind}" and found.failure not in LASTING
    assert time.slept == ([1.0, 2.0] if passing else [])
    assert len(endpoint.asked) == (3 if passing else 1)
    assert len(str(found)) < 600


def test_what_passes_is_tried_again() -> None:
    found, time, _ = ask(Says("slow down", 429, headers={"Retry-After": "7"}), Says("oops", 500), Says("hello"))
    assert isinstance(found, Reply) and found.text == "hello"
    assert time.slept == [7.0, 2.0]


@pytest.mark.parametrize(
    "header, waited",
    [
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "250"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, 1.0),
        ({"Retry-After": "-3"}, 1.0),
        ({"Retry-After": "inf"}, 1.0),
    ],
)
def test_the_server_says_how_long_to_wait(header: dict[str, str], waited: float) -> None:
    _, time, _ = ask(Says("slow down", 429, headers=header), Says("hello"))
    assert time.slept == [waited]


def test_a_long_wait_is_not_waited_for() -> None:
    found, time, _ = ask(Says("slow down", 429, headers={"Retry-After": str(LONGEST_WAIT_S + 1)}))
    assert isinstance(found, ChatError) and found.kind == "rate-limit" and not time.slept
    assert "121 s later" in str(found)


def test_patience_ends() -> None:
    found, time, _ = ask(*[Says("oops", 500)] * 9, retries=8, patience_s=10.0)
    assert isinstance(found, ChatError) and sum(time.slept) <= 10.0 and time.slept == [1.0, 2.0, 4.0]


def test_jitter_is_drawn() -> None:
    _, time, _ = ask(Says("oops", 500), Says("hello"), draw=lambda: 0.0)
    assert time.slept == [0.5]


def test_a_hanging_connection_is_given_up() -> None:
    found, time, _ = ask(Says(hang=True), Says(hang=True), timeout_s=0.2, retries=1)
    assert isinstance(found, ChatError) and (found.kind, found.passing) == ("timeout", True) and time.slept == [1.0]
    found, _, _ = ask(Says(chunks=[b'{"choices": '], hang=True), timeout_s=0.2, retries=0)
    assert isinstance(found, ChatError) and found.kind == "timeout"


def test_a_dripping_answer_is_given_up() -> None:
    """Each read is quick enough; all together they are not."""
    ticks = iter(range(1000))
    found, _, _ = ask(Says(chunks=[b" " * 100_000] * 20), clock=lambda: float(next(ticks)), timeout_s=3, retries=0)
    assert isinstance(found, ChatError) and found.kind == "timeout"


def test_no_server_at_all() -> None:
    with served([]) as endpoint:
        pass
    chat, time = client(endpoint, retries=1)
    with pytest.raises(ChatError, match="cannot be reached") as caught:
        list(chat.ask(ASKED))
    assert (caught.value.kind, caught.value.passing, time.slept) == ("connection", True, [1.0])


def test_text_that_is_no_utf8_is_read_as_far_as_it_is() -> None:
    body = Says("a _ b").data().replace(b"_", b"\xff\xfe")
    found, _, _ = ask(Says(body=body))
    assert isinstance(found, Reply) and found.text == "a �� b"
    halves, _, _ = ask(Says(body=Says("_").data().replace(b"_", b"\\ud800")))
    assert isinstance(halves, Reply) and halves.text == "?"


@pytest.mark.parametrize(
    "says, text, finish",
    [
        (Says("half a", finish="length"), "half a", "length"),
        (Says({"content": None, "refusal": "I will not"}), "I will not", "refusal"),
        (Says("", finish="content_filter"), "", "refusal"),
        (Says({"content": None}), "", "stop"),
        (Says({"content": [{"type": "text", "text": "in "}, {"text": "parts"}, 3]}), "in parts", "stop"),
    ],
)
def test_how_an_answer_ended(says: Says, text: str, finish: str) -> None:
    found, _, _ = ask(says)
    assert isinstance(found, Reply) and (found.text, found.finish) == (text, finish)


def test_usage_that_makes_no_sense_is_not_counted() -> None:
    body = json.loads(Says("hello").data())
    body["usage"] = {"prompt_tokens": -5, "completion_tokens": "many"}
    found, _, _ = ask(Says(body=json.dumps(body).encode()))
    assert isinstance(found, Reply) and found.prompt_tokens == found.reply_tokens == 0


def test_options_that_a_server_does_not_know_are_left_out() -> None:
    refused = Says("Unsupported parameter: 'max_tokens' is not supported; use 'max_completion_tokens' instead.", 400)
    with served([refused, Says("temperature is not supported", 400), Says("hello"), Says("again")]) as endpoint:
        chat, time = client(endpoint)
        assert [next(iter(chat.ask(ASKED))).text for _ in range(2)] == ["hello", "again"]
    last = endpoint.asked[-1]
    assert last["max_completion_tokens"] == 8192 and "max_tokens" not in last and "temperature" not in last
    assert len(endpoint.asked) == 4 and not time.slept


def test_candidates_are_asked_for_in_parallel() -> None:
    """The server answers nobody before all have asked."""
    import threading

    gate = threading.Barrier(3, timeout=30)

    def together(asked: dict[str, Any]) -> Says:
        return Says("hello")

    with served(together) as endpoint:
        plain = endpoint.answer
        endpoint.answer = lambda handler, says: (gate.wait(), plain(handler, says))  # type: ignore[method-assign,func-returns-value,assignment]
        chat, _ = client(endpoint)
        assert [r.text for r in chat.ask(ASKED, 3)] == ["hello"] * 3


def test_answers_that_nobody_waits_for_are_not_asked_for_again() -> None:
    import threading
    import time

    gate, first = threading.Event(), iter([Says("hello")])

    def script(asked: dict[str, Any]) -> Says:
        return next(first, Says("late", 500))

    with served(script) as endpoint:
        plain = endpoint.answer

        def answer(handler: Any, says: Says) -> None:
            if says.status >= 400:
                gate.wait(5)
            plain(handler, says)

        endpoint.answer = answer  # type: ignore[method-assign]
        chat, slept = client(endpoint)
        answers = iter(chat.ask(ASKED, 3))
        assert next(answers).text == "hello"
        answers.close()  # type: ignore[attr-defined]
        gate.set()
        time.sleep(0.5)
        assert len(endpoint.asked) <= 3 and not slept.slept
        chat.close()


def test_some_candidates_may_fail_but_not_all() -> None:
    with served([Says("no", 400), Says("hello"), Says("hello")]) as endpoint:
        assert len(list(client(endpoint)[0].ask(ASKED, 3))) == 2
    with served([Says("no", 401)] * 3) as endpoint, pytest.raises(ChatError, match="401"):
        list(client(endpoint)[0].ask(ASKED, 3))


# ---- keys


def test_no_key_in_any_output(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even where the server repeats it."""
    caplog.set_level(logging.DEBUG)
    script = [
        Says(f"your key {KEY} is wrong", 401),
        Says(status=500, body=f"trace: {KEY}".encode()),
        Says(body=f"<html>{KEY}".encode()),
        Says(f"you sent {KEY}"),
        Says({"content": None, "refusal": f"not with {KEY}"}),
    ]
    seen: list[object] = []
    with served(script) as endpoint:
        chat, _ = client(endpoint, retries=0)
        for _ in script:
            try:
                seen += chat.ask(ASKED)
            except ChatError as error:
                seen.append(error)
                assert error.__cause__ is None and error.__context__ is None
    assert len(seen) == 5 and "[key]" in str(seen[0]) + repr(seen[3])
    said = [
        repr(chat),
        str(vars(copy.deepcopy(chat))),
        *map(repr, seen),
        *map(str, seen),
        caplog.text,
        *capfd.readouterr(),
    ]
    assert KEY not in "\n".join(said)
    assert KEY.encode() not in pickle.dumps(OpenAIChat("m", endpoint.url, key=key_for))


def test_a_copy_connects_anew() -> None:
    with served([Says("hello")] * 2) as endpoint:
        chat, _ = client(endpoint)
        assert [r.text for c in (chat, copy.deepcopy(chat)) for r in c.ask(ASKED)] == ["hello"] * 2


def test_where_a_key_comes_from(tmp_path: Path) -> None:
    ring = tmp_path / "keys.toml"
    ring.write_text('"api.example.com" = "ring"\n"localhost:8000" = "local"\n')
    ring.chmod(0o600)
    here = {"QIMENG_KEYRING": str(ring), "OPENAI_API_KEY": "openai"}
    assert key_for(None, here) == "openai" == key_for("https://api.openai.com/v1", here)
    assert key_for("https://api.example.com/v1", here) == "ring"
    assert key_for("http://localhost:8000/v1", here) == "local"
    assert key_for("http://localhost:8001/v1", here) is None  # one server's key is never sent to another
    assert key_for("http://localhost:8001/v1", here | {"QIMENG_API_KEY": " mine\n"}) == "mine"


def damaged(text: str, mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_text(text)
        path.chmod(mode)

    return make


@pytest.mark.parametrize(
    "make, told",
    [
        (damaged(f'"h" = "{KEY}"', 0o644), "chmod 600"),
        (damaged(f'"h" = "{KEY}', 0o600), "each line must read"),
        (damaged(f'h = ["{KEY}"]', 0o600), "each line must read"),
        (lambda path: path.mkdir(0o700), "each line must read"),
    ],
)
def test_a_keyring_that_is_not_used(make: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    ring = tmp_path / "keys.toml"
    make(ring)
    with pytest.raises(ChatError, match=told) as caught:
        key_for("https://h/v1", {"QIMENG_KEYRING": str(ring)})
    assert caught.value.kind == "authentication" and KEY not in str(caught.value) + repr(caught.value.__context__)


def test_no_key_file_is_no_error(tmp_path: Path) -> None:
    assert key_for("https://h/v1", {"QIMENG_KEYRING": str(tmp_path / "none")}) is None
    assert os.path.exists(tmp_path)


def test_a_server_is_refused_before_any_work_where_it_cannot_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "QIMENG_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QIMENG_KEYRING", str(tmp_path / "none"))
    with pytest.raises(ChatError, match="set OPENAI_API_KEY"):
        coder_named("openai:m")
    with pytest.raises(ChatError, match="'nourl' is no URL of a server"):
        coder_named("hybrid:openai:m", base_url="nourl")
    assert coder_named("openai:m", base_url="http://localhost:1/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert coder_named("openai:m")


def test_nobody_waits_longer_than_the_run_has_left() -> None:
    with served([Says("slow down", 429, headers={"Retry-After": "7"}), Says("hello")]) as endpoint:
        chat, time = client(endpoint)
        with pytest.raises(ChatError, match="not tried again: the next attempt would be 7 s later") as raised:
            list(chat.ask(ASKED, limit_s=5.0))
        assert raised.value.passing and not time.slept
    with served([Says(hang=True)]) as endpoint, pytest.raises(ChatError, match="no answer within 0.3 s"):
        list(client(endpoint, retries=0)[0].ask(ASKED, limit_s=0.3))
