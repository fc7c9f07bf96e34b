"""The folder of an experiment with a writer: its examples, what is asked, and who is asked.

Deals in the files' names. Knows nothing about training or judging.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from experiments.writer.answering import Written, read_answers
from experiments.writer.copying import CopyCoder, worth_copying
from experiments.writer.edits import with_lines_of
from experiments.writer.examples import LIMITS, WORDS, Example, Split, split
from experiments.writer.repairs import repairs
from experiments.writer.symbolic import Code, Expressions
from qimeng.coder.llm.coder import LLMCoder
from qimeng.coder.llm.words import Words
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.sandbox.layer import end_with_parent
from qimeng.finetune.weights import FinetuneError
from qimeng.interfaces import Coder

ANSWERS, JUDGED = "answers.jsonl", "judged.jsonl"

LEARNT = "learnt"
"""What is learnt from."""

PARTS = ("shapes", "chains")
"""What is held out."""

ROUNDS = "rounds.jsonl"
"""Conversations of a reinforcement."""

COUNTED = 2_000
"""Examples, about, on which expressions are counted."""

ASKED = 250
"""Examples of each part that are kept: none of the others is ever asked."""

COPIED, NEAREST = "copied", 8
"""What a copier can copy: of what is learnt, so many examples for each that is asked."""

CODERS = ("trained", "copy", "untrained", "template")
"""Who is judged; the template coder shows what the patches that nobody judged are worth."""


def write(out: Path, examples: Iterable[Example], processes: int = 1, share: float = 0.0) -> Split:
    """Part `examples` and write each part to a file, what is asked with what is worth copying for it.

    Args:
        out: the folder, made where it does not exist.
        examples: their answers as the template coder prints them.
        processes: that put expressions in the place of these answers' numbers.
        share: of what is learnt that is learnt once more as a repair (`experiments.writer.repairs`).
    """
    out.mkdir(parents=True, exist_ok=True)
    whole = split(tuple(examples))
    parts = Split(*_expressed((whole.learnt, _first(whole.shapes, ASKED), _first(whole.chains, ASKED)), processes))
    if share:
        parts = replace(parts, learnt=(*parts.learnt, *repairs(parts.learnt, share, processes)))
    copied = worth_copying([e for e in parts.learnt if e.failed is None], (*parts.shapes, *parts.chains), NEAREST)
    for name, some in ((LEARNT, parts.learnt), ("shapes", parts.shapes), ("chains", parts.chains), (COPIED, copied)):
        with open(out / f"{name}.jsonl", "w") as file:
            file.writelines(f"{example.to_json()}\n" for example in some)
    return parts


def _expressed(parts: Sequence[tuple[Example, ...]], processes: int) -> Iterator[tuple[Example, ...]]:
    """The examples with expressions in the place of numbers, those that explain most of what is learnt."""
    learnt = parts[0]
    expressions = Expressions.of(map(_code, learnt[:: max(1, len(learnt) // COUNTED)]))
    several = ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) if processes > 1 else nullcontext()
    with several as pool:
        for part in parts:
            codes = map(_code, part)
            work = expressions.write
            some = max(1, len(part) // (8 * processes))  # what was counted goes with each
            written = pool.map(work, codes, chunksize=some) if pool is not None else map(work, codes)
            yield tuple(_answered(example, answer) for example, answer in zip(part, written, strict=True))


def _answered(example: Example, answer: str) -> Example:
    """The example with expressions in the lines that its step changes."""
    return replace(
        example, answer=answer if example.base is None else with_lines_of(example.base, example.answer, answer)
    )


def _code(example: Example) -> Code:
    return Code(example.answer, example.extents, example.prompt[1])


def check_data(out: Path) -> None:
    """Refuse a folder without examples before a model is loaded.

    Raises:
        FinetuneError: a file is missing.
    """
    missing = [f"{part}.jsonl" for part in (LEARNT, *PARTS) if not (out / f"{part}.jsonl").exists()]
    if missing:
        raise FinetuneError(f"{out} has no {' and no '.join(missing)}: `python -m benchmarks.writer data {out}` first")


def read(out: Path, part: str) -> Iterator[Example]:
    """The examples of a part, one after another."""
    with open(out / f"{part}.jsonl") as file:
        yield from map(Example.from_json, file)


def requests(out: Path, part: str, count: int | None = None) -> list[Example]:
    """What is asked of a part."""
    return list(_first(read(out, part), count))


def _first(examples: Iterable[Example], count: int | None) -> tuple[Example, ...]:
    """`count` of `examples`, what a judge accepted first. The order of keys is as good as chance."""
    return tuple(sorted(examples, key=lambda e: (not e.verified, e.key))[:count])


@lru_cache(1)
def coders(out: Path) -> Mapping[str, Coder]:
    """Everyone who is judged, by name."""
    answers, questions = read_answers(out / ANSWERS), [e for part in PARTS for e in read(out, part)]
    copier = CopyCoder((e.traits, e.answer) for e in read(out, COPIED))
    found: dict[str, Coder] = {"copy": copier, "template": TemplateCoder()}
    for name in ("trained", "untrained"):
        chat = Written(name, answers, questions)
        found[name] = LLMCoder(chat, again=0, words=Words(WORDS), limits=LIMITS)
    return found


__all__ = [
    "ANSWERS",
    "CODERS",
    "JUDGED",
    "LEARNT",
    "PARTS",
    "ROUNDS",
    "check_data",
    "coders",
    "read",
    "requests",
    "write",
]
