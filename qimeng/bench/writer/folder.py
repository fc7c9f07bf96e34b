"""The folder of an experiment with a writer: its examples, what is asked, and who is asked.

Deals in the files' names. Knows nothing about training or judging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path

from qimeng.bench.writer.answering import Written, read_answers
from qimeng.bench.writer.examples import LIMITS, WORDS, Example, Split, split
from qimeng.bench.writer.judging import CopyCoder
from qimeng.coder.llm.coder import LLMCoder
from qimeng.coder.llm.words import Words
from qimeng.coder.template.coder import TemplateCoder
from qimeng.interfaces import Coder

ANSWERS, JUDGED = "answers.jsonl", "judged.jsonl"

LEARNT = "learnt"
"""What is learnt from."""

PARTS = ("shapes", "chains")
"""What is held out."""

CODERS = ("trained", "copy", "untrained", "template")
"""Who is judged; the template coder shows what the patches that nobody judged are worth."""


def write(out: Path, examples: Iterable[Example], others: Iterable[Path] = ()) -> Split:
    """Part `examples` and write each part to a file.

    Args:
        out: the folder, made where it does not exist.
        examples: of these, and of `others`, the first that asks a question is kept.
        others: folders whose examples are taken along; not `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Example] = {}
    for example in chain(examples, *(read(folder, part) for folder in others for part in (LEARNT, *PARTS))):
        kept.setdefault(example.key, example)
    parts = split(tuple(kept.values()))
    for name in (LEARNT, *PARTS):
        with open(out / f"{name}.jsonl", "w") as file:
            file.writelines(f"{example.to_json()}\n" for example in getattr(parts, name))
    return parts


def read(out: Path, part: str) -> Iterator[Example]:
    """The examples of a part, one after another."""
    with open(out / f"{part}.jsonl") as file:
        yield from map(Example.from_json, file)


def requests(out: Path, part: str, count: int | None = None) -> list[Example]:
    """What is asked of a part; what a judge accepted comes first. The order of keys is as good as chance."""
    return sorted(read(out, part), key=lambda e: (not e.verified, e.key))[:count]


@lru_cache(1)
def coders(out: Path) -> Mapping[str, Coder]:
    """Everyone who is judged, by name."""
    answers, questions = read_answers(out / ANSWERS), [e for part in PARTS for e in read(out, part)]
    copier = CopyCoder((e.traits, e.answer) for e in read(out, LEARNT))
    found: dict[str, Coder] = {"copy": copier, "template": TemplateCoder()}
    for name in ("trained", "untrained"):
        chat = Written(name, answers, questions)
        found[name] = LLMCoder(chat, again=0, words=Words(WORDS), limits=LIMITS)
    return found


__all__ = ["ANSWERS", "CODERS", "JUDGED", "LEARNT", "PARTS", "coders", "read", "requests", "write"]
