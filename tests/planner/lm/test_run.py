"""Whole runs on stored trees, with a tiny model: what they write, that they go on, what they refuse, adaptation."""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qimeng.cli import main
from qimeng.device import DEVICES
from qimeng.envs.steps.setup import CODERS
from qimeng.errors import QimengError
from qimeng.planner.lm import replay
from qimeng.planner.lm import run as run_module
from qimeng.planner.lm.adapt import adaptation_config, run_adaptation
from qimeng.planner.lm.config import TrainConfig, TrainingError, load_config
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.run import Report, Run, alone, prepare
from qimeng.planner.lm.sources import IMITATED, gather
from qimeng.planner.lm.stored import StoredTask
from qimeng.planner.lm.weights import load

TINY = """
coder = "fake"
held_out = 0.5
walks = 0
length = 96
validate_every = 2
validation_evaluations = 5
[mini]
hidden = 32
layers = 1
heads = 2
inner = 64
[imitation]
epochs = 2
[value]
episodes = 3
epochs = 2
[ppo]
steps = 24
environments = 2
rollout = 3
batch = 6
epochs = 1
max_steps = 4
rate = 1e-2
"""


def quick(patch: pytest.MonkeyPatch) -> None:
    """The fakes' coder has a name, and planners are looked at briefly."""
    patch.setitem(CODERS, "fake", "qimeng.testing:FakeCoder")
    patch.setattr(replay, "IDLE", 2)
    patch.setattr(run_module, "FINAL_SEEDS", (0,))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def trained(trees_file: Path, settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run through the command line."""
    out = tmp_path_factory.mktemp("runs") / "planner"
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        with pytest.raises(SystemExit) as ended:
            main(["train", str(trees_file), "--out", str(out), "--config", str(settings)])
    assert ended.value.code in (0, None)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in load(folder).scorer.named_parameters()}


def test_a_run_leaves_a_planner_and_says_what_it_is(trained: Path, stored: tuple[StoredTask, ...]) -> None:
    report = json.loads((trained / "report.json").read_text())
    assert report["held_out"] == 1  # the other tree that was set aside is for validation
    assert set(report["shares"]) == {"chance", "untrained", "imitated", "trained"}
    assert report["curve"][-1]["steps"] == 24 and 0 < report["coverage"] <= 1 and report["pairs"] > 4
    card = (trained / "README.md").read_text()
    for part in ("trees.jsonl.xz (blake2b ", "h200, ESTIMATED by an analytic model", "| reward | log-speedup |"):
        assert part in card
    for part in ("mean coverage", "trained, ", "untrained, ", "share at 5"):
        assert f"| {part}" in card or part in card
    planner = LanguageModelPlanner(trained)
    seen = stored[0].begin().observe()
    assert planner.choose(seen) in seen.actions and planner.model.devices == ("h200",)
    assert planner.model.learnt is not None and "lowering" in planner.model.learnt.actions
    assert weights(trained / "imitated").keys() == weights(trained).keys()


@pytest.mark.parametrize(("phase", "figure", "value"), [("imitation", "epoch", 1), ("ppo", "steps", 18)])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(
    phase: str, figure: str, value: int, trained: Path, trees_file: Path, settings: Path, tmp_path: Path
) -> None:
    config = load_config(settings, [f'trees=["{trees_file}"]'])

    def run(told: Callable[[str, Mapping[str, float]], None]) -> Report:
        return Run(config, tmp_path / "run", gather(config, tmp_path / "run"), told)()

    def kill(told: str, row: Mapping[str, float]) -> None:
        if told == phase and row[figure] == value:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kill)
    report, before = run(lambda phase, row: None), json.loads((trained / "report.json").read_text())
    rows, whole = [{k: v for k, v in row.items() if k != "seconds"} for row in report.curve], before["curve"]
    assert rows == [pytest.approx({k: v for k, v in row.items() if k != "seconds"}) for row in whole]
    assert all(torch.equal(weights(tmp_path / "run")[n], p) for n, p in weights(trained).items())
    assert not (tmp_path / "run" / "imitation.pt").exists()
    again = run(lambda phase, row: None)  # nothing is left to do
    assert (report.coverage, again.coverage) == (before["coverage"], before["coverage"])
    log = [json.loads(line)["phase"] for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    assert log.count("chance") == log.count("untrained") == 1, "what was compared before is not compared again"


def test_a_run_whose_time_is_up_is_finished_as_it_stands(trees_file: Path, settings: Path, tmp_path: Path) -> None:
    config = load_config(settings, [f'trees=["{trees_file}"]', "validate_every=0"])
    report = Run(config, tmp_path / "run", gather(config, tmp_path / "run"), seconds=0.0)()
    assert not report.curve and report.shares["trained"] == report.shares["imitated"]
    assert LanguageModelPlanner(tmp_path / "run").model.devices == ("h200",)


def test_what_a_run_refuses(trained: Path, trees_file: Path, settings: Path, tmp_path: Path) -> None:
    def config(*more: str) -> TrainConfig:
        return load_config(settings, [f'trees=["{trees_file}"]', *more])

    other = config("ppo.rate=0.5", "seed=3")
    with pytest.raises(TrainingError, match=r"holds a run with other settings \(ppo.rate, seed\)"):
        Run(other, trained, gather(other, trained))()
    with pytest.raises(TrainingError, match="no trees of 'b200': the files hold h200 .estimated."):
        gather(config("device=b200"), tmp_path)


def test_a_run_that_never_began_holds_no_folder(
    trees_file: Path, settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, out = tmp_path / "damaged.xz", tmp_path / "run"
    damaged.write_bytes(trees_file.read_bytes()[:100])
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(damaged), "--out", str(out)])
    assert "cannot be read as trees" in capsys.readouterr().err
    prepare(out, load_config(settings, [f'trees=["{trees_file}"]']))


def test_two_processes_do_not_train_in_one_folder(trees_file: Path, settings: Path, tmp_path: Path) -> None:
    config = load_config(settings, [f'trees=["{trees_file}"]'])
    prepare(tmp_path, config)
    (tmp_path / "progress.jsonl").touch()
    with alone(tmp_path), pytest.raises(TrainingError, match="another process trains in .*: wait for it to end, or"):
        prepare(tmp_path, config)
    assert (tmp_path / "progress.jsonl").exists()
    prepare(tmp_path, config)
    assert not (tmp_path / "progress.jsonl").exists()


def test_a_full_disk_leaves_the_settings_of_a_run(
    trees_file: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(settings, [f'trees=["{trees_file}"]'])
    prepare(tmp_path, config)
    (tmp_path / "imitated").mkdir()

    def full(path: Path, text: str) -> int:
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        prepare(tmp_path, config)
    prepare(tmp_path, config)  # there is room again, and the run goes on
    assert {p.name for p in tmp_path.iterdir()} == {"config.toml", "imitated"}


def test_damaged_figures_are_named(trained: Path, trees_file: Path, settings: Path, tmp_path: Path) -> None:
    config = load_config(settings, [f'trees=["{trees_file}"]'])
    out = Path(shutil.copytree(trained, tmp_path / "run"))
    (out / IMITATED).write_text("{")
    with pytest.raises(TrainingError, match=r"figures.json cannot be read .*: remove .*imitated to imitate again"):
        Run(config, out, gather(config, out))()


def test_tensorboard_that_is_missing_is_named(
    trees_file: Path,
    settings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("qimeng.planner.lm.run.find_spec", lambda name: None)
    given = ["--out", str(tmp_path / "x"), "--config", str(settings), "--set", "tensorboard=true"]
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(trees_file), *given])
    assert "TensorBoard is not installed: pip install 'qimeng[tensorboard]'" in capsys.readouterr().err


def test_settings_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--explain"])
    assert "# learning rate.\nrate = " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--out", str(tmp_path / "run")])
    assert "no trees to train on: name files that `qimeng collect export` wrote" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["train", "missing.xz"])
    assert "missing.xz is not a file; pass a file that `qimeng collect export` wrote" in capsys.readouterr().err


# ---- another device


def test_adapting_trains_an_adapter_on_a_budget(
    trained: Path, trees_file: Path, settings: Path, tmp_path: Path
) -> None:
    given = [f'start="{trained}"', "lora=2", f'trees=["{trees_file}"]', "ppo.steps=12", "device=h200"]
    config = adaptation_config(settings, given)
    found = run_adaptation(config, tmp_path / "adapted", 20)
    assert 0 < found.evaluations <= 20 and found.trained < 0.6 * found.parameters
    assert set(found.shares) == {"before", "after"}
    assert f"parameters trained with {found.evaluations} evaluations; share of the best-known" in found.sentence()
    assert "greedy" in found.sentence() and "ESTIMATED" in found.sentence()
    made = load(tmp_path / "adapted")
    assert made.adapted and made.base == str(trained.resolve())
    base = weights(trained)
    inner = {
        n.replace("base_model.model.", "").replace(".base_layer", ""): p for n, p in made.scorer.named_parameters()
    }
    assert all(torch.equal(inner[n], p) for n, p in base.items() if n.startswith("lm."))
    assert not torch.equal(inner["value.0.weight"], base["value.0.weight"])
    assert "no trees are held out" in replace(found, shares={}).sentence()


def test_imitation_that_makes_a_planner_no_better_is_undone(
    trained: Path, trees_file: Path, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [f'start="{trained}"', "lora=2", f'trees=["{trees_file}"]', "ppo.steps=0", "device=h200"]
    config, told = adaptation_config(settings, given), []
    better = {"area": 0.9, "greedy": 0.5}
    for found, undone in ((dict(better), True), (better | {"greedy": 0.6}, False)):
        looks = iter([better, found])
        monkeypatch.setattr(Run, "_shares", lambda run, model, looks=looks: next(looks))
        out = tmp_path / str(undone)
        run_adaptation(config, out, 20, lambda phase, row: told.append(phase))
        adapter = load(out).scorer
        ups = [p for n, p in adapter.named_parameters() if "lora_B" in n]
        assert ups and all((p == 0).all() for p in ups) is undone
        assert ("imitation undone" in told) is undone
        told.clear()


def test_an_adaptation_ends_in_time(trained: Path, trees_file: Path, settings: Path, tmp_path: Path) -> None:
    given = [f'start="{trained}"', "lora=2", f'trees=["{trees_file}"]', "ppo.steps=1000000", "device=h200"]
    steps: list[str] = []
    run_adaptation(
        adaptation_config(settings, given),
        tmp_path / "adapted",
        20,
        lambda phase, row: steps.append(phase),
        seconds=1.0,
    )
    assert steps.count("ppo") < 1000 and load(tmp_path / "adapted").adapted


def test_there_must_be_a_planner_to_adapt(tmp_path: Path) -> None:
    config = adaptation_config(None, ["device=h200", f'start="{tmp_path}"', "lora=2"])
    assert config.answers == "live"
    with pytest.raises(QimengError, match="no planner in .*: name a folder that a training run wrote"):
        run_adaptation(config, tmp_path / "x", 10)


def test_a_device_it_never_saw_is_said_once(trained: Path, stored: tuple[StoredTask, ...]) -> None:
    planner, seen = LanguageModelPlanner(trained), stored[0].begin().observe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.scores(seen)
    other = replace(seen, device=DEVICES["a100"])
    with pytest.warns(UserWarning, match="trained on times of h200; for a100 .* `qimeng adapt --device a100`"):
        assert len(planner.scores(other)) == len(seen.actions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.scores(other)
