"""Records which texts this process saw a template print.

Deals in hashes. A field of an implementation or of a file is a claim that anybody can make. The framework writes these
records itself, when a template prints a text or when a user's own reference becomes a program. Only such texts skip
costly checks and the rule on allowed text. Knows nothing about templates.
"""

from __future__ import annotations

from qimeng.graph.region import Region
from qimeng.program.content import digest_of
from qimeng.program.implementation import Implementation

TEXTS = ("language", "source", "entry", "prepare")

_noted: set[str] = set()


def note_printed(region: Region, implementation: Implementation) -> Implementation:
    """Record `implementation`, which a template has just printed for `region`. Only templates may call this."""
    key = _key(region, implementation)
    assert key is not None
    _noted.add(key)
    return implementation


def is_printed(region: Region, implementation: Implementation) -> bool:
    """Whether a template has printed it for `region`, or for an equal one, in this process."""
    return _key(region, implementation) in _noted


def is_plain(implementation: Implementation) -> bool:
    """Whether its texts are Python's own strings: a subclass may show another text each time that it is asked."""
    return type(implementation) is Implementation and all(type(getattr(implementation, n)) is str for n in TEXTS)


def note_reference(text: str) -> str:
    """Record `text`, a program that is the user's own reference. Only code that makes such programs may call this."""
    _noted.add(_digest("reference", text))
    return text


def is_reference(text: str) -> bool:
    """Whether it is a user's own reference, made a program in this process."""
    return type(text) is str and _digest("reference", text) in _noted


def _key(region: Region, implementation: Implementation) -> str | None:
    """None where it is no plain implementation."""
    if not is_plain(implementation):
        return None
    try:
        return _digest("printed", region.signature, implementation)
    except (TypeError, ValueError, RecursionError):  # fields that a template never fills in so
        return None


def _digest(*parts: object) -> str:
    return digest_of(*parts, size=32)  # nobody finds another text with the same one


__all__ = ["is_plain", "is_printed", "is_reference", "note_printed", "note_reference"]
