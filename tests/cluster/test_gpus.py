"""What Ray's list of nodes tells of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from qimeng.cluster.gpus import NONE, ClusterError, chosen_generation, gpus_of


def node(name: str, alive: bool = True, label: str = "", **resources: float) -> dict[str, Any]:
    labels = {"ray.io/accelerator-type": label} if label else {}
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0, **resources}, "Labels": labels}


def test_a_gpu_is_known_by_its_label_or_resource_and_dead_nodes_have_none() -> None:
    nodes = [
        node("c", label="H100", GPU=2.0),
        node("b", GPU=1.0, **{"accelerator_type:A100": 1.0}),
        node("a", GPU=1.0),
        node("dead", alive=False, label="H100", GPU=8.0),
        node("head"),
    ]
    found = gpus_of(nodes)
    assert [(g.node, g.number, g.generation) for g in found] == [
        ("a", 0, ""),
        ("b", 0, "A100"),
        ("c", 0, "H100"),
        ("c", 1, "H100"),
    ]
    assert len({g.name for g in found}) == 4
    assert chosen_generation(found) == "H100" and chosen_generation(found, "A100") == "A100"
    with pytest.raises(ClusterError, match="no GPU of generation 'B200'; it has 1 of no label, 1 of A100, 2 of H100"):
        chosen_generation(found, "B200")


def test_without_any_gpu_each_node_that_computes_is_a_place() -> None:
    found = gpus_of([node("b"), node("a"), node("head", CPU=0.0)])
    assert [(g.node, g.generation) for g in found] == [("a", NONE), ("b", NONE)]
    with pytest.raises(ClusterError, match="no node that lives"):
        chosen_generation(gpus_of([node("a", alive=False)]))
