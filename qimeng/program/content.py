"""Hashes of plain data: equal data has equal hashes, in every process and under every version.

Deals in numbers, texts, containers and dataclasses of these. Knows nothing about what they mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any


def digest_of(*parts: Any, size: int = 8) -> str:
    """Hash of `parts`, two hexadecimal digits for each of `size` bytes.

    Types count: 1, 1.0, True and "1" are four different things; a tuple is a list. Of a dataclass, fields that have
    their default value are left out, so that a new field with a default changes no hash.

    Raises:
        TypeError: `parts` hold an object whose text says where it is in memory.
    """
    return digest_of_texts([text_of(part) for part in parts], size)


def digest_of_texts(texts: Iterable[str], size: int = 8) -> str:
    """What `digest_of` gives for parts of which `text_of` made `texts`, which may be kept."""
    return hashlib.blake2b(list_of(texts).encode(), digest_size=size).hexdigest()


def text_of(item: Any) -> str:
    """`plain` data as the text that is hashed.

    Raises:
        TypeError: see `digest_of`.
    """
    return json.dumps(plain(item), separators=(",", ":"))


def list_of(texts: Iterable[str]) -> str:
    """The text of a list from those of its items."""
    return f"[{','.join(texts)}]"


def plain(item: Any) -> Any:
    """`item` as data that JSON writes in one way; whatever is no list and no scalar of JSON's is a dict with one key.

    >>> plain((1, 2.5, {"a": None}))
    [1, {'float': '2.5'}, {'map': [['a', None]]}]
    """
    if item is None or isinstance(item, (bool, str)):
        return item
    if isinstance(item, int):
        return int(item)
    if isinstance(item, (float, complex)):
        return {type(item).__name__: repr(item)}
    if isinstance(item, (tuple, list)):
        return [plain(part) for part in item]
    if isinstance(item, (set, frozenset)):
        return {"set": sorted((plain(part) for part in item), key=json.dumps)}
    if isinstance(item, Mapping):
        return {"map": sorted(([plain(k), plain(v)] for k, v in item.items()), key=json.dumps)}
    if is_dataclass(item) and not isinstance(item, type):
        values = {f.name: getattr(item, f.name) for f in fields(item)}
        unusual = [f.name for f in fields(item) if not _usual(f, values[f.name])]
        return {type(item).__name__: [[name, plain(values[name])] for name in unusual]}
    if " at 0x" in repr(item):  # dtypes, layouts and devices have a text of their own
        raise TypeError(f"no hash of a {type(item).__qualname__}: only plain data has one, got {item!r}")
    return {type(item).__name__: repr(item)}


def _usual(field: Field[Any], value: Any) -> bool:
    """Whether a field has its default; 0 is no default of False."""
    if field.default is not MISSING:
        usual = field.default
    elif field.default_factory is not MISSING:
        usual = field.default_factory()
    else:
        return False
    return type(value) is type(usual) and bool(value == usual)


__all__ = ["digest_of", "digest_of_texts", "list_of", "plain", "text_of"]
