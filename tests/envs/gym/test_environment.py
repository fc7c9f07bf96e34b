"""The environment: both checkers, masks, forks, replay to equal states, determinism, a short training run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.env_checker import data_equivalence as same
from hypothesis import given, settings
from hypothesis import strategies as st

from qimeng.actions import ScheduleKind, legal_actions, register, unregister
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES, Device
from qimeng.envs import ENVIRONMENT, register_environment
from qimeng.envs.gym.environment import TEXT_LENGTH, KernelOptimizationEnv
from qimeng.envs.gym.observation import FEATURES, REGION_SLOTS, TEXTS, feature_bounds
from qimeng.envs.gym.wrappers import HashTokenizer, TokenizeObservation
from qimeng.envs.steps.caching import ReplayEvaluator
from qimeng.envs.steps.state import STOP
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Request
from qimeng.program.schedule import Schedule
from qimeng.recipe import Recipe
from qimeng.store import Store
from qimeng.testing import FakeEvaluator, fake_task
from tests.properties import PROPERTY

TRAJECTORY = st.lists(st.integers(0, 40), min_size=1, max_size=12)
FEW = settings(PROPERTY, max_examples=15)


@pytest.fixture(scope="module")
def task(graph: OpGraph) -> Task:
    """A task whose evaluations are replayed: what random trajectories of a fake judge came across."""
    store = Store()
    live = fake_task(graph, FakeEvaluator(wrong=lambda p: "wrong" if p.digest[0] in "01" else None))
    env = KernelOptimizationEnv(live, store=store, max_steps=16)
    store.put_evaluation(live.conditions, live.start.digest, live.evaluator.evaluate(live.start))
    for seed in range(12):
        env.reset(seed=seed)
        play(env, np.random.default_rng(seed).integers(1, 1000, 16))
    return fake_task(graph, ReplayEvaluator(store, live.conditions))


@pytest.fixture
def env(task: Task) -> KernelOptimizationEnv:
    return KernelOptimizationEnv(task, max_steps=16)


def play(env: KernelOptimizationEnv, choices: Sequence[int] | np.ndarray) -> list[tuple[Any, ...]]:
    """Steps by choices among the legal actions, until the episode is over."""
    found = []
    for choice in choices:
        index = int(choice) % len(env.actions_text())
        found.append(env.step(index))
        if found[-1][2] or found[-1][3]:
            break
    return found


def everything(env: KernelOptimizationEnv) -> tuple[Any, ...]:
    return env.state, env.actions_text(), tuple(env.action_masks()), env.observed.evaluation, env.observed.history


# ---- the contract


@pytest.mark.filterwarnings("error")
def test_gymnasiums_checker_passes(task: Task) -> None:
    made = gymnasium.make(ENVIRONMENT, tasks=task, max_steps=16)
    assert made.spec is not None and not made.spec.nondeterministic
    assert made.metadata["texts"] == TEXTS
    check_env(made.unwrapped)


def test_both_checkers_pass_on_the_wrapped_environment(task: Task) -> None:
    from stable_baselines3.common.env_checker import check_env as sb3_check_env

    made = gymnasium.make(ENVIRONMENT, tasks=task, max_steps=16)
    for action_length in (0, 12):
        wrapped = TokenizeObservation(made, length=64, action_length=action_length)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sb3_check_env(wrapped)
            warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
            check_env(wrapped)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": []}, "at least one task"),
        ({"tasks": "problem.py"}, "made by qimeng.envs.steps.setup.make_task, got 'problem.py'"),
        ({"tasks": None}, "made by qimeng.envs.steps.setup.make_task, got None"),
        ({"reward": "paper"}, "make_reward, got 'paper'"),
        ({"max_steps": 0}, "max_steps is at least 1"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(task: Task, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelOptimizationEnv(**{"tasks": task, **given})


def test_registering_twice_is_harmless(task: Task) -> None:
    gymnasium.registry.pop(ENVIRONMENT)
    register_environment()
    register_environment()
    assert isinstance(
        gymnasium.make(f"qimeng.envs.gym.environment:{ENVIRONMENT}", tasks=task).unwrapped, KernelOptimizationEnv
    )


def test_the_first_observation_is_gone_and_gymnasium_says_so(task: Task) -> None:
    assert ENVIRONMENT == "qimeng/KernelOptimization-v1"
    wanted = "v0 for `qimeng/KernelOptimization` is deprecated. Please use `qimeng/KernelOptimization-v1`"
    with pytest.raises(gymnasium.error.DeprecatedEnv, match=wanted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gymnasium.make("qimeng/KernelOptimization-v0", tasks=task)


def test_the_docstring_has_gymnasiums_headings_and_the_whole_table() -> None:
    text = KernelOptimizationEnv.__doc__ or ""
    headings = "Description,Action Space,Observation Space,Rewards,Starting State,Episode End,Arguments,References"
    for heading in headings.split(","):
        assert f"## {heading}\n" in text
    single = len(FEATURES) - 38 * REGION_SLOTS
    for number, feature in enumerate(FEATURES[:single]):
        if number not in (10, 11):
            assert f"| {number} | {feature.name} | {feature.low:g} | {feature.high:g} |" in text
    assert f"| {single} + 38 i |" in text and f"… {single + 37} + 38 i |" in text


# ---- episodes


def test_an_episode_ends_by_stop(env: KernelOptimizationEnv) -> None:
    env.reset(seed=0)
    assert env.actions_text()[0] == "stop"
    _, _, terminated, truncated, info = env.step(0)
    assert terminated and not truncated and info["accepted"]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)


def test_an_episode_is_cut_after_max_steps(env: KernelOptimizationEnv) -> None:
    env.reset(seed=0)
    flags = [env.step(255)[2:4] for _ in range(16)]
    assert flags == [(False, False)] * 15 + [(False, True)]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(255)


class HalvedRows(ScheduleKind):
    """Half the rows a program.

    rewrite: ``block_p = 8`` -> ``block_p = 4``
    """

    name, family = "halved_rows", "tile"

    def rewrite(self, schedule: Any, plan: Any, device: Device, param: str) -> tuple[Schedule, ...]:
        return (schedule.but(block_p=schedule.block_p // 2),) if schedule.block_p > 1 else ()


def test_a_kind_from_outside_is_offered_and_carried_out(graph: OpGraph) -> None:
    register(HalvedRows())
    try:
        env = KernelOptimizationEnv(fake_task(graph, coder=TemplateCoder()))
        env.reset(seed=0)
        assert not [text for text in env.actions_text() if text.startswith("halved_rows")]
        while not (offered := [i for i, text in enumerate(env.actions_text()) if text.startswith("halved_rows")]):
            lowering = next(i for i, text in enumerate(env.actions_text()) if text.startswith("lowering"))
            assert env.step(lowering)[4]["accepted"]
        action, before = env.observed.actions[offered[0]], env.observed.program
        region = before.region(action.regions[0])
        old = before.schedule(region)
        assert env.action_masks()[offered[0]] and env.step(offered[0])[4]["accepted"]
        patch = TemplateCoder().write(Request(before, action, DEVICES["h200"]))  # which one wins is the evaluator's
        written = (patch.alternatives or ())[0]
        assert old is not None and written.schedule is not None and written.schedule.block_p == old.block_p // 2
        assert written.source != before.implementation(region).source
    finally:
        unregister("halved_rows")


def test_an_index_without_an_action_changes_nothing_and_costs(env: KernelOptimizationEnv) -> None:
    env.reset(seed=0)
    before = env.session.state
    _, reward, terminated, _, info = env.step(200)
    assert reward < 0 and not terminated and info["no_action"]
    assert env.session.state is before


def test_masks_name_the_printed_actions(env: KernelOptimizationEnv) -> None:
    env.reset(seed=0)
    play(env, [3, 5, 7])
    mask, texts = env.action_masks(), env.actions_text()
    assert mask.shape == (MAX_ACTIONS,) and mask.sum() == len(texts)
    assert mask[: len(texts)].all()
    assert len(set(texts)) == len(texts)


def test_actions_are_ordered_by_the_time_they_touch(env: KernelOptimizationEnv) -> None:
    env.reset(seed=0)
    play(env, [3, 5])
    evaluation = env.observed.evaluation
    assert evaluation is not None
    touched = [sum(evaluation.region_ms[r] for r in a.regions) for a in env.observed.actions if a.regions]
    assert touched == sorted(touched, reverse=True)


def test_the_list_is_cut_at_256_and_says_so(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("session", "time_shares"):
        monkeypatch.setattr(f"qimeng.envs.steps.{module}.MAX_ACTIONS", 4)
    env = KernelOptimizationEnv(fake_task(graph))
    _, info = env.reset(seed=0)
    assert len(env.actions_text()) == 4 and env.actions_text()[0] == "stop"
    program, context = env.session.state.program, env.session.task.context
    assert info["cut"] == len(legal_actions(program, context)) - 4 > 4


def test_observations_lie_in_their_space(env: KernelOptimizationEnv) -> None:
    observation, _ = env.reset(seed=1)
    seen = [observation, *(s[0] for s in play(env, range(1, 17)))]
    assert all(o in env.observation_space for o in seen)
    assert all("tl." not in o["text"] and len(o["text"]) < TEXT_LENGTH for o in seen)
    low, high = feature_bounds()
    assert all((o["features"] >= low).all() and (o["features"] <= high).all() for o in seen)


def test_several_tasks_are_drawn_from_the_seed(task: Task, graph: OpGraph) -> None:
    other = fake_task(graph, mode="high")
    env = KernelOptimizationEnv([task, other])
    drawn = [env.reset(seed=s) and env.session.task for s in range(8)]
    assert {id(t) for t in drawn} == {id(task), id(other)}
    assert drawn == [env.reset(seed=s) and env.session.task for s in range(8)]
    env.reset(options={"task": 1})
    assert env.session.task is other
    with pytest.raises(ValueError, match="no task 2"):
        env.reset(options={"task": 2})
    with pytest.raises(ValueError, match="a task is named by its number, got 1.5"):
        env.reset(options={"task": 1.5})
    with pytest.raises(ValueError, match="unknown option 'tasks'; the only one is 'task'"):
        env.reset(options={"tasks": 1})


def test_rendering_prints_state_and_actions(task: Task) -> None:
    env = KernelOptimizationEnv(task, render_mode="ansi")
    env.reset(seed=0)
    text = env.render()
    assert text is not None and text.startswith("device h200") and "\n0: stop" in text


# ---- properties of random trajectories


@FEW
@given(choices=TRAJECTORY, seed=st.integers(0, 9))
def test_the_same_trajectory_gives_the_same_everything(task: Task, choices: list[int], seed: int) -> None:
    one, two = KernelOptimizationEnv(task, max_steps=16), KernelOptimizationEnv(task, max_steps=16)
    assert same(one.reset(seed=seed), two.reset(seed=seed), exact=True)
    assert same(play(one, choices), play(two, choices), exact=True)
    assert everything(one) == everything(two)


@FEW
@given(choices=TRAJECTORY)
def test_the_recipe_in_the_state_replays_to_the_same_program(task: Task, choices: list[int]) -> None:
    env = KernelOptimizationEnv(task, max_steps=16)
    env.reset(seed=0)
    play(env, choices)
    recipe = env.session.state.recipe()
    held = json.loads(env.state)["recipe"]
    for step in held["steps"]:
        step["ms"] = None
    assert Recipe.from_json(json.dumps(held)) == recipe
    assert recipe.replay(task.start.graph).digest == env.session.state.program.digest


@FEW
@given(choices=TRAJECTORY, more=TRAJECTORY, others=TRAJECTORY)
def test_a_fork_is_equal_and_stays_equal(task: Task, choices: list[int], more: list[int], others: list[int]) -> None:
    env = KernelOptimizationEnv(task, max_steps=16)
    env.reset(seed=0)
    if any(s[2] or s[3] for s in play(env, choices)):
        return
    fork = env.fork()
    held = everything(fork)
    assert held == everything(env)
    went = play(env, others)  # the original moves on …
    assert everything(fork) == held  # … and the fork stays
    again = env.fork()
    twin = KernelOptimizationEnv(task, max_steps=16)
    twin.reset(seed=0)
    play(twin, choices)
    assert same(play(fork, more), play(twin, more), exact=True)
    assert everything(fork) == everything(twin)
    assert everything(again) == everything(env) and went is not None


@FEW
@given(choices=TRAJECTORY)
def test_what_is_offered_is_legal_and_masks_grow_only_by_refusals(task: Task, choices: list[int]) -> None:
    env = KernelOptimizationEnv(task, max_steps=16)
    env.reset(seed=0)
    for choice in choices:
        offered = env.observed.actions
        index = choice % len(offered)
        _, _, terminated, truncated, info = env.step(index)
        step = env.observed.history[-1]
        assert step.action == offered[index]
        assert step.evaluation is None or step.evaluation.failure != "illegal"
        assert terminated == (step.action == STOP)
        if not info["accepted"]:
            assert step.action not in env.observed.actions
        if terminated or truncated:
            break


# ---- tokens and training


def test_tokens_are_deterministic_and_padded(task: Task) -> None:
    wrapped = TokenizeObservation(KernelOptimizationEnv(task), HashTokenizer(1000), length=64, action_length=8)
    observation, _ = wrapped.reset(seed=0)
    assert observation in wrapped.observation_space
    assert observation["input_ids"].max() < 1000
    assert (observation["input_ids"][observation["attention_mask"] == 0] == 0).all()
    ids = observation["action_ids"].reshape(MAX_ACTIONS, 8)
    assert (ids[: int(wrapped.action_masks().sum())].sum(1) > 0).all() and ids[-1].sum() == 0
    assert HashTokenizer()("tile 64", max_length=4) == HashTokenizer()("tile 64", max_length=4)


def test_a_hugging_face_tokenizer_fits(task: Task) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "device": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")
    wrapped = TokenizeObservation(KernelOptimizationEnv(task), tokenizer, length=32)
    observation, _ = wrapped.reset(seed=0)
    assert observation["input_ids"][0] == 2 and observation in wrapped.observation_space


def test_a_short_training_run(task: Task) -> None:
    from sb3_contrib import MaskablePPO

    wrapped = TokenizeObservation(KernelOptimizationEnv(task, max_steps=8), length=32)
    model = MaskablePPO(
        "MultiInputPolicy", wrapped, n_steps=32, batch_size=16, n_epochs=1, seed=0, policy_kwargs={"net_arch": [8]}
    )
    model.learn(64)
    observation, _ = wrapped.reset(seed=0)
    chosen, _ = model.predict(observation, action_masks=wrapped.action_masks(), deterministic=True)
    assert wrapped.action_masks()[int(chosen)]
