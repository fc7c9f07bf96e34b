"""Reinforcement over turns: what is drawn and how likely it was, who is compared with whom, and that rewards rise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.coder.llm.chat import Message
from qimeng.finetune.conversations import Row, batch_of, log_probabilities
from qimeng.finetune.decoding import check_attention
from qimeng.finetune.rl import Rl, Sample, reinforce, samples_of, summary, update
from qimeng.finetune.rollout import Answered, Asked, Graded, Grader, Trajectory, Turn, rollout
from qimeng.finetune.sampling import Sampled, Sampler
from qimeng.finetune.weights import FinetuneError, adapted, tiny, trained
from qimeng.planner.lm.mini import MiniSize

SIZE = MiniSize(hidden=32, layers=1, heads=2, kv_heads=1, inner=64, positions=256)

ASKED = [Asked(key, (Message("user", f"write {key}"),)) for key in ("one", "two")]

HOW = Rl(steps=40, requests=2, group=8, turns=2, max_tokens=6, length=96, batch=16, tokens=1024, rate=1e-2)


class Digits(Grader):
    """A fake judge: right are replies of which more than half is digits; wrong ones may be repaired."""

    def __init__(self) -> None:
        self.seen: list[Answered] = []

    def grade(self, answers: Sequence[Answered]) -> list[Graded]:
        self.seen += answers
        return [self.one(a) for a in answers]

    def one(self, answer: Answered) -> Graded:
        share = sum(c.isdigit() for c in answer.text) / max(len(answer.text), 1)
        if share > 0.5:
            return Graded(1.0 + share, True, 1.0, speedup=share)
        then = (*answer.messages, Message("assistant", answer.text), Message("user", "more digits"))
        return Graded(share, False, failure="region wrong", then=then)


@pytest.fixture
def model() -> tuple[Any, Any]:
    return tiny(["write one two more digits 0123456789"], SIZE, 260)


def test_draws_are_as_likely_as_the_sampler_says(model: tuple[Any, Any]) -> None:
    lm, tokenizer = model
    sampler = Sampler(lm, tokenizer, temperature=0.7, max_tokens=5, length=64, batch=3)
    asked = [(Message("user", text),) for text in ("a", "write one", "write two digits", "x" * 200)]
    found = sampler.sample(asked, 3)
    again = sampler.sample(asked, 3)
    assert [s.row for s in found] == [s.row for s in again] != [s.row for s in sampler.sample(asked, 4)]
    assert found[3].text == "" and not found[3].finished and not found[3].row.reply
    for s in found[:3]:
        with torch.no_grad():
            wanted = log_probabilities(lm, batch_of([s.row], [0]), 0.7)
        assert torch.allclose(s.log_probabilities, wanted, atol=1e-4)
        assert len(s.row.reply) == 5 or s.finished
    likeliest = Sampler(lm, tokenizer, temperature=0.0, max_tokens=5, length=64, batch=3)
    (one,), (other,) = likeliest.sample(asked[:1], 0), likeliest.sample(asked[:1], 1)
    assert one.row == other.row
    with torch.no_grad():
        wanted = log_probabilities(lm, batch_of([one.row], [0]))
    assert torch.allclose(one.log_probabilities, wanted, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_the_sampler_and_the_trainer_agree(model: tuple[Any, Any]) -> None:
    lm, tokenizer = model
    lm = adapted(lm.to(device="cuda", dtype=torch.bfloat16), 4)
    sampler = Sampler(lm, tokenizer, max_tokens=32, length=128, batch=4)
    asked = [(Message("user", text),) for text in ("a", "write one", "write two digits")]
    for seed in range(3):  # the second call replays what the first one recorded
        for s in sampler.sample(asked, seed):
            with torch.no_grad():
                trainer = log_probabilities(lm, batch_of([s.row], [0]).to("cuda")).cpu()
            assert torch.allclose(s.log_probabilities, trainer, atol=0.1)
            assert abs(float((s.log_probabilities - trainer).mean())) < 0.02


def test_a_reply_ends_with_its_end(model: tuple[Any, Any]) -> None:
    lm, tokenizer = model
    sampler = Sampler(lm, tokenizer, max_tokens=400, length=500, batch=4)
    lm.config.max_position_embeddings = 1024
    found = sampler.sample([(Message("user", "a"),)] * 4, 0)
    ended = [s for s in found if s.finished]
    assert ended and all(s.row.reply.index(tokenizer.eos_token_id) == len(s.row.reply) - 1 for s in ended)
    assert all(len(s.log_probabilities) == len(s.row.reply) for s in found)


def test_a_model_that_does_not_see_all_tokens_is_refused(model: tuple[Any, Any]) -> None:
    from transformers import Gemma3TextConfig

    lm, tokenizer = model
    some = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Gemma3TextConfig(vocab_size=99, sliding_window=64, **some)
    check_attention(config, 64)
    with pytest.raises(FinetuneError, match="'gemma3_text' have a window of 64 tokens"):
        check_attention(config, 65)
    lm.config.sliding_window = 64
    with pytest.raises(FinetuneError, match="see all 100 tokens"):
        Sampler(lm, tokenizer, length=100)


def test_dropout_does_not_part_the_trainer_from_the_sampler(model: tuple[Any, Any]) -> None:
    lm, tokenizer = model
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    sampler = Sampler(lm, tokenizer, max_tokens=6, length=64, batch=2)
    lm.train()
    drawn = sampler.sample([(Message("user", text),) for text in ("a", "write one")], 0)
    samples = [
        Sample(s.row, s.log_probabilities, gain, n, True)
        for n, (s, gain) in enumerate(zip(drawn, (1.0, -1.0), strict=True))
    ]
    found = update(lm, torch.optim.SGD(lm.parameters(), lr=0.0), samples, HOW, random.Random(0))
    assert found["agreeing"] == 1.0 and found["learnt"] == 2.0 and found["clipped"] == 0.0
    assert found["loss"] == pytest.approx(0.0, abs=1e-6) or len(drawn[0].row.reply) != len(drawn[1].row.reply)


def test_a_round_that_no_machine_judged_changes_nothing(model: tuple[Any, Any], tmp_path: Path) -> None:
    lm, tokenizer = model

    class Late(Grader):
        def grade(self, answers: Sequence[Answered]) -> list[Graded]:
            return [Graded(0.0, False, failure="judge", counted=False) for _ in answers]

    before = {name: p.clone() for name, p in lm.named_parameters()}
    found = reinforce(lm, tokenizer, ASKED, Late(), replace(HOW, steps=1), tmp_path)
    assert found["counted"] == 0.0 and found["learnt"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())


def test_conversations_go_on_until_they_are_right(model: tuple[Any, Any]) -> None:
    lm, tokenizer = model
    judge = Digits()
    sampler = Sampler(lm, tokenizer, max_tokens=3, length=96, batch=4)
    found = rollout(sampler, judge, ASKED, 3, 3, seed=0)
    assert [one.key for one in found] == ["one"] * 3 + ["two"] * 3
    for n, one in enumerate(found):
        assert all(not turn.graded.right for turn in one.turns[:-1])
        assert len(one.turns) == 3 or one.turns[-1].graded.right
        own = [a for a in judge.seen if a.place == n]
        assert [len(a.messages) for a in own] == [1, 3, 5][: len(own)] and len(own) == len(one.turns)
        assert own[-1].messages[0] == Message("user", f"write {one.key}")

    class Silent(Grader):
        def grade(self, answers: Sequence[Answered]) -> list[Graded]:
            return []

    with pytest.raises(ValueError, match="one for each"):
        rollout(sampler, Silent(), ASKED, 2, 1, seed=0)


def trajectory(key: str, *rewards: float, share: float = 1.0, counted: bool = True) -> Trajectory:
    turns = []
    for number, reward in enumerate(rewards):
        sampled = Sampled(Row((1, 2, 3, 4), 2), torch.full((2,), -1.0), "", True)
        turns.append(Turn(sampled, Graded(reward, reward > 0, share, reward, counted=counted or number == 0)))
    return Trajectory(key, tuple(turns))


def test_replies_are_compared_within_request_and_turn() -> None:
    """Returns: (3, 3), (1), (4) of one request: first turns 3, 1, 4 against means of 2.5, 3.5 and 2; turn 1 alone."""
    some = [trajectory("a", 0.0, 3.0), trajectory("a", 1.0), trajectory("a", 4.0), trajectory("b", 2.0)]
    found = samples_of(some, HOW, random.Random(0))
    assert [s.advantage for s in found] == pytest.approx([0.5, 0.0, -2.5, 2.0, 0.0])
    assert [s.trajectory for s in found] == [0, 0, 1, 2, 3] and all(s.kept for s in found)
    late = samples_of(some, replace(HOW, gamma=0.5), random.Random(0))  # returns 1.5, 3; 1; 4
    assert [s.advantage for s in late] == pytest.approx([-1.0, 0.0, -1.75, 2.75, 0.0])
    assert summary(some) == {"reward": 2.5, "first_right": 0.75, "right": 1.0, "speedup": 2.5, "counted": 1.0}


def test_what_the_machine_failed_is_in_no_baseline() -> None:
    some = [trajectory("a", 0.0), trajectory("a", 2.0), trajectory("a", 9.0, 9.0, counted=False)]
    assert [s.advantage for s in samples_of(some, HOW, random.Random(0))] == pytest.approx([-2.0, 2.0])
    assert summary(some)["counted"] == pytest.approx(2 / 3)


def test_right_replies_that_do_little_are_dropped_by_chance() -> None:
    some = [trajectory("a", 0.0, share=0.0), *(trajectory("a", 1.0, share=0.3) for _ in range(4))]
    assert [s.kept for s in samples_of(some, HOW, random.Random(0))] == [True] + [False] * 4
    assert all(s.kept for s in samples_of(some, replace(HOW, shares=False), random.Random(0)))


def test_what_the_sampler_saw_otherwise_is_dropped(model: tuple[Any, Any]) -> None:
    lm, _ = model
    rows = [Row((5, 6, 7, 8, 9), 2), Row((5, 6, 9, 8), 2)]
    with torch.no_grad():
        right = [log_probabilities(lm, batch_of([row], [0])) for row in rows]
    samples = [Sample(rows[0], right[0], 1.0, 0, True), Sample(rows[1], right[1] - 0.01, 1.0, 1, True)]
    optimizer = torch.optim.AdamW(trained(lm).values(), lr=1e-3)
    dropped = update(lm, optimizer, samples, HOW, random.Random(0))
    assert dropped["learnt"] == 1 and dropped["agreeing"] == 0.5 and dropped["loss"] == pytest.approx(-1.0)
    with torch.no_grad():  # a positive advantage makes its reply likelier
        assert log_probabilities(lm, batch_of([rows[0]], [0])).sum() > right[0].sum()
    assert update(lm, optimizer, samples, replace(HOW, mismatch=False), random.Random(0))["learnt"] == 2
    nothing = update(lm, optimizer, [replace(samples[0], advantage=0.0)], HOW, random.Random(0))
    assert nothing["learnt"] == 0 and nothing["loss"] == 0


@pytest.mark.parametrize("advantages", ["leave-one-out", "grpo"])
def test_the_reward_rises(model: tuple[Any, Any], tmp_path: Path, advantages: str) -> None:
    lm, tokenizer = model
    rows: list[dict[str, float]] = []
    how = replace(HOW, advantages=advantages, steps=25, updates=2)
    reinforce(lm, tokenizer, ASKED, Digits(), how, tmp_path, on_row=lambda row: rows.append(dict(row)))
    first, last = rows[:5], rows[-5:]
    assert sum(r["reward"] for r in last) > 3 * sum(r["reward"] for r in first)
    assert sum(r["first_right"] for r in last) / 5 > 0.5 > 0.2 > sum(r["first_right"] for r in first) / 5
    assert all(r["agreeing"] == 1.0 and abs(r["ratio"] - 1) < 1e-4 for r in rows)


def test_a_killed_run_continues_where_it_was(tmp_path: Path) -> None:
    how, ends = replace(HOW, steps=4), []
    for name, stops in (("whole", [False] * 9), ("parts", [False, False, True])):
        for _ in range(2):
            lm, tokenizer = tiny(["write one two more digits 0123456789"], SIZE, 260)
            lm = adapted(lm, 2)
            looks = iter(stops)
            stopped = lambda looks=looks: next(looks, False)  # noqa: E731
            seen: list[int] = []
            last = reinforce(
                lm,
                tokenizer,
                ASKED,
                Digits(),
                how,
                tmp_path / name,
                stopped=stopped,
                on_trajectories=lambda step, some, seen=seen: seen.append(step),
            )
            stops = []
        ends.append((last["step"], {name: p.detach().clone() for name, p in trained(lm).items()}))
        assert seen == ([] if name == "whole" else [2, 3])
    assert ends[0][0] == ends[1][0] == 4
    assert all(torch.allclose(p, ends[1][1][name], atol=1e-5) for name, p in ends[0][1].items())


def test_settings_that_teach_nothing(model: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="at least 2"):
        Rl(group=1)
    with pytest.raises(FinetuneError, match="above 0"):
        Rl(temperature=0.0)
    with pytest.raises(FinetuneError, match="leave-one-out, grpo"):
        Rl(advantages="ppo")
    with pytest.raises(FinetuneError, match="no request"):
        reinforce(*model, [], Digits(), HOW, tmp_path)
