"""Interprets an OpenAI-compatible server's answer: a reply, or a class of failure.

Deals in status codes, headers and untrusted JSON. Knows nothing about connections or waiting.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from qimeng.coder.llm.chat import Reply

Answer = tuple[int, Mapping[str, str], str]
"""Status, headers (names in lower case) and text."""

_TOO_LONG = re.compile(r"context.?(length|window|size)|maximum.{0,20}(context|tokens)|too many tokens|too long", re.I)
_UNKNOWN = re.compile(
    r"unsupported|not supported|unrecognized|unknown|not permitted|extra inputs|does not support", re.I
)
_FILTERED = re.compile(r"content.?(filter|policy)|safety", re.I)


@dataclass(frozen=True)
class Failure:
    """Why there is no reply.

    Attributes:
        kind: see `qimeng.coder.llm.chat.KINDS`.
        text: in words.
        passing: whether asking again later may help.
        wait_s: how long the server asks to wait; None where it does not say.
        option: of those that were sent, the one that the server does not know.
    """

    kind: str
    text: str
    passing: bool = False
    wait_s: float | None = None
    option: str = ""


def failure_of(status: int, headers: Mapping[str, str], text: str, sent: Collection[str] = ()) -> Failure | None:
    """The failure that a status stands for; None where it is none.

    Args:
        status: of HTTP.
        headers: of the answer.
        text: of the answer.
        sent: options that some servers refuse.
    """
    if status < 300:
        return None
    code, said = _error(text)
    message = f"the server answered {status}: {said}" if said else f"the server answered {status}"
    about = f"{code} {said}"
    wait_s = wait_of(headers)
    if status == 429:
        if code == "insufficient_quota":
            return Failure("budget", message)
        return Failure("rate-limit", message, True, wait_s)
    if status in (401, 403):
        return Failure(
            "authentication", f"{message}; is there a key for this server in the environment or the keyring?"
        )
    if status == 404:
        return Failure("setup", f"{message}; is the model's name, or the base URL, wrong?")
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(about)):
        return Failure("too-long", message)
    if status in (400, 422):
        option = next((o for o in sent if o in said), "") if _UNKNOWN.search(about) else ""
        return Failure("refusal" if _FILTERED.search(about) else "server", message, option=option)
    if status == 408:
        return Failure("timeout", message, True, wait_s)
    passing = status in (409, 425) or (status >= 500 and status not in (501, 505))
    return Failure("server", message, passing, wait_s)


def reply_of(text: str, seconds: float) -> Reply | Failure:
    """The reply in the text of a good answer."""
    try:
        data = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return Failure("server", f"the server's answer is no JSON: {_clip(text)}", True)
    choices = data.get("choices") if isinstance(data, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict) or not isinstance(choice, dict):
        return Failure("server", f"the server's answer has no message: {_clip(text)}", True)
    content, refusal, finish = message.get("content"), message.get("refusal"), choice.get("finish_reason")
    if isinstance(content, list):  # some servers send it in parts
        content = "".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    if not isinstance(content, str):
        content = ""
    if finish == "content_filter" or (isinstance(refusal, str) and refusal):
        content, finish = content or str(refusal or ""), "refusal"
    finish = finish if finish in ("length", "refusal") else "stop"
    usage = data.get("usage")
    content = content.encode(errors="replace").decode()  # JSON may hold halves of characters, which no file takes
    return Reply(content, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), seconds, finish)


def wait_of(headers: Mapping[str, str]) -> float | None:
    """Seconds that ``Retry-After`` (in seconds, or as a date) asks for; None where it says nothing sensible."""
    given = {name.lower(): value for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(given[name]) * unit
        except (KeyError, ValueError):
            continue
        return seconds if 0 <= seconds < float("inf") else None
    try:
        return max(0.0, parsedate_to_datetime(given["retry-after"]).timestamp() - time.time())
    except (KeyError, ValueError, OverflowError):
        return None


def _error(text: str) -> tuple[str, str]:
    """(code, message) of an error's JSON; its beginning where it is none."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "", _clip(text)
    if isinstance(data, dict):
        data = data.get("error", data.get("detail", data))
    if isinstance(data, dict):
        return str(data.get("code") or ""), _clip(str(data.get("message") or data))
    return "", _clip(str(data))


def _clip(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]} …"


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0


__all__ = ["Answer", "Failure", "failure_of", "reply_of", "wait_of"]
