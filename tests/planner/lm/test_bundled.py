"""Bundles of small programs as large ones, and a writer that does not carry everything out."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from qimeng import KernelSpec
from qimeng.errors import QimengError
from qimeng.graph.side_by_side import side_by_side
from qimeng.planner.data.bundles import bundles, plannable
from qimeng.planner.data.oracle import OraclePlanner
from qimeng.planner.data.parts import COMPOSED, Captured, parts_of
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.data.writer_profile import WriterProfile, cell
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.lm.bundled import Bundles, bundled
from qimeng.planner.lm.config import TrainConfig, TrainingError, load_config
from qimeng.planner.lm.networks import captured_networks, network_pairs
from qimeng.planner.lm.sources import gather
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.testing import FakeCoder

KEPT = Path(__file__).parents[1] / "data" / "h200_estimated.jsonl.xz"
FEW = Bundles(count=2, apart=2, held_out=2, least=6, most=8)


@pytest.fixture(scope="module")
def trees() -> list[Tree]:
    return list(islice(read_trees(KEPT), 0, 9))


@pytest.fixture(scope="module")
def captured(trees: list[Tree]) -> list[Captured]:
    return captured_networks(trees)


def test_graphs_side_by_side_keep_their_regions() -> None:
    def one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).sum(1)

    specs = (
        KernelSpec.from_function(one, (torch.rand(4, 8), torch.rand(8, 8))),
        KernelSpec.of(Two(), (torch.rand(4, 8),)),
    )
    graphs = [capture_spec(spec, verify=False) for spec in (*specs, specs[0])]
    both = side_by_side(graphs)
    assert both.n_inputs == sum(g.n_inputs for g in graphs) and len(both.outputs) == 3
    assert {key for key, _ in both.mutations} == {f"g1_{key}" for key, _ in graphs[1].mutations} != set()
    apart = [r.signature for g in graphs for r in Program.start(g).called]
    assert [r.signature for r in Program.start(both).called] == apart
    inputs = [n for n in both.nodes.values() if n.kind == "input"]
    assert [int(n.target) for n in inputs] == list(range(both.n_inputs))


def test_a_bundle_takes_what_its_computations_take(captured: list[Captured]) -> None:
    parts = parts_of(captured)
    made, again = (list(bundles(captured, parts, FakeCoder(), 3, seed=1, sizes=(6, 8))) for _ in range(2))
    assert made and [t.name for t, _ in made] == [t.name for t, _ in again]
    for tree, start in made:
        ((purpose, subject, evaluation),) = tree.evaluations
        assert purpose == COMPOSED and subject == start.digest and evaluation.ms
        assert evaluation.ms == pytest.approx(sum(parts.on_torch(r) or 0.0 for r in start.called), rel=0.2)


def test_what_is_hardly_known_is_in_no_bundle(captured: list[Captured]) -> None:
    parts = parts_of(captured)
    kept = list(plannable(captured, parts, FakeCoder()))
    assert 0 < len(kept) <= len(captured)
    assert list(plannable(captured, replace(parts, moves={}), FakeCoder())) == []


def test_bundles_that_are_trained_on_share_no_tree_with_others(trees: list[Tree]) -> None:
    made = bundled(trees[:4], trees[4:], FEW, "template", seed=3)
    assert len(made.training) == 2 and made.validation and made.held_out
    for task in (*made.training, *made.held_out):
        assert task.gain >= 1 and task.tree.family == "bundle"


def test_what_a_writer_cannot_write_is_refused(captured: list[Captured], tmp_path: Path) -> None:
    rows = [
        {"coder": "trained", "kind": "lowering", "chain": "linear+relu", "tries": ["wrong", "passed"]},
        {"coder": "trained", "kind": "fusion", "chain": "relu+mul+add", "tries": ["passed"]},
        {"coder": "trained", "kind": "tiling", "chain": "mean", "tries": ["passed"]},
        {"coder": "template", "kind": "lowering", "chain": "relu", "tries": ["passed"]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile = WriterProfile.read(path)
    assert profile.shares == {("products", 0): 0.0, ("pointwise", 1): 1.0} and profile.changes == 1.0
    assert profile.share(cell(["mean", "sub"])) == 0.5, "of what it has no rows, as all others"
    plain = parts_of(captured)
    able, unable = (replace(plain, writes=WriterProfile({("rows", 0): share}, share)) for share in (1.0, 0.0))
    seen = 0
    for region in (r for _, start in captured for r in Program.start(start.graph).called):
        for (signature, made), moves in plain.moves.items():
            if signature != region.signature:
                continue
            assert able.tried(region, made) == moves
            for move, outcome in moves.items():
                found = unable.tried(region, made)[move]
                wrong = outcome.implementation.generated or outcome.ratio is None
                assert (found.ratio is None) is wrong
                refusal = unable.refusal(region, outcome.implementation)
                assert not outcome.implementation.generated or refusal is not None and refusal.failure == "wrong"
                seen += 1
    assert seen
    with pytest.raises(QimengError, match="no judged answers"):
        WriterProfile.read(path, "nobody")
    with pytest.raises(QimengError, match="holds no rows"):
        WriterProfile.read(tmp_path / "missing.jsonl")


def test_a_kernel_that_lowering_wrote_is_no_change_of_another(captured: list[Captured]) -> None:
    parts = parts_of([*captured, *reversed(captured)])
    written = [
        (region.signature, outcome.implementation.digest)
        for _, start in captured
        for region in start.called
        for (kind, _), outcome in parts.moves.get((region.signature, start.implementation(region).digest), {}).items()
        if kind == "lowering"
    ]
    assert written and all(parts.kinds[key] == "lowering" for key in written)


def test_writers_differ_by_their_spread(captured: list[Captured]) -> None:
    parts = parts_of(captured)
    region, made = next(
        (r, o.implementation)
        for _, start in captured
        for r in start.called
        for o in parts.moves.get((r.signature, start.implementation(r).digest), {}).values()
        if o.implementation.generated
    )
    plain = WriterProfile({}, 0.7)
    assert plain.chance(region, made, "tiling") == 0.7
    found = [replace(plain, seed=f"{n}", spread=2.0).chance(region, made, "tiling") for n in range(300)]
    odds = [math.log(p / (1 - p)) for p in found]
    assert statistics.mean(odds) == pytest.approx(math.log(0.7 / 0.3), abs=0.4)
    assert statistics.stdev(odds) == pytest.approx(2, rel=0.2)
    assert found[0] == replace(plain, seed="0", spread=2.0).chance(region, made, "tiling")
    never = WriterProfile({}, 0.0, spread=2.0)
    assert never.chance(region, made, "tiling") == 0.0


def test_who_knows_chances_alone_meets_wrong_kernels(trees: list[Tree], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chains = [("linear", "passed"), ("linear", "wrong"), ("mean", "passed"), ("mean", "wrong"), ("relu", "passed")]
    rows = [{"coder": "trained", "kind": "lowering", "chain": chain, "tries": [found]} for chain, found in chains]
    rows.append({"coder": "trained", "kind": "tiling", "chain": "mean", "tries": ["passed"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = bundled(trees[:4], trees[4:], replace(FEW, writer=str(path)), "template", seed=3)
    writers = [task.parts.coder.parts.writes for task in (*made.training, *made.held_out)]
    assert len(set(map(str, writers))) == len(writers), "each bundle meets another writer"
    refused = {True: 0, False: 0}
    for task in (*made.training, *made.held_out):
        gains = {}
        for foresees in (True, False):
            session = task.begin(evaluations=8)
            GreedySearch(OraclePlanner(task.parts, foresees)).run(session)
            refused[foresees] += sum(not step.accepted for step in session.ledger.attempts)
            gains[foresees] = session.ledger.best.ms if session.ledger.best else None
        assert gains[True] is not None and gains[True] <= 1.02 * (gains[False] or 1e9)
    assert refused[False] > refused[True] == 0
    pairs = network_pairs((*made.training, *made.held_out), walks=2)
    walked = [step for seen, _ in pairs for step in seen.history]
    assert any(not step.accepted for step in walked), "who imitates sees what comes of wrong kernels"


def test_training_takes_bundles(tmp_path: Path) -> None:
    config = load_config(
        None, [f"trees=['{KEPT}']", "bundles.count=2", "bundles.apart=1", "walks=0", "ppo.max_steps=8"]
    )
    assert isinstance(config, TrainConfig)
    config = replace(config, bundles=replace(config.bundles, least=6, most=8))
    with pytest.raises(TrainingError, match="bundles are answered from what was found of regions"):
        gather(replace(config, answers="mixed"), tmp_path)
    with pytest.raises(QimengError, match="least = 9 is above"):
        gather(replace(config, bundles=replace(config.bundles, least=9)), tmp_path)
