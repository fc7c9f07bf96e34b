"""Makes text from untrusted code harmless for terminals, files and prompts.

Deals in characters. A candidate's output, errors and names may contain sequences that move a terminal's cursor, set its
title, or reverse the text direction. Each such character is replaced by its code.
"""

from __future__ import annotations

import re

_HARMFUL = re.compile(
    "["
    "\x00-\x08\x0b-\x1f"  # control characters but tab and new line
    "\x7f-\x9f"  # delete, and the second set of control characters
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # direction, invisible, other line ends
    "\ud800-\udfff"  # halves of characters, which no file can hold
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags, which nobody sees
    "]"
)


def plain_text(text: str) -> str:
    r"""`text` with its control characters, and others that cannot be seen, as codes.

    >>> plain_text("\x1b[2Jwhat\r\n\tis left\u202e")
    '\\x1b[2Jwhat\\x0d\n\tis left\\u202e'
    """
    return _HARMFUL.sub(_code, text)


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


__all__ = ["plain_text"]
