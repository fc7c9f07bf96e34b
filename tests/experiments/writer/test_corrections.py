"""What a model got wrong becomes repairs that it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.writer.corrections import corrected, corrections
from experiments.writer.examples import Draw, Example, examples_of
from experiments.writer.folder import LEARNT, PARTS, ROUNDS, read
from qimeng.finetune.weights import FinetuneError
from qimeng.planner.data.generate import Bytes


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    found = [e for n in range(2) for e in examples_of(Draw(n, 1, Bytes(1 << 14, 1 << 16)))]
    return [e for e in found if e.traits.kind == "lowering"][:2]


def row(key: str, text: str, *then: str) -> dict[str, Any]:
    return {"key": key, "turns": [{"text": text, "then": list(then)}, {"text": "second", "then": []}]}


def test_each_wrong_first_reply_becomes_a_repair(examples: list[Example]) -> None:
    first, second = examples
    wrong = first.reply.replace("num_warps=", "num_stages=9, num_warps=")
    rounds = [
        row(first.key, wrong, "code", "it is wrong"),
        row(first.key, wrong, "code", "it is wrong"),
        row(second.key, "no code", "no code", "that is none"),
        row(second.key, second.reply),
        row("unknown", "no code", "no code", "that is none"),
    ]
    one, other = corrected(rounds, {e.key: e for e in examples})
    assert one.failed == ("code", "it is wrong") and "num_stages=9" in str(one.base)
    assert one.answer == first.answer and one.messages[2].text == "code"
    assert len(one.reply) < len(first.reply), "edits of the refused code"
    assert other.failed == ("no code", "that is none") and other.base == second.base


def test_another_folder_begins_with_them(examples: list[Example], tmp_path: Path) -> None:
    for name in (LEARNT, *PARTS):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{e.to_json()}\n" for e in examples))
    new = tmp_path / "new"
    with pytest.raises(FinetuneError, match="no wrong reply that was answered"):
        corrections(tmp_path, new, 1)
    (tmp_path / ROUNDS).write_text(json.dumps(row(examples[0].key, "no code", "no code", "that is none")) + "\n")
    assert corrections(tmp_path, new, 1) == {"repairs": 1, "others": 1}
    assert [e.failed is None for e in read(new, LEARNT)] == [False, True]
    assert list(read(new, PARTS[0])) == examples
    with pytest.raises(FinetuneError, match="has examples already"):
        corrections(tmp_path, new, 1)
