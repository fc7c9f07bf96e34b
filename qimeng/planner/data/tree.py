"""Explored trees: what was tried on one spec under one set of conditions, to be walked again without a judge.

Deals in evaluations, patches and edges. Knows nothing about files (`tree_file`), stores (`tree_store`), or how
a tree was explored.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qimeng.device import row_name
from qimeng.envs.steps.caching import FINAL, ReplayCoder, ReplayEvaluator
from qimeng.errors import QimengError, ReplayError
from qimeng.interfaces import Action, Asked, Coder, Evaluation
from qimeng.interfaces.records import PatchRecord, action_from_data
from qimeng.planner.data.evaluation_data import dense, sparse
from qimeng.program.identity import IDENTITY
from qimeng.store import ACCIDENT, Conditions, Store, StoredStep, content_hash, evaluation_key
from qimeng.store.migration import Tried, renamed

if TYPE_CHECKING:
    from qimeng.envs.steps.task import Task
    from qimeng.program.program import Program
    from qimeng.spec import KernelSpec


ABOUT = ("name", "source", "dtype", "mode", "family", "seed", "index")
"""Fields of a tree that a file has as they are."""


class TreeError(QimengError):
    """A file that holds no trees, or a store without what a tree needs."""

    code = "trees"


@dataclass(frozen=True)
class Tree:
    """What was explored of one spec under one set of conditions.

    Attributes:
        name: what the spec is called.
        source: its text; empty where it was left out (`write_trees`).
        dtype: its dtype.
        mode: its precision mode.
        family: the family it was drawn from; empty where it was not drawn.
        seed: of the sequence it was drawn from; None where it was not drawn.
        index: its number there.
        conditions: under which it was judged.
        evaluations: (purpose, subject, evaluation) of everything judged.
        patches: digest of each patch to its record.
        edges: steps, accepted or not.
        identity: rule by which its programs are named (`qimeng.program.identity.IDENTITY`).
        weights: what the spec declares of its weights (`KernelSpec.weights`); empty where it declares nothing.
    """

    name: str
    source: str
    dtype: str
    mode: str
    family: str
    seed: int | None
    index: int | None
    conditions: Conditions
    evaluations: tuple[tuple[str, str, Evaluation], ...]
    patches: Mapping[str, PatchRecord]
    edges: tuple[StoredStep, ...]
    identity: int = IDENTITY
    weights: str = ""

    def spec(self) -> KernelSpec:
        """The spec.

        Raises:
            TreeError: its text was left out.
        """
        from qimeng.spec import KernelSpec

        if not self.source:
            raise TreeError(
                f"the text of {self.name} was left out of its tree: `qimeng collect merge --listed FILE` puts it back"
            )
        return KernelSpec.from_source(self.source, self.name, dtype=self.dtype, mode=self.mode, weights=self.weights)

    def with_source(self, source: str) -> Tree:
        """The same with the text that was left out.

        Raises:
            TreeError: it is the text of another spec.
        """
        made = replace(self, source=source)
        if made.spec().digest != self.conditions.spec:
            raise TreeError(f"the text given for {self.name} is that of another spec")
        return made

    @property
    def digest(self) -> str:
        """Hash of the tree's content."""
        return content_hash(json.dumps(self.to_data(), separators=(",", ":")))

    @property
    def programs(self) -> int:
        """Different programs that edges start from or lead to."""
        return len({e.parent for e in self.edges} | {e.child for e in self.edges if e.child is not None})

    @cached_property
    def explored(self) -> Mapping[str, tuple[Action, ...]]:
        """Digest of a program to the actions that were tried on it, in the order of their names."""
        found: dict[str, set[Action]] = {}
        for edge in self.edges:
            found.setdefault(edge.parent, set()).add(edge.action)
        return {parent: tuple(sorted(actions)) for parent, actions in found.items()}

    @cached_property
    def answered(self) -> Mapping[str, tuple[Action, ...]]:
        """The same, without steps of the graph alone after which nothing was tried: those say nothing.

        Exploration leaves many of them where a search dropped a branch. A planner that finds nothing to choose there
        would learn that a good fusion is a dead end.
        """
        leading: dict[str, list[str]] = {}
        for edge in self.edges:
            if edge.accepted and edge.child is not None:
                leading.setdefault(edge.child, []).append(edge.parent)
        telling = set(self.telling)
        waiting = list(telling)
        while waiting:
            for parent in leading.get(waiting.pop(), ()):
                if parent not in telling:
                    telling.add(parent)
                    waiting.append(parent)
        found: dict[str, set[Action]] = {}
        for edge in self.edges:
            if edge.evaluation is not None or not edge.accepted or edge.child in telling:
                found.setdefault(edge.parent, set()).add(edge.action)
        return {parent: tuple(sorted(actions)) for parent, actions in found.items()}

    @cached_property
    def telling(self) -> frozenset[str]:
        """Programs on which something was tried that was judged, or refused."""
        return frozenset(e.parent for e in self.edges if e.evaluation is not None or not e.accepted)

    @cached_property
    def keyed(self) -> Mapping[str, Evaluation]:
        """Evaluations by what edges call them."""
        return {evaluation_key(self.conditions, s, p): e for p, s, e in self.evaluations}

    @cached_property
    def times(self) -> Mapping[str, float]:
        """Digest of each program that was judged right to its device milliseconds."""
        alone = (FINAL, Asked.REGION.value)
        return {s: e.ms for purpose, s, e in self.evaluations if purpose not in alone and e.ok and e.ms is not None}

    def best_branch(self, start: str) -> tuple[StoredStep, ...]:
        """The fewest accepted steps from the program `start` to the fastest program that they lead to.

        Empty where nothing faster is reached, or `start` is not in the tree.
        """
        ways: dict[str, tuple[StoredStep, ...]] = {start: ()}
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            for edge in self._accepted.get(here, ()):
                assert edge.child is not None
                if edge.child not in ways:
                    ways[edge.child] = (*ways[here], edge)
                    waiting.append(edge.child)
        timed = [d for d in ways if d in self.times]
        return ways[min(timed, key=lambda d: (self.times[d], len(ways[d])))] if timed else ()

    @cached_property
    def _accepted(self) -> Mapping[str, tuple[StoredStep, ...]]:
        found: dict[str, list[StoredStep]] = {}
        for edge in self.edges:
            if edge.accepted and edge.child is not None:
                found.setdefault(edge.parent, []).append(edge)
        return {parent: tuple(edges) for parent, edges in found.items()}

    def store(self) -> Store:
        """The tree as a store in memory, with rounded times."""
        store = Store()
        for purpose, subject, evaluation in self.evaluations:
            store.put_evaluation(self.conditions, subject, evaluation, purpose)
        kept = {digest: store.put_patch(record) for digest, record in self.patches.items()}
        for edge in self.edges:
            store.put_step(self.conditions, replace(edge, patch=None if edge.patch is None else kept[edge.patch]))
        return store

    def evaluator(self) -> ReplayEvaluator:
        """Answers what was judged; everything else is a failure of class ``"unknown"``."""
        known = {s: e for purpose, s, e in self.evaluations if purpose == ACCIDENT}
        known |= {s: e for purpose, s, e in self.evaluations if purpose == FINAL}
        known |= {s: e for purpose, s, e in self.evaluations if purpose not in (ACCIDENT, FINAL)}
        return ReplayEvaluator(known)

    def coder(self, coder: Coder) -> ReplayCoder:
        """Writes the patches of the tree, whatever `coder` would write today; `coder` says what is legal."""
        return ReplayCoder(self.store(), self.conditions, coder)

    def start(self) -> Program:
        """The program that the tree begins with, as this version captures it.

        The capture is verified again only where it does not give a program that was explored.

        Raises:
            CaptureError: the spec cannot be captured.
        """
        from qimeng.graph.device_strides import heads_inside, with_strides
        from qimeng.program.program import Program
        from qimeng.program.verify import capture_spec, with_call

        spec = self.spec()
        if self.identity == IDENTITY:
            graph = capture_spec(spec, verify=False)
            for laid_out in dict.fromkeys((graph, with_strides(graph, heads_inside))):  # the tree may be a GPU's
                for quick in (Program.start(with_call(spec, laid_out)), Program.start(laid_out)):
                    if quick.digest in self.explored:
                        return quick
        return Program.start(capture_spec(spec))  # which may specialise the numbers that a module computes with

    def today(self, start: Program | None = None) -> Tree:
        """The tree with the names that this version gives its programs (`qimeng.store.migration`).

        A tree that was written under today's rule, and whose spec is captured as it was then, is returned as it is. Of
        another, what can no longer be applied is left out, and so are programs that no edge leads to.

        Args:
            start: what `start` gives, where it is known already.

        Raises:
            TreeError: nothing of it can be applied any more.
            CaptureError: the spec cannot be captured.
        """
        start, found = start or self.start(), self
        if self.identity != IDENTITY or not self._knows(start.digest):
            names = renamed(Tried(self.conditions, self.evaluations, self.patches, self.edges), start)
            judged = tuple((p, new, e) for p, s, e in self.evaluations if (new := names.subject(s)) is not None)
            edges = tuple(names.edges[e] for e in self.edges if e in names.edges)
            found = replace(self, evaluations=judged, edges=edges, identity=IDENTITY)
        if not found._knows(start.digest):
            raise TreeError(f"the tree of {self.name} does not begin with the program that this version makes of it")
        return found

    def _knows(self, digest: str) -> bool:
        return digest in self.explored or any(subject == digest for _, subject, _ in self.evaluations)

    def task(self, coder: str | Coder = "template", start: Program | None = None, current: bool = False) -> Task:
        """A task that replays the tree without a GPU: every answer comes from the tree.

        Its programs have the names of `today`.

        Args:
            coder: says what is legal.
            start: what `start` gives, where it is known already.
            current: whether the tree has today's names already.

        Raises:
            TreeError: nothing of the tree can be applied any more.
            CaptureError: the spec cannot be captured.
            DeviceError: an unknown device.
        """
        from functools import partial

        from qimeng.actions import Context
        from qimeng.envs.steps.setup import make_coder, make_device
        from qimeng.envs.steps.task import Task

        spec, start = self.spec(), start or self.start()
        tree = self if current else self.today(start)
        device = make_device(row_name(self.conditions.device))
        context = Context(device, tree.coder(make_coder(coder)), self.mode)
        reference = partial(spec.module, "cpu")
        return Task(start, context, tree.evaluator(), self.conditions, spec.name, reference=reference)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON; hashes that stand in several places are written once."""
        digests = list(dict.fromkeys(d for e in self.edges for d in (e.parent, e.child) if d is not None))
        digests += [s for s in dict.fromkeys(s for _, s, _ in self.evaluations) if s not in set(digests)]
        number = {d: i for i, d in enumerate(digests)}
        patch = {d: i for i, d in enumerate(self.patches)}
        keys = {evaluation_key(self.conditions, s, p): i for i, (p, s, _) in enumerate(self.evaluations)}
        about = {k: getattr(self, k) for k in (*ABOUT, "identity")}
        about |= {"weights": self.weights} if self.weights else {}
        return {
            **about,
            "conditions": asdict(self.conditions),
            "digests": digests,
            "evaluations": [[p, number[s], sparse(e)] for p, s, e in self.evaluations],
            "patches": [json.loads(r.to_json()) for r in self.patches.values()],
            "edges": [
                [
                    number[e.parent],
                    [e.action.kind, list(e.action.regions), e.action.param],
                    None if e.patch is None else patch.get(e.patch),
                    None if e.evaluation is None else keys.get(e.evaluation),
                    int(e.accepted),
                    None if e.child is None else number[e.child],
                ]
                for e in self.edges
            ],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Tree:
        """The tree that `to_data` gave."""
        digests, given = data["digests"], data["conditions"]
        conditions = Conditions(**{**given, "versions": tuple((n, v) for n, v in given["versions"])})
        evaluations = tuple((p, digests[s], dense(e)) for p, s, e in data["evaluations"])
        keys = [evaluation_key(conditions, s, p) for p, s, _ in evaluations]
        names = [content_hash(json.dumps(r, sort_keys=True)) for r in data["patches"]]  # as `Store.put_patch` has it
        patches = dict[str, PatchRecord]()
        for name, record in zip(names, data["patches"], strict=True):
            with suppress(ReplayError):  # another version wrote it, and this one cannot read it
                patches[name] = PatchRecord.from_data(record)
        edges = tuple(
            StoredStep(
                digests[parent],
                action_from_data({"kind": kind, "regions": regions, "param": param}),
                None if patch is None else names[patch],
                None if evaluation is None else keys[evaluation],
                bool(accepted),
                None if child is None else digests[child],
            )
            for parent, (kind, regions, param), patch, evaluation, accepted, child in data["edges"]
            if patch is None or names[patch] in patches
        )
        about = {**{k: data[k] for k in ABOUT}, "identity": data.get("identity", 1), "weights": data.get("weights", "")}
        return cls(**about, conditions=conditions, evaluations=evaluations, patches=patches, edges=edges)


__all__ = ["ABOUT", "Tree", "TreeError"]
