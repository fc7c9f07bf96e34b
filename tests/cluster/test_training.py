"""`qimeng train --cluster` without Ray: what is refused, and judges whose GPU leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from qimeng.cli import main
from qimeng.cluster.pool import ClusterPool
from tests.cluster.fakes import Measuring, request
from tests.cluster.light import make
from tests.cluster.virtual import Machines


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


def test_judges_of_several_computations_work_beside_each_other_where_they_say_so() -> None:
    took = {}
    for beside in (1, 3):
        machines = Machines()
        machines.add(1)
        pools = [ClusterPool(make, Measuring, machines.fleet(), lanes=1, beside=beside) for _ in range(3)]
        for pool in pools:
            assert pool.evaluate(request("start").program).ok
        began = machines.loop.time()
        tickets = [pool.submit(request("a")) for pool in pools]
        for pool, ticket in zip(pools, tickets, strict=True):
            assert [found.ok for _, found in pool.gather([ticket])] == [True]
        took[beside] = machines.loop.time() - began
        for pool in pools:
            pool.close()
        machines.loop.close()
    assert took[3] < 0.7 * took[1]


def test_stored_answers_need_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--cluster", "auto", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "set answers to 'live' or 'mixed'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
