"""States and actions as token ids, the same for environments and planners; the tokenizer that reads them."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from stable_baselines3.common.env_checker import check_env

from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.planner.lm import reading
from qimeng.planner.lm.corpus import corpus, random_walk
from qimeng.planner.lm.mini import END, MiniSize, make_mini, train_tokenizer
from qimeng.planner.lm.reading import PAD, PROMPT, Reader, ReadObservation, Text, short_names, state_and_actions


def words(reader: Reader, ids: np.ndarray) -> str:
    return reader.tokenizer.decode(ids[ids != PAD])


# ---- texts


def test_regions_are_named_by_their_place(task: Task) -> None:
    for seen in random_walk(task, 8, seed=1):
        state, actions = state_and_actions(seen)
        assert not re.search(r"\br[0-9a-f]{8}\b", state + " ".join(actions))
        assert state.endswith(PROMPT) and actions[0] == "stop"
        assert len(set(actions)) == len(seen.actions)
        regions = [line.split()[0] for line in state.split("regions")[1].split("\n")[1 : len(seen.program.regions) + 1]]
        assert regions == [f"r{i + 1}" for i in range(len(regions))]


def test_names_that_are_no_region_stay() -> None:
    assert short_names(["relu r2 deadbeef x98eeb523", "rdeadbeef"]) == ("relu r2 deadbeef x98eeb523", "r1")


# ---- ids


def test_what_is_read_is_what_was_printed(task: Task, reader: Reader) -> None:
    seen = list(random_walk(task, 4))[-1]
    state, actions = state_and_actions(seen)
    arrays = reader.arrays(seen)
    assert words(Reader(reader.tokenizer, 4096, 24), reader.ids("a b", [])["state_ids"]) == "a b"
    rows = arrays["action_ids"].reshape(MAX_ACTIONS, -1)
    assert [words(reader, row) for row in rows[: len(actions)]] == [a + END for a in actions]
    assert (rows[len(actions) :] == PAD).all()
    long = Reader(reader.tokenizer, 4096).ids(state, [])["state_ids"]
    assert words(reader, long) == state and long[-1] != PAD


def test_many_are_read_as_one_is(task: Task, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TOGETHER", 2)
    seen = list(random_walk(task, 4))
    for row, one in zip(reader.rows([Text.of(s) for s in seen]), map(reader.arrays, seen), strict=True):
        assert row.keys() == one.keys() and all(np.array_equal(row[k], one[k]) for k in row)


def test_a_long_state_loses_its_middle(reader: Reader) -> None:
    tokens = reader.tokenizer("0 1 2 3 4 5 6 7 8 9")["input_ids"]
    short = Reader(reader.tokenizer, 8).ids("0 1 2 3 4 5 6 7 8 9", [])["state_ids"]
    assert short.tolist() == tokens[:6] + tokens[-2:]


def test_a_long_action_keeps_its_end(reader: Reader) -> None:
    row = Reader(reader.tokenizer, 8, 4).ids("", ["1 2 3 4 5 6"])["action_ids"][:4]
    assert words(reader, row).endswith(END) and (row != PAD).all()


def test_a_tokenizer_without_an_end_is_refused(reader: Reader) -> None:
    class Endless:
        eos_token_id = None

    with pytest.raises(ValueError, match="set tokenizer.eos_token"):
        Reader(Endless())


def test_the_environment_passes_the_checker(task: Task, reader: Reader) -> None:
    env = ReadObservation(KernelOptimizationEnv(task, max_steps=8), reader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    found, _ = env.reset(seed=0)
    assert env.action_masks().sum() == (found["action_ids"].reshape(MAX_ACTIONS, -1)[:, 0] != PAD).sum() > 1
    np.testing.assert_array_equal(found["state_ids"], reader.arrays(env.unwrapped.observed)["state_ids"])


# ---- the tokenizer and the model


def test_the_tokenizer_is_decided_by_its_texts_and_reads_any(task: Task) -> None:
    one, two = (train_tokenizer(corpus([task], 1), 400) for _ in range(2))
    assert one.get_vocab() == two.get_vocab() and len(one) <= 400
    text = "state §∂ 3.14e-7 \t\n unheard-of"
    assert one.decode(one(text)["input_ids"]) == text
    assert not [t for t in one.get_vocab() if t != END and re.search(r"\d[^\dA-Za-z_]|[^\W\d_ĠĊ][^\w]", t)]


def test_a_tokenizer_needs_room_for_every_byte() -> None:
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(["a"], 100)


def test_the_mini_model_is_decided_by_its_seed_and_small(tiny: MiniSize) -> None:
    import torch

    one, two, other = make_mini(300, tiny, 1), make_mini(300, tiny, 1), make_mini(300, tiny, 2)
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and any(not torch.equal(a, c) for a, _, c in pairs)
    assert sum(p.numel() for p in make_mini(2048).parameters()) * 2 < 12e6
