"""What a user's words say about sizes and dtypes, and whether a file agrees.

Deals in text and shapes. Knows nothing about models or processes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

_DTYPES = {
    "float16": r"fp16|float16|half(?:[ -]precision)?",
    "bfloat16": r"bf16|bfloat16",
    "float32": r"fp32|float32|single[ -]precision",
    "float64": r"fp64|float64|double[ -]precision",
}
_NUMBER = r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?(?:e-?\d+)?(?:\s?[kK]\b)?"
_PRODUCT = re.compile(rf"(?<![\w.])({_NUMBER})((?:\s*(?:x|×|\*|by)\s*(?:{_NUMBER}))+)", re.I)
_ALONE = re.compile(rf"(?<![\w.-])({_NUMBER})(?![\w.])")


@dataclass(frozen=True)
class Stated:
    """What words state.

    Attributes:
        dtype: the floating dtype; empty where none or several are named.
        shapes: extents that stand together (``512 x 512``), each with the numbers it may mean.
        sizes: all whole numbers above 1, likewise.
    """

    dtype: str
    shapes: tuple[tuple[frozenset[int], ...], ...]
    sizes: tuple[frozenset[int], ...]


def read_words(words: str) -> Stated:
    """What `words` state; ``4k`` means 4096 or 4000.

    >>> stated = read_words("batched product, batch 32, fp16, 512 x 512, eps 1e-5")
    >>> stated.dtype, [sorted(s)[0] for s in stated.sizes], len(stated.shapes)
    ('float16', [32, 512, 512], 1)
    """
    rest, named = words, []
    for dtype, pattern in _DTYPES.items():
        rest, count = re.subn(rf"\b(?:{pattern})\b", " ", rest, flags=re.I)
        named += [dtype] * bool(count)
    rest = re.sub(r"\b(?:u?int|float)\d+\b", " ", rest, flags=re.I)
    shapes = []
    for first, others in _PRODUCT.findall(rest):
        extents = [_meaning(n) for n in (first, *re.findall(_NUMBER, others))]
        if all(extents):
            shapes.append(tuple(extents))
    apart = re.sub(r"(?<=\d)\s*[x×*]\s*(?=\d)", " ", rest)
    sizes = tuple(s for n in _ALONE.findall(apart) if (s := _meaning(n)) and max(s) > 1)
    return Stated(named[0] if len(named) == 1 else "", tuple(shapes), sizes)


def disagreement(stated: Stated, shapes: Sequence[Sequence[int]], text: str) -> str | None:
    """What of the words' sizes is not in a file, in words; None where all are.

    A size counts as there where it is an extent of an input, a parameter or an output, or stands in the text; extents
    that stand together must be neighbours, in this order or its reverse.

    Args:
        stated: by the words.
        shapes: of the inputs, parameters and outputs.
        text: the file's.
    """
    have = {n for shape in shapes for n in shape} | {
        node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and type(node.value) is int
    }
    for size in stated.sizes:
        if not size & have:
            return f"the words say {min(size)}, but no input, parameter or output has such an extent"
    for extents in stated.shapes:
        if not any(_within(wanted, shape) for shape in shapes for wanted in (extents, extents[::-1])):
            said = " x ".join(str(min(e)) for e in extents)
            seen = ", ".join("x".join(map(str, s)) for s in shapes)
            return f"the words say {said}, but the inputs, parameters and outputs have the shapes {seen}"
    return None


def _meaning(number: str) -> frozenset[int]:
    """The whole numbers that a number in words may mean; none for a fraction."""
    digits = number.replace(",", "").strip()
    thousands = digits[-1:] in "kK"
    try:
        value = int(digits.rstrip("kK "))
    except ValueError:
        return frozenset()
    return frozenset({value * 1024, value * 1000} if thousands else {value})


def _within(extents: Sequence[frozenset[int]], shape: Sequence[int]) -> bool:
    """Whether `extents` are neighbours in `shape`."""
    return any(
        all(n in e for n, e in zip(shape[start:], extents, strict=False))
        for start in range(len(shape) - len(extents) + 1)
    )


__all__ = ["Stated", "disagreement", "read_words"]
