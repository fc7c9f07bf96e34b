"""Planners of the first observation are read with the values that they had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qimeng.envs.gym.observation import FEATURES, REGION_SLOTS
from qimeng.envs.gym.words import WIDTH, vector
from qimeng.envs.steps.task import Task
from qimeng.errors import WeightsError
from qimeng.planner.lm.corpus import random_walk
from qimeng.planner.lm.first_observation import COUNT, FAMILIES, KEPT, REGION, SINGLE, translated
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.weights import Card, load, new_mini, save


def first(features: np.ndarray) -> np.ndarray:
    """What the first observation would have been: 1 for the family whose word it is."""
    found = [features[:SINGLE]]
    for region in np.split(features[SINGLE:], REGION_SLOTS):
        word = region[KEPT + 1 : KEPT + 1 + WIDTH]
        found += [region[:KEPT], np.asarray([float(np.array_equal(word, vector(f))) for f in FAMILIES])]
    return np.concatenate(found).astype(np.float32)


def test_the_layout_is_that_of_today() -> None:
    assert COUNT == 87 and len(FEATURES) == SINGLE + REGION_SLOTS * REGION
    names = [f.name for f in FEATURES[SINGLE : SINGLE + REGION]]
    assert names[KEPT - 1 : KEPT + 2] == ["region 0 generated", "region 0 present", "region 0 word 0"]
    assert names[KEPT + 1 + WIDTH] == "region 0 operators 0" and FEATURES[SINGLE - 1].name == "multiprocessors"


def test_the_vectors_of_what_was_known_can_be_told_apart() -> None:
    known = np.stack([vector(f) for f in FAMILIES])
    assert np.linalg.matrix_rank(known) == 4 and np.linalg.cond(known) < 4


def test_the_value_head_adds_what_it_added(task: Task, reader: Reader) -> None:
    torch.manual_seed(0)
    old = torch.randn(64, 32 + COUNT)
    new = translated(old)
    assert new.shape == (64, 32 + len(FEATURES)) and new.dtype == old.dtype
    hidden = torch.randn(32)
    families = set[int]()
    for seen in random_walk(task, 8, seed=3):
        features = reader.arrays(seen)["features"]
        before = torch.from_numpy(first(features))
        families |= {i for row in before[SINGLE:].split(KEPT + 4) for i in row[KEPT:].nonzero().flatten().tolist()}
        was, now = old @ torch.cat((hidden, before)), new @ torch.cat((hidden, torch.from_numpy(features)))
        torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-4)
    assert families == {0, 1, 2}


def test_another_family_is_worth_about_what_other_was() -> None:
    torch.manual_seed(0)
    old = torch.randn(256, COUNT)
    now = translated(old)[:, SINGLE : SINGLE + REGION]
    other = old[:, SINGLE + KEPT + FAMILIES.index("other")]
    for word in ("convolution", "scan", "attention", "banded"):
        region = torch.from_numpy(np.concatenate([np.zeros(KEPT), [1.0], vector(word), np.zeros(WIDTH)])).float()
        assert torch.corrcoef(torch.stack([now @ region, other]))[0, 1] > 0.3


def test_a_folder_of_that_time_is_read(reader: Reader, tiny: MiniSize, tmp_path: Path) -> None:
    save(new_mini(reader.tokenizer, tiny), tmp_path, Card("none", "none", "none"))
    hidden, path, about = tiny.hidden, tmp_path / "heads.safetensors", tmp_path / "planner.json"
    heads, told = load_file(path), json.loads(about.read_text())
    path.unlink()
    value = {k.removeprefix("value."): v for k, v in heads.items() if k.startswith("value.")}
    value["0.weight"] = torch.randn(64, hidden + COUNT)
    save_file(value, tmp_path / "value.safetensors")
    del told["texts"], told["action_features"]
    about.write_text(json.dumps(told | {"format": 2, "features": COUNT}))
    head = load(tmp_path).scorer.value
    torch.testing.assert_close(head.state_dict()["0.weight"], translated(value["0.weight"]))
    about.write_text(json.dumps(told | {"format": 2, "features": 3}))
    with pytest.raises(WeightsError, match="reads 3 features"):
        load(tmp_path)
