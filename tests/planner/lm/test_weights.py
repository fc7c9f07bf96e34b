"""Saved planners load as they were; what does not fit is refused with one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.state import STOP, Budget
from qimeng.envs.steps.task import Task
from qimeng.errors import WeightsError
from qimeng.interfaces import Action, Evaluation, Gate, Step, Timing
from qimeng.planner import make_planner, make_search
from qimeng.planner.lm.corpus import random_walk
from qimeng.planner.lm.mini import MiniSize, train_tokenizer
from qimeng.planner.lm.planner import LanguageModelPlanner, untouched
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.scoring import Scale
from qimeng.planner.lm.weights import Card, PlannerModel, add_lora, from_hub, load, new_mini, save
from qimeng.planner.search import PATIENCE

CARD = Card("3 states", "none, estimated", "LogSpeedupReward", {"share at 5": "12 %"})


def model(reader: Reader, tiny: MiniSize, seed: int = 1) -> PlannerModel:
    made = new_mini(reader.tokenizer, tiny, Scale("none", 2.0), seed, length=192)
    torch.manual_seed(seed)
    for parameter in (*made.scorer.value.parameters(), *made.scorer.worth.parameters()):
        torch.nn.init.normal_(parameter)
    return made


def looks(planner: PlannerModel, task: Task) -> list[tuple[list[float], float]]:
    return [LanguageModelPlanner(planner).look(seen) for seen in random_walk(task, 3)]


def flat(found: list[tuple[list[float], float]]) -> list[float]:
    return [x for scores, value in found for x in [*scores, value]]


@pytest.fixture
def folder(reader: Reader, tiny: MiniSize, tmp_path: Path) -> Path:
    save(model(reader, tiny), tmp_path / "planner", CARD)
    return tmp_path / "planner"


def test_a_whole_model_comes_back_as_it_was(folder: Path, reader: Reader, tiny: MiniSize, task: Task) -> None:
    back = load(folder)
    assert looks(back, task) == looks(model(reader, tiny), task)
    assert (back.reader.length, back.scorer.scale, back.adapted) == (192, Scale("none", 2.0), False)
    assert {p.name for p in folder.glob("*.safetensors")} == {"model.safetensors", "heads.safetensors"}


def test_half_precision_is_half_as_large_and_nearly_the_same(
    folder: Path, reader: Reader, tiny: MiniSize, task: Task, tmp_path: Path
) -> None:
    save(model(reader, tiny), tmp_path / "half", CARD, half=True)
    sizes = [(f / "model.safetensors").stat().st_size for f in (folder, tmp_path / "half")]
    assert sizes[1] < 0.6 * sizes[0]
    assert flat(looks(load(tmp_path / "half"), task)) == pytest.approx(flat(looks(load(folder), task)), abs=0.05)


def test_an_adapter_alone_comes_back_on_its_base(folder: Path, task: Task, tmp_path: Path) -> None:
    adapted = from_folder(folder)
    save(adapted, tmp_path / "adapter", CARD)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    back = load(tmp_path / "adapter")
    assert back.adapted and flat(looks(back, task)) == pytest.approx(flat(looks(adapted, task)), abs=1e-4)
    assert flat(looks(back, task)) != pytest.approx(flat(looks(load(folder), task)), abs=1e-2)
    assert not [n for n, p in back.scorer.lm.named_parameters() if p.requires_grad]
    again = load(tmp_path / "adapter", base=str(folder), trainable=True)
    assert all("lora" in n for n, p in again.scorer.lm.named_parameters() if p.requires_grad)


def from_folder(folder: Path) -> PlannerModel:
    """The saved model with a LoRA adapter that changes it."""
    made = load(folder)
    made.base = str(folder)
    add_lora(made, rank=4)
    torch.manual_seed(5)
    for name, parameter in made.scorer.lm.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def test_any_causal_language_model_is_loaded_by_its_path(folder: Path, task: Task, tmp_path: Path) -> None:
    made = from_hub(str(folder))
    assert made.base == str(folder) and len(looks(made, task)) == 4
    with pytest.raises(WeightsError, match="no causal language model at"):
        from_hub(str(tmp_path))


def test_the_card_says_what_it_is(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    for part in ("Whole model: llama", "normalized by none, temperature 2", "| reward | LogSpeedupReward |", "12 %"):
        assert part in text


# ---- what does not fit


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_heads(folder: Path) -> None:
    (folder / "heads.safetensors").unlink()


def other_tokenizer(folder: Path) -> None:
    train_tokenizer(["other texts than those"] * 3, 300).save_pretrained(folder)


def about(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "planner.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def other_size(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage_weights, "cannot be loaded"),
        (remove_weights, "cannot be loaded"),
        (remove_heads, "cannot be loaded"),
        (other_tokenizer, "is not the one that its model was trained with"),
        (other_size, "do not fit their config.json, beginning with model.layers.2"),
        (about(format=7), "has format 7; this version of qimeng reads format 6"),
        (about(texts=1), "reads texts of version 1, this version of qimeng writes version 2: train it again"),
        (about(texts=None), "reads texts of version None"),
        (about(features=3), "reads 3 features"),
        (about(action_features=3), "reads 3 action features"),
        (about(adapter=True), "names no base model"),
        (lambda folder: (folder / "planner.json").write_text("{"), "planner.json is damaged"),
        (lambda folder: (folder / "planner.json").write_text("[]"), "planner.json is damaged: it holds no table"),
        (shutil.rmtree, "planner.json is missing"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, harm: Callable[[Path], None], message: str) -> None:
    harm(folder)
    with pytest.raises(WeightsError, match=message):
        load(folder)


# ---- the planner


def test_the_planner_is_made_by_name_and_folder(folder: Path, task: Task) -> None:
    planner = make_planner(f"lm:{folder}")
    assert isinstance(planner, LanguageModelPlanner)
    seen = next(random_walk(task, 1))
    scores = planner.scores(seen)
    moves = [s for s, a in zip(scores, seen.actions, strict=True) if a != STOP]
    assert len(scores) == len(seen.actions) and torch.tensor(moves).isfinite().all()
    assert float(torch.tensor(scores).exp().sum()) == pytest.approx(1, abs=1e-4)
    assert planner.choose(seen) == seen.actions[max(range(len(scores)), key=scores.__getitem__)]


def test_it_goes_on_where_it_can_until_nothing_better_is_found(folder: Path, task: Task) -> None:
    planner, seen = LanguageModelPlanner(folder), next(random_walk(task, 1))
    assert dict(zip(seen.actions, planner.scores(seen), strict=True))[STOP] == -inf
    assert planner.scores(replace(seen, actions=(STOP,))) == [pytest.approx(0, abs=1e-5)], "nothing else is legal"
    regions = tuple(r.id for r in seen.program.called)
    worse = Step(Action("fusion", regions), Evaluation(Gate.PASSED, timing=Timing(2.0)), True)
    better = replace(worse, evaluation=Evaluation(Gate.PASSED, timing=Timing(1.0)))
    assert planner.choose(replace(seen, history=(better, *[worse] * (PATIENCE - 1)))) != STOP
    assert planner.choose(replace(seen, history=(better, *[worse] * PATIENCE))) == STOP
    assert planner.choose(replace(seen, history=(*[worse] * PATIENCE, better))) != STOP
    first = replace(worse, action=Action("lowering", regions[:1]))
    assert len(untouched(replace(seen, history=(first,)))) == len(regions) - 1 > 0
    for steps, ends in ((PATIENCE + len(regions) - 2, False), (PATIENCE + len(regions) - 1, True)):
        history = (replace(first, evaluation=better.evaluation), *[first] * steps)
        assert (planner.choose(replace(seen, history=history)) == STOP) is ends, "while regions are left, it goes on"


def test_missing_weights_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.planner.lm.planner.SHIPPED", tmp_path / "lost")
    with pytest.raises(WeightsError, match="lost.*install qimeng again.*planner='heuristic' needs none"):
        make_planner("lm")
    with pytest.raises(WeightsError, match="name a folder that a training run wrote"):
        make_planner(f"lm:{tmp_path}")


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_every_search_takes_it(search: str, folder: Path, task: Task) -> None:
    result = optimize(task, make_search(search, f"lm:{folder}"), Budget(evaluations=8, steps=8))
    assert result.evaluation.ok and result.evaluations <= 8


def test_a_planner_of_its_own_weights_is_asked_once(folder: Path, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, (first, second, *_) = LanguageModelPlanner(folder), random_walk(task, 3)
    passes: list[int] = []
    look = planner._look
    monkeypatch.setattr(planner, "_look", lambda rows: passes.append(len(rows)) or look(rows))
    found = [planner.look(first), planner.look(second), planner.look(first)]
    assert found[0] == found[2] != found[1] and passes == [1, 1]
    found[0][0][0] = 0.0  # the caller's list, not what is remembered
    assert planner.look(first) == found[2]
    monkeypatch.setattr("qimeng.planner.lm.planner.REMEMBERED", 2)
    planner.look(replace(first, steps_left=1))  # the oldest is forgotten
    planner.look(first)
    assert passes == [1, 1, 1, 1]


def test_a_model_that_may_be_trained_is_asked_each_time(reader: Reader, tiny: MiniSize, task: Task) -> None:
    trained = model(reader, tiny)
    planner, seen = LanguageModelPlanner(trained), next(random_walk(task, 3))
    before = planner.look(seen)
    torch.nn.init.normal_(next(trained.scorer.value.parameters()))
    assert planner.look(seen) != before
