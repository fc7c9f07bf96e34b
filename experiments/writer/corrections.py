"""The model's own wrong first replies, each with what the gates said and the right answer after it.

What a model gets wrong is not what a random change breaks, so it learns repairs from its own conversations, as in
DAgger (Ross et al., A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning, 2011):
the template coder knows the right answer to every request. Deals in examples and the conversations of `rl`. Knows
nothing about models.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.writer.examples import Example
from experiments.writer.folder import LEARNT, PARTS, ROUNDS, check_data, read
from experiments.writer.repairs import patch_of
from qimeng.bench.row import whole_lines
from qimeng.coder.llm.chat import ChatError, Reply
from qimeng.coder.llm.shown import shown_source
from qimeng.errors import QimengError
from qimeng.finetune.weights import FinetuneError


def corrections(out: Path, target: Path, also: int, seed: int = 0) -> dict[str, int]:
    """Begin another folder with the repairs of what the reinforcement of `out` got wrong; how many it learns.

    Args:
        out: the folder of that reinforcement.
        target: the new folder: it holds out the same, and `sft --model OUT/tuned` goes on from the same model.
        also: other examples of `out` that are learnt with them, drawn by chance.
        seed: of that.

    Raises:
        FinetuneError: there is nothing to repair, or the new folder has examples already.
    """
    check_data(out)
    if (target / f"{LEARNT}.jsonl").exists():
        raise FinetuneError(f"{target} has examples already: take another folder")
    learnt = list(read(out, LEARNT))
    own = list(corrected(read_rounds(out), {e.key: e for e in learnt}))
    if not own:
        raise FinetuneError(f"{out / ROUNDS} has no wrong reply that was answered: `benchmarks.writer rl {out}` first")
    chosen = random.Random(seed).sample(learnt, min(also, len(learnt)))
    target.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        shutil.copyfile(out / f"{part}.jsonl", target / f"{part}.jsonl")
    (target / f"{LEARNT}.jsonl").write_text("".join(f"{e.to_json()}\n" for e in (*own, *chosen)))
    return {"repairs": len(own), "others": len(chosen)}


def read_rounds(out: Path) -> Iterator[Mapping[str, Any]]:
    """The conversations of a folder's reinforcement; none where there was none."""
    path = out / ROUNDS
    return iter(map(json.loads, whole_lines(path))) if path.exists() else iter(())


def corrected(rounds: Iterable[Mapping[str, Any]], examples: Mapping[str, Example]) -> Iterator[Example]:
    """For each different wrong first reply the example in which it came first.

    None where the conversation ended with it (the machine failed, or the reply was cut off), where its request is not
    among `examples`, or where this version reads it otherwise.

    Args:
        rounds: rows of `rounds.jsonl`.
        examples: what was asked, by key.
    """
    seen: set[tuple[str, str]] = set()
    for row in rounds:
        first, example = row["turns"][0], examples.get(row["key"])
        if example is None or len(first.get("then", ())) != 2 or (row["key"], first["text"]) in seen:
            continue
        seen.add((row["key"], first["text"]))
        try:
            base = _base(example, first["text"])
        except QimengError:
            continue
        said, answered = first["then"]
        yield replace(example, failed=(said, answered), base=base)


def _base(example: Example, text: str) -> str | None:
    """What edits apply to after this reply: its code, or the present code where it cannot be read.

    Raises:
        QimengError: this version makes another program of the request.
    """
    request = example.request()
    try:
        return shown_source(patch_of(request, Reply(text)).alternatives[0])
    except ChatError:
        return example.base


__all__ = ["corrected", "corrections", "read_rounds"]
