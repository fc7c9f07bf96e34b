"""`qimeng train --cluster`: the model is trained here, the cluster's processes judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qimeng.cli import main
from qimeng.cluster.pool import ClusterPool
from qimeng.planner.lm.weights import is_planner
from qimeng.store import Store
from tests.cluster.conftest import Nodes
from tests.cluster.fakes import Measuring, fake_judge_of, request
from tests.cluster.light import make
from tests.cluster.virtual import Machines

SETTINGS = """
answers = "live"
device = "h100"
specs = 2
seed = 3
length = 96
[mini]
hidden = 32
layers = 1
heads = 2
inner = 64
[ppo]
steps = 6
environments = 2
rollout = 3
batch = 6
epochs = 1
max_steps = 3
"""


def test_a_judge_whose_gpu_leaves_goes_on_at_another_where_answers_stand_alone() -> None:
    machines = Machines()
    machines.add(1), machines.add(1)
    pool = ClusterPool(make, Measuring, machines.fleet(), lanes=1, moves=True)
    assert pool.evaluate(request("a").program).ok
    home = pool.home
    assert home is not None
    machines.ray.kill(next(node for node in machines.ray.machines if node.name == home.node))
    assert pool.evaluate(request("b").program).ok and pool.home != home
    assert pool.report.again in ({}, {"machine": 1})
    pool.close()
    machines.loop.close()


def test_stored_answers_need_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--cluster", "auto", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "set answers to 'live' or 'mixed'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_planner_is_trained_on_what_a_cluster_says(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qimeng.cluster.judging.judge_of", fake_judge_of)
    config, out = tmp_path / "tiny.toml", tmp_path / "planner"
    config.write_text(SETTINGS)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--cluster", nodes.address, "--generation", "B200", "--config", str(config), "--out", str(out)])
    assert ended.value.code in (0, None)
    report = json.loads((out / "report.json").read_text())
    assert is_planner(out) and report["curve"][-1]["steps"] == 6 and report["times"].startswith("h100, ESTIMATED")
    with Store(out / "store.sqlite") as store:
        rows = list(store.evaluations())
    assert len(rows) >= report["evaluations"] >= 2, "each program is judged once; alternatives have rows of their own"
    assert any(evaluation.ok for *_, evaluation in rows)
    assert {dict(conditions.versions)["evaluator"].split()[0] for conditions, *_ in rows} == {"EstimatingEvaluator"}
