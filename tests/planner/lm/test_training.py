"""A tiny model learns: by imitation, and by PPO on an environment that replays what a fake judge once said."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qimeng.actions import Context, ScheduleKind, register, unregister
from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.gym.reward import LogSpeedupReward
from qimeng.envs.steps.caching import ReplayEvaluator
from qimeng.envs.steps.task import Task
from qimeng.errors import WeightsError
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import category
from qimeng.interfaces import Action, Evaluation, Observation, Patch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.lm import imitation
from qimeng.planner.lm.checkpoint import read_state, write_state
from qimeng.planner.lm.corpus import random_walk
from qimeng.planner.lm.imitation import Example, Imitation, imitate
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.training import Ppo, train
from qimeng.planner.lm.weights import PlannerModel, new_mini
from qimeng.program.program import Program
from qimeng.store import Store
from qimeng.testing import FakeEvaluator, fake_task


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model is faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model(reader: Reader, tiny: MiniSize) -> PlannerModel:
    return new_mini(reader.tokenizer, tiny, seed=3, length=48)


# ---- imitation


def states(task: Task, walks: int) -> list[Observation]:
    """What random walks come across."""
    return [seen for seed in range(walks) for seen in random_walk(task, 6, seed)]


def examples(task: Task, walks: int) -> list[Example]:
    """What the heuristic does there."""
    return [Example.of(seen, {HeuristicPlanner().choose(seen): 1.0}) for seen in states(task, walks)]


def test_imitation_learns_what_the_heuristic_does(model: PlannerModel, task: Task) -> None:
    told: list[dict[str, float]] = []
    found = imitate(model, examples(task, 6), Imitation(epochs=18, batch=8, rate=3e-3), told.append)
    assert found == told and len(found) == 18
    assert found[-1]["loss"] < found[0]["loss"] / 2
    planner, given = LanguageModelPlanner(model), states(task, 6)
    agreed = float(np.mean([planner.choose(o) == HeuristicPlanner().choose(o) for o in given]))
    chance = float(np.mean([1 / len(o.actions) for o in given]))
    assert agreed > max(0.6, 3 * chance)


def test_where_all_is_worth_something_a_choice_among_a_few_is_learnt(model: PlannerModel, task: Task) -> None:
    """Each pass sees three of the actions; the one that is worth most in them all is the policy's first choice."""
    seen = max(states(task, 2), key=lambda o: len(o.actions))
    worth = {a: 1.0 + 4 * (i == 2) for i, a in enumerate(seen.actions)}
    choice = {a: w / sum(worth.values()) for a, w in worth.items()}
    imitate(model, [Example.of(seen, choice)] * 8, Imitation(epochs=12, batch=8, rate=3e-3, others=2))
    scores, _ = LanguageModelPlanner(model).look(seen)
    assert len(seen.actions) > 4 and int(np.argmax(scores)) == 2


def test_a_long_epoch_is_told_about(model: PlannerModel, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imitation, "REPORT_S", -1.0)
    given, seen = examples(task, 2), list[dict[str, float]]()
    found = imitate(model, given, Imitation(epochs=2, batch=4), seen.append)
    epochs = [row["epoch"] for row in seen]
    assert epochs == sorted(set(epochs)) and len(epochs) == 2 * math.ceil(len(given) / 4)
    assert [row for row in seen if row["epoch"] in (1, 2)] == found


def test_imitation_is_decided_by_its_seeds(reader: Reader, tiny: MiniSize, task: Task) -> None:
    settings, given = Imitation(epochs=1, batch=8), examples(task, 2)
    runs = [imitate(new_mini(reader.tokenizer, tiny, seed=1, length=48), given, settings) for _ in range(2)]
    assert runs[0] == runs[1]


def test_imitation_goes_on_where_it_was_killed(reader: Reader, tiny: MiniSize, task: Task, tmp_path: Path) -> None:
    settings, given, file = Imitation(epochs=3, batch=4, others=2), examples(task, 2), tmp_path / "imitation.pt"
    whole, killed, resumed = (new_mini(reader.tokenizer, tiny, seed=1, length=48) for _ in range(3))

    def kill(figures: Mapping[str, float]) -> None:
        if figures["epoch"] == 2:
            raise KeyboardInterrupt

    expected = imitate(whole, given, settings)
    with pytest.raises(KeyboardInterrupt):
        imitate(killed, given, settings, kill, file)
    told: list[dict[str, float]] = []
    assert imitate(resumed, given, settings, told.append, file) == expected and told == expected[2:]
    assert all(torch.equal(p, q) for p, q in zip(whole.scorer.parameters(), resumed.scorer.parameters(), strict=True))
    with pytest.raises(WeightsError, match=r"imitation.pt does not fit: other examples; remove it to begin anew"):
        imitate(killed, given[1:], settings, None, file)
    with pytest.raises(WeightsError, match="other settings"):
        imitate(killed, given, replace(settings, epochs=4), None, file)
    file.write_bytes(b"torn")
    with pytest.raises(WeightsError, match="cannot be read"):
        imitate(killed, given, settings, None, file)


def test_there_must_be_something_to_imitate(model: PlannerModel, task: Task) -> None:
    with pytest.raises(ValueError, match="at least one"):
        imitate(model, [])
    with pytest.raises(ValueError, match="is not among the"):
        Example.of(next(random_walk(task, 1)), {Action("tiling", ("r0",)): 1.0})


# ---- PPO


class KernelsForReductions(FakeEvaluator):
    """Generated kernels of reductions halve the program's time; all others double it."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        assert found.timing is not None
        judged = program if patch is None else patch.apply(program, found.chosen)
        factor = 1.0
        for region in judged.regions:
            if judged.implementation(region).generated:
                factor *= 0.5 if any(category(n) == "reduction" for n in region.ops) else 2.0
        return replace(found, timing=replace(found.timing, device_ms=factor))


@pytest.fixture
def replayed(graph: OpGraph) -> Task:
    """A task whose first steps are replayed from a store."""
    store = Store()
    live = fake_task(graph, KernelsForReductions())
    store.put_evaluation(live.conditions, live.start.digest, live.evaluator.evaluate(live.start))
    env = KernelOptimizationEnv(live, store=store)
    env.reset(seed=0)
    for index in range(1, len(env.actions_text())):
        env.fork().step(index)
    return fake_task(graph, ReplayEvaluator(store, live.conditions))


def test_ppo_finds_the_action_that_pays(model: PlannerModel, replayed: Task) -> None:
    start = next(random_walk(replayed, 1))
    best = next(
        i
        for i, a in enumerate(start.actions)
        if a.kind == "lowering" and any(category(n) == "reduction" for n in start.program.region(a.regions[0]).ops)
    )
    planner = LanguageModelPlanner(model)
    before = float(np.exp(planner.scores(start)[best]))
    assert before < 0.3
    settings = Ppo(steps=384, environments=8, rollout=8, batch=16, epochs=4, rate=4e-3, max_steps=1, target_kl=None)
    seen: list[dict[str, float]] = []
    found = train(model, [replayed], settings, LogSpeedupReward, seen.append)
    assert found == seen and [f["steps"] for f in found] == list(range(64, 385, 64))
    assert found[-1]["reward"] > found[0]["reward"] + 0.2
    after = float(np.exp(planner.scores(start)[best]))
    assert after > 0.6 and planner.choose(start) == start.actions[best]


def test_ppo_is_decided_by_its_seeds(reader: Reader, tiny: MiniSize, replayed: Task) -> None:
    settings = Ppo(steps=32, environments=2, rollout=8, batch=8, epochs=1, max_steps=2)
    runs = []
    for _ in range(2):
        model = new_mini(reader.tokenizer, tiny, seed=1, length=48)
        found = train(model, [replayed], settings)
        runs.append(([f["reward"] for f in found], LanguageModelPlanner(model).scores(next(random_walk(replayed, 1)))))
    assert runs[0] == runs[1]


# ---- checkpoints


SMALL = Ppo(environments=2, rollout=6, batch=6, epochs=1, max_steps=5, rate=1e-2)


def weights(model: PlannerModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.scorer.named_parameters()}


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    reader: Reader, tiny: MiniSize, replayed: Task, graph: OpGraph, tmp_path: Path
) -> None:
    tasks, settings = [replayed, fake_task(graph)], replace(SMALL, steps=60)

    class Killed(Exception):
        pass

    def run(folder: Path | None, until: int = 1000) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        def progress(row: dict[str, float]) -> None:
            if row["steps"] >= until:
                raise Killed

        model = new_mini(reader.tokenizer, tiny, seed=1, length=48)
        return train(model, tasks, settings, progress=progress, checkpoint=folder), weights(model)

    whole, expected = run(None)
    for until in (12, 24, 48):
        with pytest.raises(Killed):
            run(tmp_path, until)
    second, found = run(tmp_path)
    assert [f["reward"] for f in second] == pytest.approx([f["reward"] for f in whole], rel=1e-5)
    assert [f["steps"] for f in second] == [12, 24, 36, 48, 60]
    assert all(torch.equal(found[n], p) for n, p in expected.items())
    third, same = run(tmp_path)  # nothing left to do
    assert third == second and all(torch.equal(same[n], p) for n, p in expected.items())


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    write_state({"a": 1}, path)

    def full(state: object, partial: Path) -> None:
        partial.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WeightsError, match="file write failed.*make room on its disk"):
        write_state({"a": 2}, path)
    assert read_state(path) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_that_does_not_fit_is_refused(
    reader: Reader, tiny: MiniSize, replayed: Task, tmp_path: Path
) -> None:
    def run(size: MiniSize, environments: int = 2) -> None:
        model = new_mini(reader.tokenizer, size, length=48)
        train(model, [replayed], replace(SMALL, steps=12, environments=environments), checkpoint=tmp_path)

    run(tiny)
    with pytest.raises(WeightsError, match="does not fit: it has 2 environments, the run 3"):
        run(tiny, 3)
    with pytest.raises(WeightsError, match="does not fit: .*layers.1.* is trained in the checkpoint only"):
        run(replace(tiny, layers=1))
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(WeightsError, match="does not fit"):
        run(tiny)


def test_an_action_that_is_no_longer_known_begins_its_episode_anew(
    reader: Reader, tiny: MiniSize, task: Task, tmp_path: Path
) -> None:
    class Bolder(ScheduleKind):
        """Ever more rows.

        args: the region.
        rewrite: ``block_p = 1`` -> ``block_p = 2``
        """

        name, family = "aaa_bolder", None

        def check(self, program: Program, action: Action, context: Context) -> None:
            """Legal everywhere."""

    def run(steps: int) -> list[dict[str, float]]:
        model = new_mini(reader.tokenizer, tiny, seed=1, length=48)
        return train(model, [task], replace(SMALL, steps=steps), checkpoint=tmp_path)

    register(Bolder())
    try:
        run(12)
    finally:
        unregister("aaa_bolder")
    with pytest.warns(UserWarning, match="the actions or the tree have changed, so the episode is begun anew"):
        assert run(24)[-1]["steps"] == 24
