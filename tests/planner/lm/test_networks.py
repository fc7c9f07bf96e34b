"""Networks put together from parts as something to train on: walked, imitated, trained on, held out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.envs.gym.reward import LogSpeedupReward
from qimeng.envs.steps.caching import UNKNOWN
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.setup import CODERS
from qimeng.envs.steps.state import STOP
from qimeng.interfaces import Action
from qimeng.planner.data.put_together import PartsCoder
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.lm import replay, sources
from qimeng.planner.lm import run as run_module
from qimeng.planner.lm.branches import Teacher
from qimeng.planner.lm.config import TrainConfig, TrainingError, load_config
from qimeng.planner.lm.learnt import action_name
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.networks import (
    NetworkTask,
    captured_networks,
    is_network,
    learnt_of,
    network_pairs,
    network_tasks,
)
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.replay import Chance, mean_shares
from qimeng.planner.lm.run import Run
from qimeng.planner.lm.sources import gather
from qimeng.planner.lm.stored import Offer
from qimeng.planner.lm.training import Ppo, train
from qimeng.planner.lm.weights import new_mini
from qimeng.testing import FakeCoder

TINY = """
trees = ["{trees}"]
held_out = 0.5
walks = 1
length = 96
validate_every = 0
coder = "fake"
[mini]
hidden = 32
layers = 1
heads = 2
inner = 64
[imitation]
epochs = 1
[value]
episodes = 0
[ppo]
steps = 12
environments = 2
rollout = 3
batch = 6
epochs = 1
max_steps = 4
"""


@pytest.fixture(scope="module")
def networks(trees_file: Path) -> tuple[NetworkTask, ...]:
    return tuple(network_tasks(captured_networks(read_trees(trees_file)), FakeCoder()))


def test_a_network_is_walked_where_nobody_measured(networks: tuple[NetworkTask, ...]) -> None:
    assert len(networks) == 4
    for task in networks:
        assert isinstance(task.task.context.coder, PartsCoder)
        session = task.begin(24)
        while session.exhausted() is None and not session.state.done:
            seen = session.observe()
            assert set(task.offered(seen)) <= set(seen.actions)
            session.step(task.offered(seen)[-1])
        assert all(e.failure != UNKNOWN for e in session.ledger.known.values())
        assert task.best_ms <= task.start_ms and task.gain >= 1


def test_what_the_best_planner_does_is_imitated(networks: tuple[NetworkTask, ...]) -> None:
    alone, more = (list(network_pairs(networks, walks, 12)) for walks in (0, 2))
    assert 0 < len(alone) < len(more)
    for seen, choice in more:
        assert set(choice) <= set(seen.actions) - {STOP} and sum(choice.values()) == pytest.approx(1)
    best = [len(choice) for _, choice in network_pairs(networks, 0, 12, teacher=Teacher(tolerance=0.0))]
    assert max(best) <= max(len(choice) for _, choice in alone)
    again = [choice for _, choice in network_pairs(networks, 2, 12)]
    assert again == [choice for _, choice in more], "the same seed, the same walks"


def test_chance_finds_a_part_of_what_is_known(networks: tuple[NetworkTask, ...]) -> None:
    shares = mean_shares(Chance(), [n for n in networks if n.gain > 1.1], 5)
    assert 0 <= shares["share at 5"] <= 1.001


def test_only_what_is_known_is_offered_to_a_policy(networks: tuple[NetworkTask, ...]) -> None:
    offer, task = Offer.of(networks), networks[0]
    session = Session(task.task)
    session.begin()
    seen = session.observe()
    assert all(task.parts(seen.program, a) for a in seen.actions) and set(seen.actions) < set(session.legal())
    mask = offer(task.task, seen)
    assert {a for a, may in zip(seen.actions, mask, strict=True) if may} == set(seen.actions) - {STOP}


def test_a_planner_of_networks_chooses_among_what_it_was_trained_on(networks: tuple[NetworkTask, ...]) -> None:
    learnt = learnt_of(networks)
    for task in networks:
        session = task.begin(24)
        while session.exhausted() is None and not session.state.done:
            seen = session.observe()
            moves = [a for a in task.offered(seen) if a != STOP and a.kind not in ("launch", "algebra")]
            assert not {action_name(a) for a in moves} - set(learnt.actions)
            session.step(task.offered(seen)[-1])
    assert learnt.regions >= max(len(task.task.start.called) for task in networks) // 2


def test_many_kernels_in_one_step_are_offered_to_no_policy(networks: tuple[NetworkTask, ...]) -> None:
    for task in networks:
        program = task.task.start
        assert not task.parts(program, Action("lower_all"))


@pytest.mark.slow
def test_environments_may_have_processes_of_their_own(
    networks: tuple[NetworkTask, ...], reader: Reader, tiny: MiniSize, tmp_path: Path
) -> None:
    model = new_mini(reader.tokenizer, tiny, seed=3, length=128)
    settings = Ppo(steps=8, environments=2, rollout=4, batch=8, epochs=1, max_steps=4, processes=True)
    tasks, offer = [n.task for n in networks], Offer.of(networks)
    train(model, tasks, settings, LogSpeedupReward, offer=offer, checkpoint=tmp_path)
    states = offer.states
    assert states >= 8 and offer.coverage == 1
    found = train(model, tasks, replace(settings, steps=16), LogSpeedupReward, offer=offer, checkpoint=tmp_path)
    assert found[-1]["steps"] == 16 and states < offer.states <= 4 * states


@pytest.fixture
def config(trees_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A tiny run on the trees, taken for networks."""
    monkeypatch.setitem(CODERS, "fake", "qimeng.testing:FakeCoder")
    monkeypatch.setattr(replay, "IDLE", 2)
    monkeypatch.setattr(run_module, "FINAL_SEEDS", (0,))
    monkeypatch.setattr(sources, "is_network", lambda tree: True)
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(trees=trees_file))
    return load_config(path)


def test_a_planner_is_trained_on_networks(config: TrainConfig, tmp_path: Path) -> None:
    found = gather(config, tmp_path)
    assert len(found.stored) == 2 and all(isinstance(s, NetworkTask) for s in (*found.stored, *found.held_out))
    report = Run(config, tmp_path / "run", found)()
    assert report.pairs == len(found.examples) > 0 and report.curve[-1]["steps"] >= 12
    assert 0 < report.coverage <= 1 and {"chance", "imitated", "trained"} <= set(report.shares)


def test_judges_do_not_answer_what_is_put_together(config: TrainConfig, tmp_path: Path) -> None:

    with pytest.raises(TrainingError, match="trees of networks are answered from what was found of regions"):
        gather(replace(config, answers="mixed"), tmp_path)


def test_a_tree_is_a_networks_where_regions_were_judged_alone(trees_file: Path) -> None:
    assert not any(map(is_network, read_trees(trees_file)))
