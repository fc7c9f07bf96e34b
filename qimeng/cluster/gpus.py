"""The GPUs of a cluster, as Ray's list of nodes tells of them.

Deals in rows of that list. Knows nothing about what runs on a GPU, and does not import Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qimeng.errors import QimengError

LABEL, RESOURCE = "ray.io/accelerator-type", "accelerator_type:"
"""Where Ray says what its GPUs are: a label of the node, and the beginning of a resource's name."""
NONE = "none"
"""The generation of a node without a GPU, on which times are estimated."""


class ClusterError(QimengError):
    """A cluster cannot be used as asked; the message says what to do."""

    code = "cluster"


@dataclass(frozen=True, order=True)
class Gpu:
    """One GPU of a cluster, or a node without any.

    Attributes:
        node: id that Ray gives the node; one that leaves and comes back has another.
        number: counts the GPUs of a node, from 0; not the number that CUDA gives it.
        generation: such as ``"H100"``; `NONE` for a node without a GPU, empty where Ray cannot tell.
    """

    node: str
    number: int
    generation: str

    @property
    def name(self) -> str:
        """The same for all processes that use the cluster."""
        return f"gpu-{self.node[:16]}-{self.number}"


def gpus_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Gpu, ...]:
    """Every GPU of the nodes that live; the nodes themselves, without GPU, where none has one.

    Args:
        nodes: the rows of `ray.nodes()`.

    >>> node = {"NodeID": "ab", "Alive": True, "Resources": {"GPU": 2.0, "CPU": 8.0, "accelerator_type:H100": 1.0}}
    >>> [(gpu.name, gpu.generation) for gpu in gpus_of([node])]
    [('gpu-ab-0', 'H100'), ('gpu-ab-1', 'H100')]
    """
    alive = sorted((node for node in nodes if node["Alive"]), key=lambda node: str(node["NodeID"]))
    found = tuple(
        Gpu(node["NodeID"], i, _generation_of(node))
        for node in alive
        for i in range(int(node["Resources"].get("GPU", 0)))
    )
    return found or tuple(Gpu(node["NodeID"], 0, NONE) for node in alive if node["Resources"].get("CPU", 0) >= 1)


def _generation_of(node: Mapping[str, Any]) -> str:
    """What the GPUs of a node are, as its label says, or its resource; empty where neither does."""
    label = (node.get("Labels") or {}).get(LABEL, "")
    named = (key.removeprefix(RESOURCE) for key in node["Resources"] if key.startswith(RESOURCE))
    return label or next(named, "")


def chosen_generation(gpus: Sequence[Gpu], wanted: str = "") -> str:
    """The generation that a run stays on: `wanted`, or the one with the most GPUs.

    Raises:
        ClusterError: there is none, or none that is wanted.
    """
    counts = Counter(gpu.generation for gpu in gpus)
    if not counts:
        raise ClusterError("the cluster has no node that lives; start one with `ray start`, see docs/cluster.md")
    if wanted and wanted not in counts:
        known = ", ".join(f"{n} of {name or 'no label'}" for name, n in sorted(counts.items()))
        raise ClusterError(f"the cluster has no GPU of generation {wanted!r}; it has {known}")
    return wanted or min(counts, key=lambda name: (-counts[name], name))


__all__ = ["LABEL", "NONE", "ClusterError", "Gpu", "chosen_generation", "gpus_of"]
