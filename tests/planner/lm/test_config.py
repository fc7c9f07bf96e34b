"""Settings: every field says what it means; a file and overrides; what does not fit is refused with the names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from qimeng.planner.lm.config import (
    TrainConfig,
    TrainingError,
    load_config,
    processor_of,
)
from qimeng.planner.lm.imitation import Imitation
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.settings import differences, meanings, override, to_toml
from qimeng.planner.lm.training import Ppo
from qimeng.planner.lm.value import ValueStart
from tests.properties import PROPERTY

TREES = "trees=a.xz"


@pytest.mark.parametrize("kind", [TrainConfig, Imitation, ValueStart, Ppo, MiniSize])
def test_every_field_says_what_it_means(kind: type) -> None:
    found = meanings(kind)
    assert set(found) == {f.name for f in dataclasses.fields(kind)} and all(len(t) > 5 for t in found.values())


@pytest.mark.parametrize("explained", [True, False])
def test_what_is_written_is_read(tmp_path: Path, explained: bool) -> None:
    given = [TREES, "ppo.target_kl=none", "reward=paper", 'start="a \\"b\\""', "held_out_families=[loss, gated]"]
    given[-1] = 'held_out_families=["loss", "gated"]'
    config = load_config(None, [*given, "imitation.rate=1", "tensorboard=true"])
    assert (config.ppo.target_kl, config.reward, config.imitation.rate) == (None, "paper", 1.0)
    assert (config.start, config.held_out_families, config.trees) == ('a "b"', ("loss", "gated"), ("a.xz",))
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config, explained))
    assert load_config(path) == config
    assert ("# learning rate." in path.read_text()) == explained


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('trees = ["a.xz"]\n[ppo]\nsteps = 7\nbatch = 5\n')
    config = load_config(path, ["ppo.steps=9"], ["ppo.steps=1", "ppo.batch=1", "ppo.epochs=1"])
    assert (config.ppo.steps, config.ppo.batch, config.ppo.epochs) == (9, 5, 1)
    assert differences(config, load_config(path, ["seed=4"])) == ["ppo.steps", "ppo.epochs", "seed"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([TREES, "speed=1"], "unknown setting speed; known: trees, answers"),
        ([TREES, "ppo.speed=1"], "unknown setting ppo.speed; known: ppo.steps"),
        ([TREES, "ppo.steps=many"], "ppo.steps is int, not 'many'"),
        ([TREES, "ppo=3"], "ppo is a table of settings, not 3"),
        ([TREES, "seed.x=3", "seed"], "'seed' sets nothing"),
        ([TREES, "seed=1", "seed.x=3"], "seed has no parts"),
        ([TREES, "reward=speed"], "reward = 'speed' is none of milestones, paper, log-speedup"),
        ([TREES, "answers=guessed"], "is none of stored, live, mixed"),
        ([TREES, "held_out=1.0"], "held_out is a number from 0 to below 1, not 1.0"),
        ([TREES, "specs=0"], "specs is a number from 1 on, not 0"),
        ([TREES, "imitation.batch=0"], "imitation.batch is a number from 1 on, not 0"),
        ([TREES, "value.batch=0"], "value.batch is a number from 1 on, not 0"),
        ([TREES, "mini.layers=0"], "mini.layers is a number from 1 on, not 0"),
        ([TREES, "ppo.steps=-4"], "ppo.steps is a number from 0 on, not -4"),
        ([TREES, "imitation.rate=nan"], "imitation.rate is a number from 0 on, not nan"),
        ([TREES, "ppo.target_kl=inf"], "ppo.target_kl is a number from 0 on, not inf"),
        ([TREES, "length=0"], "length is a number from 1 on, not 0"),
        ([TREES, "temperature=0"], "temperature must be above 0"),
        ([TREES, "ppo.environments=0"], "ppo.environments is a number from 1 on, not 0"),
        ([TREES, "ppo.gae=1.5"], "ppo.gae is a number from 0 to 1, not 1.5"),
        ([TREES, "ppo.environments=1", "ppo.rollout=1"], "an update needs at least two steps"),
        ([TREES, "ppo.batch=1"], "ppo: the 512 steps of a rollout, in batches of 1, leave one step alone"),
        (
            [TREES, "ppo.environments=5", "ppo.rollout=13"],
            "ppo: the 65 steps of a rollout, in batches of 64, leave one",
        ),
        ([TREES, "mini.hidden=225"], "mini: the width must be a multiple of twice the heads.* got 225, 7 and 1"),
        ([TREES, "mini.kv_heads=0"], "mini: .*got 224, 7 and 0"),
        ([TREES, "teacher.guide=nobody"], "teacher: unknown planner 'nobody'; known: heuristic"),
        ([TREES, "teacher.discount=2"], "teacher: the discount must lie between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        load_config(None, given)


def test_a_step_may_stand_alone_where_advantages_are_not_scaled() -> None:
    assert load_config(None, [TREES, "ppo.batch=1", "ppo.normalize=false"]).ppo.batch == 1
    assert load_config(None, [TREES, "ppo.batch=1", "ppo.steps=0"]).ppo.batch == 1


@PROPERTY
@drawn(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_an_override_says_any_text(text: str) -> None:
    found = load_config(None, [override("trees", (text, "b.xz")), override("start", text)])
    assert (found.trees, found.start) == ((text, "b.xz"), text)
    assert load_config(None, [override("seed", 3)]).seed == 3


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("= 3")
    for name in ("c.toml", "missing.toml"):
        with pytest.raises(TrainingError, match="cannot be read as TOML"):
            load_config(tmp_path / name)


def test_a_processor_that_is_not_there_is_refused_in_words() -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert processor_of(TrainConfig()).type == here
    for name in ("cuda:77", "abacus"):
        with pytest.raises(TrainingError, match="leave it empty to take what there is"):
            processor_of(TrainConfig(processor=name))
