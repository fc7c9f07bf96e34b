"""The folder of an experiment with a writer: its examples, what is asked, and who is asked.

Deals in the files' names. Knows nothing about training or judging.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from qimeng.bench.writer.answering import Written, read_answers
from qimeng.bench.writer.examples import LIMITS, WORDS, Example, Split, split
from qimeng.bench.writer.judging import CopyCoder
from qimeng.coder.llm.coder import LLMCoder
from qimeng.coder.llm.words import Words
from qimeng.coder.template.coder import TemplateCoder
from qimeng.interfaces import Coder

EXAMPLES, ANSWERS, JUDGED = "examples.jsonl", "answers.jsonl", "judged.jsonl"

PARTS = ("shapes", "chains")
"""What is held out."""

CODERS = ("trained", "copy", "untrained", "template")
"""Who is judged; the template coder shows what the patches that nobody judged are worth."""


@lru_cache(1)
def read(out: Path) -> Split:
    """The examples of a folder, parted."""
    return split([Example.from_json(line) for line in (out / EXAMPLES).read_text().splitlines()])


def requests(out: Path, part: str, count: int) -> list[Example]:
    """What is asked of a part; what a judge accepted comes first. The order of keys is as good as chance."""
    return sorted(getattr(read(out), part), key=lambda e: (not e.verified, e.key))[:count]


@lru_cache(1)
def coders(out: Path) -> Mapping[str, Coder]:
    """Everyone who is judged, by name."""
    parts, answers = read(out), read_answers(out / ANSWERS)
    found: dict[str, Coder] = {"copy": CopyCoder(parts.learnt), "template": TemplateCoder()}
    for name in ("trained", "untrained"):
        chat = Written(name, answers, (*parts.shapes, *parts.chains))
        found[name] = LLMCoder(chat, again=0, words=Words(WORDS), limits=LIMITS)
    return found


__all__ = ["ANSWERS", "CODERS", "EXAMPLES", "JUDGED", "PARTS", "coders", "read", "requests"]
