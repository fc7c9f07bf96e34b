"""Specs of the vocabulary packages, and the steps before and after an adaptation; fakes for GPU and planner."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from experiments.planners import vocabulary
from experiments.planners.replay import Method, ReplayRow
from experiments.planners.summary import planners_pooled, pooled
from experiments.planners.vocabulary import app, methods_of
from experiments.planners.vocabulary_specs import FAMILIES, HELD_OUT, SMALL, TRAINING, drawn
from qimeng.actions import Context, legal_actions
from qimeng.bench.collect import STORE
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.planner.data.generate import Drawn
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.data.tree_store import trees_of
from qimeng.planner.lm.adapt import Adaptation
from qimeng.planner.lm.config import TrainConfig
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeEvaluator, fake_task
from tests.bench.inline import Inline

NEW = {"sparsify", "dequantize", "aggregate", "dispatch", "route"}


def test_the_halves_share_nothing_and_are_always_the_same() -> None:
    training, held = drawn(TRAINING), drawn(HELD_OUT)
    assert len(training) == sum(TRAINING.counts.values()) >= 24 and len(held) == sum(HELD_OUT.counts.values()) >= 16
    assert not {d.spec.digest for d in training} & {d.spec.digest for d in held}
    assert [d.spec.digest for d in held] == [d.spec.digest for d in drawn(HELD_OUT)]
    for name in ("widths", "rows", "percents", "patterns", "graphs", "nodes", "degrees", "features", "experts"):
        assert not set(getattr(TRAINING, name)) & set(getattr(HELD_OUT, name)), name
    assert {d.family for d in training} == {d.family for d in held} == set(FAMILIES)
    assert {d.family for d in held if d.spec.weights} == {"sparse", "stored"}


@pytest.mark.parametrize("one", drawn(SMALL), ids=lambda d: d.family)
def test_new_actions_are_legal_at_the_start(one: Drawn) -> None:
    program = Program.start(capture_spec(one.spec, verify=False))
    offered = legal_actions(program, Context(DEVICES["h100"], TemplateCoder()))
    assert NEW & {a.kind for a in offered}


def test_trees_keep_declared_weights_and_the_budget_counts_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(spec: Any, device: object, store: Store, by_region: bool = False) -> Any:
        task = fake_task(capture_spec(spec, verify=False))
        conditions = Conditions(spec.digest, "h200")
        return replace(task, conditions=conditions, evaluator=CachingEvaluator(FakeEvaluator(), store, conditions))

    monkeypatch.setattr("qimeng.envs.steps.setup.make_task", fake)
    monkeypatch.setattr("experiments.planners.explore.Pool", Inline)
    monkeypatch.setattr(vocabulary, "trained_by", lambda: ("heuristic",))
    few = replace(SMALL, counts={"stored": 1, "graph": 1})
    monkeypatch.setattr(vocabulary, "SMALL", few)
    done = CliRunner().invoke(app, ["explore", str(tmp_path), "training", "--small", "--device", "h200"])
    assert done.exit_code == 0 and done.output.count(" 12 evaluations, ") == 2, done.output
    with Store(tmp_path / "training" / STORE) as store:
        trees = list(trees_of(store))
    assert {t.spec().digest for t in trees} == {d.spec.digest for d in drawn(few)}
    assert {t.family: t.weights for t in trees} == {d.family: d.spec.weights for d in drawn(few)}
    assert any(t.weights for t in trees)
    assert all(Tree.from_data(json.loads(json.dumps(t.to_data()))) == t for t in trees)

    def adapted(config: TrainConfig, folder: Path, *unused: object) -> Adaptation:
        (folder / "planner.json").write_text("{}")
        some = list(read_trees(config.trees[0]))
        return Adaptation("h200", "h200, measured", sum(len(t.evaluations) for t in some), 1, 2)

    monkeypatch.setattr("qimeng.planner.lm.adapt.run_adaptation", adapted)
    most = max(len(t.evaluations) for t in trees)
    done = CliRunner().invoke(app, ["adapt", str(tmp_path), "--how", "longer", "--seed", "1", "--budget", str(most)])
    assert done.exit_code == 0, done.output
    seen = list(read_trees(tmp_path / "planners" / "longer-1" / "trees.xz"))
    assert len(seen) == 1 and sum(len(t.evaluations) for t in seen) <= most
    folder = tmp_path / "planners" / "longer-1"
    assert {f"longer-1=lm:{folder}", "before=lm"} < set(methods_of(tmp_path / "planners"))


def test_all_steps_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[list[str], float]] = []

    def run_step(words: list[str], seconds: float) -> int:
        called.append((words, seconds))
        return 0

    monkeypatch.setattr(vocabulary, "run_step", run_step)
    (tmp_path / "rows.jsonl").write_text("of smaller trees\n")
    done = CliRunner().invoke(app, ["all", str(tmp_path), "--seconds", "400", "--device", "h100"])
    assert done.exit_code == 0 and not (tmp_path / "rows.jsonl").exists(), done.output
    assert [words[0] for words, _ in called] == ["explore", "adapt-all", "explore", "replay"]
    assert [seconds for _, seconds in called] == pytest.approx([100, 200, 320, 400], abs=5)  # nothing took any time
    for words, seconds in called:
        assert float(words[-1]) < seconds and (words[0] != "explore" or "h100" in words)
        parsed = get_command(app).commands[words[0]].make_context(words[0], words[1:])  # type: ignore[attr-defined]
        assert parsed.params["out"] == tmp_path


def test_a_step_is_ended_with_its_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    waits.write_text(f"#!/bin/sh\nsleep 100 & echo $! > {tmp_path / 'child'}\nwait\n")
    waits.chmod(0o755)
    monkeypatch.setattr(vocabulary.sys, "executable", str(waits))
    assert vocabulary.run_step([], 2.0) == -signal.SIGTERM
    child = int((tmp_path / "child").read_text())
    state, end = Path(f"/proc/{child}/stat"), time.monotonic() + 30
    with suppress(FileNotFoundError, ProcessLookupError):  # it may be gone between two looks
        while "Z" not in state.read_text().split(")")[1]:
            assert time.monotonic() < end, "a process of the step goes on"
            time.sleep(0.05)


def test_training_seeds_are_one_method() -> None:
    def row(label: str, spec: str, gain: float) -> ReplayRow:
        gains = (0.0, gain, 1.0)
        about = (Method(label, f"lm:{label}"), 0, gains, 1.0, 9, 0.5, 3, 3, "stop", "", 0.1, "h200", False)
        return ReplayRow(spec, spec, "sparse", *about)

    rows = [row("before", s, 0.2) for s in "ab"] + [row(f"longer-{n}", s, 0.4 + n / 5) for s in "ab" for n in (0, 1)]
    assert {r.method.label for r in pooled(rows)} == {"before", "longer"} and len({r.key for r in pooled(rows)}) == 6
    text = planners_pooled([replace(r, gains=(*r.gains, 1.0, 1.0)) for r in rows])
    assert "| longer | 2 |" in text and "+0 (+0 … +0)" in text
