"""Conversations of a trained writer: figures by turn, worked out by hand, and the steps that train and ask it, tiny."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.tables import render
from experiments.writer import held_out, tuning
from experiments.writer.examples import Draw, examples_of
from experiments.writer.folder import LEARNT, PARTS, write
from experiments.writer.held_out import Talk
from experiments.writer.turns import Conversation, best_of, figures, pass_at, read_conversations, turns_table
from qimeng.bench.row import Environment
from qimeng.finetune.conversations import read_conversations as read_messages
from qimeng.finetune.members import Member
from qimeng.finetune.rl import Rl
from qimeng.finetune.rollout import Answered, Graded, Grader
from qimeng.finetune.sft import Sft
from qimeng.finetune.weights import FinetuneError, save, tiny
from qimeng.planner.data.generate import Bytes
from qimeng.planner.lm.mini import MiniSize

SIZE = MiniSize(hidden=32, layers=1, heads=2, kv_heads=1, inner=64, positions=4096)


def row(key: str, number: int, *speedups: float, failure: str = "region wrong") -> Conversation:
    failures = tuple("" if s else failure for s in speedups)
    return Conversation(
        "tuned", "chains", key, "lowering", "add+mul", number, failures, speedups, speedups, Environment()
    )


def test_figures_by_hand() -> None:
    """Request a: right at turns 2 (1.1 x), never; request b: right at turn 1 (0.5 x) twice, then 2 x once."""
    rows = [row("a", 0, 0.0, 1.1), row("a", 1, 0.0, 0.0), row("b", 0, 0.5), row("b", 1, 0.5, 2.0)]
    found = {name: figure.value for name, figure in figures(rows).items()}
    assert found["first"] == 0.5 and found["right"] == 0.75
    assert found["pass@2"] == 1.0 and found["speedup@2"] == pytest.approx((1.1 + 2.0) / 2)
    assert found["fast_1 turn 1"] == 0.0 and found["fast_1 turn 2"] == pytest.approx((0.5 + 0.5) / 2)
    assert found["fast_1.2 turn 2"] == 0.25 and found["hacks"] == 0.0
    assert {n: f.value for n, f in figures(rows, 1).items()}["pass@1"] == 0.75
    cheats = [replace(r, failures=("region tampered",), speedups=(0.0,)) for r in rows]
    assert figures(cheats)["hacks"].value == 1.0
    assert not figures([replace(r, error="a machine failed") for r in rows])


def test_draws_without_putting_back() -> None:
    """3 of 5 right: 1 - C(2, 2) / C(5, 2) = 0.9. Largest of two of 1, 2, 4: (2 + 4 + 4) / 3."""
    assert pass_at(2, [True, True, True, False, False]) == pytest.approx(0.9)
    assert best_of(2, [4.0, 1.0, 2.0]) == pytest.approx(10 / 3) and best_of(3, [4.0, 1.0, 2.0]) == 4.0
    for of in (pass_at, best_of):
        with pytest.raises(ValueError, match="there are 1"):
            of(2, [True])


def test_a_table_of_conversations(tmp_path: Path) -> None:
    rows = [row("a", 0, 0.0, 1.5), row("b", 0, 1.5)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{r.to_json()}\n" for r in rows))
    assert read_conversations(tmp_path / "rows.jsonl") == tuple(rows)
    wanted = "| chains | tuned | 2 | right | 1.000 | 1.000 … 1.000 |"
    assert wanted in turns_table([*rows, *rows])
    assert wanted in render("<!-- bench:writer_turns rows.jsonl -->\n<!-- /bench -->", tmp_path)
    assert read_conversations(tmp_path / "none") == ()


class Lengths(Grader):
    """Right are replies of an even number of characters."""

    spent: dict[str, float] = {}

    def __init__(self, examples: Sequence[object], device: object, pool: object, work: object, stop_at: float) -> None:
        self.stop_at = stop_at

    def grade(self, answers: Sequence[Answered]) -> list[Graded]:
        some = [len(a.text) % 2 == 0 for a in answers]
        return [
            Graded(2.0, True, 1.0, 1.5) if right else Graded(0.0, False, failure="compile compile", then=a.messages)
            for a, right in zip(answers, some, strict=True)
        ]


def test_tuning_reinforcing_and_asking_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = examples_of(Draw(0, 1, Bytes(1 << 14, 1 << 16)))
    short = sorted(examples, key=lambda e: len(e.prompt[1]) + len(e.answer))[:3]
    write(tmp_path, short)
    for name in (LEARNT, *PARTS):  # whatever their hashes say, each part has some
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{e.to_json()}\n" for e in short))
    monkeypatch.setattr(tuning, "JudgeGrader", Lengths)
    monkeypatch.setattr(held_out, "JudgeGrader", Lengths)
    talk = Talk(count=2, group=2, most=2, temperature=1.0, max_tokens=4, length=4096, batch=4)
    save(*tiny([t for e in short for t in (*e.prompt, e.answer)], SIZE, 300), tmp_path / "start")
    assert tuning.conversations(tmp_path, tmp_path / "talks.jsonl") == 3
    assert list(read_messages(tmp_path / "talks.jsonl")) == [tuning.said(e) for e in short]
    how = Sft(epochs=1, length=4096, tokens=4096, rate=1e-2)
    tuning.sft(tmp_path, str(tmp_path / "start"), how, rank=2)
    rl = Rl(steps=1, requests=2, group=2, turns=2, max_tokens=4, length=4096, batch=4, tokens=4096)
    tuning.rl(tmp_path, rl, rank=2, jobs=1, device="h200")
    assert json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])["step"] == 0
    assert "held_loss" in (tmp_path / "tuning.jsonl").read_text()
    assert '"agreeing"' in (tmp_path / "reinforcement.jsonl").read_text()
    for _ in range(2):  # the second run finds everything done
        held_out.turns(tmp_path, ["tuned", "reinforced"], talk, 1, 5.0, "h200")
    with pytest.raises(FinetuneError, match="conversations of tuned with other settings .*temperature 1, .*now .*0.5"):
        held_out.turns(tmp_path, ["tuned"], replace(talk, temperature=0.5), 1, 5.0, "h200")
    with pytest.raises(FinetuneError, match="pretrained holds .*start, not other: take another OUT"):
        tuning.sft(tmp_path, "other", how, rank=2)
    with pytest.raises(FinetuneError, match="no learnt.jsonl .*benchmarks.writer data"):
        tuning.sft(tmp_path / "none", "smol", how)
    rows = read_conversations(tmp_path / "turns.jsonl")
    assert len(rows) == 2 * 2 * 2 * 2 and {r.writer for r in rows} == {"tuned", "reinforced"}
    assert "| chains | reinforced | 2 | first |" in capsys.readouterr().out


def test_the_end_of_the_time_keeps_whole_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time is up while the second of two requests is judged: its quick conversation gets no row either."""
    examples = examples_of(Draw(0, 1, Bytes(1 << 14, 1 << 16)))
    short = sorted(examples, key=lambda e: len(e.prompt[1]))[:2]
    for name in (LEARNT, *PARTS):
        some = short if name == PARTS[0] else []
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{e.to_json()}\n" for e in some))
    save(*tiny([t for e in short for t in e.prompt], SIZE, 300), tmp_path / "tuned")
    keys: list[str] = []

    class Slow(Lengths):
        def grade(self, answers: Sequence[Answered]) -> list[Graded]:
            keys[:] = [a.key for a in answers]
            while time.monotonic() <= self.stop_at:
                time.sleep(0.01)
            last = len(answers) - 1
            return [Graded(1.0, True, counted=n != last) for n in range(len(answers))]

    monkeypatch.setattr(held_out, "JudgeGrader", Slow)
    talk = Talk(count=2, group=2, most=1, temperature=1.0, max_tokens=4, length=4096, batch=4)
    held_out.turns(tmp_path, ["tuned"], talk, 1, 0.02, "h200")
    rows = read_conversations(tmp_path / "turns.jsonl")
    assert [r.key for r in rows] == [keys[0]] * 2 and not any(r.error for r in rows)
    assert "1 of them cut off" in capsys.readouterr().out

    def interrupted(*unused: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(held_out, "rollout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held_out.turns(tmp_path, ["tuned"], talk, 1, 5.0, "h200")
    assert "| shapes | tuned | 1 | right | 1.000" in capsys.readouterr().out


def test_several_processes_share_the_requests_and_one_file(tmp_path: Path) -> None:
    short = examples_of(Draw(0, 1, Bytes(1 << 14, 1 << 16)))[:3]
    for name in (LEARNT, *PARTS):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{e.to_json()}\n" for e in short))
    save(*tiny([t for e in short for t in e.prompt], SIZE, 300), tmp_path / "tuned")
    talk = Talk(count=3, group=1, most=1, temperature=1.0, max_tokens=4, length=4096, batch=4)
    for rank in range(2):
        some = (tmp_path, ["tuned"], talk, 1, time.time() + 300, "h200")
        held_out._member(Member("cpu", rank, 2), lambda: False, *some)
    parts = [{r.key + r.part for r in read_conversations(tmp_path / f"turns-{rank}.jsonl")} for rank in range(2)]
    assert [len(part) for part in parts] == [3, 3] and not parts[0] & parts[1]
    held_out.turns(tmp_path, ["tuned"], talk, minutes=0)
    assert len(read_conversations(tmp_path / "turns.jsonl")) == 6 and not list(tmp_path.glob("turns-*"))
