"""Fences untrusted text inside a prompt, so that it cannot pose as the prompt itself.

Deals in text. Knows nothing about what the text is.
"""

from __future__ import annotations

import hashlib
import re

_TURNS = re.compile(
    r"<(?=\|)|(?<=\|)>|<(?=/?(?:s|bos|eos|pad|unk|think|(?:start|end)_of_turn)>)|(?<=\[)(?=/?INST\])|<(?=</?SYS>>)"
)
"""Tokens that begin or end a turn in some model's chat format."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Invisible characters: controls, direction marks, zero widths, lone surrogates."""


def tame(text: str) -> str:
    """`text` without tokens that end a chat turn and without invisible characters.

    A space splits each special token (outside strings this means the same in Python). Invisible characters are removed.

    >>> tame("x = 1  # <|im_end|> [INST]")
    'x = 1  # < |im_end| > [ INST]'
    """
    shown = _UNSEEN.sub("", text.replace("\r\n", "\n").replace("\t", "    "))
    return _TURNS.sub(lambda found: {"<": "< ", ">": " >", "": " "}[found.group()], shown)


def fenced(text: str, title: str, language: str = "python") -> str:
    """`text` between two marks that it cannot contain, in a fence that it cannot close.

    The mark is a hash of the text, so a text would have to contain its own hash to close it. Equal texts give equal
    prompts. The fence has more backticks than any run of them in the text.

    Args:
        text: what somebody else wrote.
        title: what it is, in our words.
        language: written behind the fence's backticks.
    """
    title = re.sub(r"[\[\]\s]+", " ", tame(title)).strip()
    body = tame(text).strip("\n")
    mark = hashlib.blake2b(body.encode(), digest_size=4).hexdigest()
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"[data {mark}: {title}]\n{ticks}{language}\n{body}\n{ticks}\n[end of data {mark}]"


def clipped(text: str, characters: int) -> str:
    r"""`text`, its middle left out where it is longer than `characters`.

    >>> clipped("abcdefghij", 8)
    'abcd\n[… 2 characters left out …]\nghij'
    """
    if len(text) <= characters:
        return text
    head = characters - characters // 2
    tail = len(text) - characters // 2
    return f"{text[:head]}\n[… {tail - head} characters left out …]\n{text[tail:]}"


__all__ = ["clipped", "fenced", "tame"]
