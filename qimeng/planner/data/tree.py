"""Explored trees as one small file, which training and CI read without the store.

Deals in lines of JSON, compressed by xz: a head, then one line for each spec under its conditions, with what is needed
to make the spec again, every evaluation, every patch and every edge. Times are rounded to 5 digits; errors of the
numerics, resources and the judge's own seconds are left out. Knows nothing about how a tree was explored.
"""

from __future__ import annotations

import json
import lzma
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.envs.steps.caching import FINAL, ReplayCoder, ReplayEvaluator
from qimeng.errors import QimengError, ReplayError
from qimeng.interfaces import Action, Coder, Evaluation, Gate, Timing
from qimeng.interfaces.records import PatchRecord, action_from_data
from qimeng.program.identity import IDENTITY
from qimeng.store import ACCIDENT, Conditions, Store, StoredStep, content_hash, evaluation_key
from qimeng.store.migration import Tried, renamed

if TYPE_CHECKING:
    from qimeng.envs.steps.task import Task
    from qimeng.planner.data.generate import Drawn
    from qimeng.program.program import Program
    from qimeng.spec import KernelSpec

FORMAT, VERSION = "qimeng trees", 2

READ = (1, VERSION)
"""Versions of the file that are read; since version 2 a tree says by which rule its programs are named."""

ABOUT = ("name", "source", "dtype", "mode", "family", "seed", "index")
"""Fields of a tree that a file has as they are."""

DIGITS = 5
"""Significant digits of a time."""

ERROR = 240
"""Characters kept of the message of a failure."""


class TreeError(QimengError):
    """A file that holds no trees, or a store without what a tree needs."""


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
        return KernelSpec.from_source(self.source, self.name, dtype=self.dtype, mode=self.mode)

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
        return content_hash(_json(_to_data(self)))

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
        return {s: e.ms for purpose, s, e in self.evaluations if purpose != FINAL and e.ok and e.ms is not None}

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
        if self.identity != IDENTITY or start.digest not in self.explored:
            names = renamed(Tried(self.conditions, self.evaluations, self.patches, self.edges), start)
            judged = tuple((p, new, e) for p, s, e in self.evaluations if (new := names.subject(s)) is not None)
            edges = tuple(names.edges[e] for e in self.edges if e in names.edges)
            found = replace(self, evaluations=judged, edges=edges, identity=IDENTITY)
        if start.digest not in found.explored:
            raise TreeError(f"the tree of {self.name} does not begin with the program that this version makes of it")
        return found

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
        device = make_device(self.conditions.device.removesuffix("(here)"))
        context = Context(device, tree.coder(make_coder(coder)), self.mode)
        reference = partial(spec.module, "cpu")
        return Task(start, context, tree.evaluator(), self.conditions, spec.name, reference=reference)


@dataclass(frozen=True)
class Written:
    """What a file of trees holds.

    Attributes:
        specs: different specs.
        trees: trees; a spec explored on two devices has two.
        programs: programs, over all trees.
        evaluations: programs judged, failures included.
        edges: steps.
        size: bytes of the file.
    """

    specs: int
    trees: int
    programs: int
    evaluations: int
    edges: int
    size: int


def write_trees(
    store: Store,
    path: Path | str,
    keep: Callable[[Tree], bool] = lambda tree: True,
    without_source: Collection[str] = (),
) -> Written:
    """Write every tree of `store` that `keep` wants to `path`, in an order that depends on the trees alone.

    Trees whose spec has no source in the store (those of modules and functions) are left out.

    Args:
        store: where the trees are.
        path: file to write.
        keep: whether a tree is wanted.
        without_source: families of specs whose text is left out: that of a benchmark's problems, say, which is not
            ours to pass on. `Tree.with_source` puts it back.

    Raises:
        TreeError: nothing is left to write.
    """
    chosen = [replace(t, source="") if t.family in without_source else t for t in trees_of(store) if keep(t)]
    if not chosen:
        raise TreeError(f"{store.path} holds no tree of a drawn spec that is wanted")
    chosen.sort(key=lambda t: (t.seed or 0, t.index or 0, t.name, t.conditions.digest))
    counts = Written(
        specs=len({t.conditions.spec for t in chosen}),
        trees=len(chosen),
        programs=sum(t.programs for t in chosen),
        evaluations=sum(len(t.evaluations) for t in chosen),
        edges=sum(len(t.edges) for t in chosen),
        size=0,
    )
    head = {"format": FORMAT, "version": VERSION, **asdict(counts)}
    lines = [_json(head), *(_json(_to_data(tree)) for tree in chosen)]
    data = lzma.compress(("\n".join(lines) + "\n").encode(), preset=9)
    Path(path).write_bytes(data)
    return replace(counts, size=len(data))


def read_trees(path: Path | str) -> Iterator[Tree]:
    """The trees of a file, one after another.

    Raises:
        TreeError: the file is not there, holds something else, or was written by another version.
    """
    lines = _lines(path)
    _head(next(lines, ""), path)
    for line in lines:
        yield _from_data(json.loads(line))


def describe(path: Path | str) -> Written:
    """What a file holds, from its head.

    Raises:
        TreeError: as for `read_trees`.
    """
    head = _head(next(_lines(path), ""), path)
    counts = {k: int(v) for k, v in head.items() if k not in ("format", "version")}
    return Written(**{**counts, "size": Path(path).stat().st_size})


def put_drawn(store: Store, drawn: Drawn) -> None:
    """Keep a drawn spec in the store, with all that is needed to make it again."""
    s, where = drawn.spec, {"family": drawn.family, "seed": drawn.seed, "index": drawn.index}
    body = {"source": s.source, "dtype": s.dtype, "mode": s.mode, **where}
    store.put_spec(s.digest, s.name, json.dumps(body, sort_keys=True))


def put_tree(store: Store, tree: Tree) -> None:
    """Add a tree to the store. Its evaluations are then known and not repeated.

    Raises:
        TreeError: it has programs under old names, and nothing of it can be applied any more (`Tree.today`).
    """
    tree = tree if tree.identity == IDENTITY else tree.today()
    body = {k: getattr(tree, k) for k in ABOUT if k != "name"}
    store.put_spec(tree.conditions.spec, tree.name, json.dumps(body, sort_keys=True))
    store.merge(tree.store())


def trees_of(store: Store) -> Iterator[Tree]:
    """The trees of a store whose specs can be made again from it."""
    evaluations: dict[Conditions, list[tuple[str, str, Evaluation]]] = {}
    for conditions, purpose, subject, evaluation in store.evaluations():
        evaluations.setdefault(conditions, []).append((purpose, subject, compact(evaluation)))
    for conditions, judged in evaluations.items():
        body = store.spec(conditions.spec)
        if body is None or not body[1]:
            continue
        edges = store.steps(conditions)
        records = {d: _patch(store, d) for d in dict.fromkeys(e.patch for e in edges if e.patch is not None)}
        about = json.loads(body[1])
        yield Tree(
            name=body[0],
            source=about["source"],
            dtype=about["dtype"],
            mode=about["mode"],
            family=about.get("family", ""),
            seed=about.get("seed"),
            index=about.get("index"),
            conditions=conditions,
            evaluations=tuple(judged),
            patches={d: r for d, r in records.items() if r is not None},
            edges=tuple(e for e in edges if e.patch is None or records[e.patch] is not None),
        )


def _patch(store: Store, digest: str) -> PatchRecord | None:
    """The patch; None where there is none, or another version wrote it and this one cannot read it."""
    try:
        return store.patch(digest)
    except ReplayError:
        return None


def compact(evaluation: Evaluation) -> Evaluation:
    """`evaluation` with what a planner learns from: outcome, times, the regions' times, what was chosen."""
    e = evaluation
    return Evaluation(
        gate=e.gate,
        error=None if e.error is None else e.error[:ERROR],
        failure=e.failure,
        timing=_rounded(e.timing),
        eager=_rounded(e.eager),
        chosen=e.chosen,
        region_ms={region: _round(ms) for region, ms in e.region_ms.items()},
        generated_share=None if e.generated_share is None else _round(e.generated_share),
        configurations=e.configurations,
    )


# ---- one tree as data: hashes that stand in several places are written once


def _to_data(tree: Tree) -> dict[str, Any]:
    digests = list(dict.fromkeys(d for e in tree.edges for d in (e.parent, e.child) if d is not None))
    digests += [s for s in dict.fromkeys(s for _, s, _ in tree.evaluations) if s not in set(digests)]
    number = {d: i for i, d in enumerate(digests)}
    patch = {d: i for i, d in enumerate(tree.patches)}
    keys = {evaluation_key(tree.conditions, s, p): i for i, (p, s, _) in enumerate(tree.evaluations)}
    about = {k: getattr(tree, k) for k in (*ABOUT, "identity")}
    return {
        **about,
        "conditions": asdict(tree.conditions),
        "digests": digests,
        "evaluations": [[p, number[s], _sparse(e)] for p, s, e in tree.evaluations],
        "patches": [json.loads(r.to_json()) for r in tree.patches.values()],
        "edges": [
            [
                number[e.parent],
                [e.action.kind, list(e.action.regions), e.action.param],
                None if e.patch is None else patch.get(e.patch),
                None if e.evaluation is None else keys.get(e.evaluation),
                int(e.accepted),
                None if e.child is None else number[e.child],
            ]
            for e in tree.edges
        ],
    }


def _from_data(data: dict[str, Any]) -> Tree:
    digests, given = data["digests"], data["conditions"]
    conditions = Conditions(**{**given, "versions": tuple((n, v) for n, v in given["versions"])})
    evaluations = tuple((p, digests[s], _dense(e)) for p, s, e in data["evaluations"])
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
    about = {**{k: data[k] for k in ABOUT}, "identity": data.get("identity", 1)}
    return Tree(**about, conditions=conditions, evaluations=evaluations, patches=patches, edges=edges)


def _sparse(e: Evaluation) -> dict[str, Any]:
    """The fields that `compact` keeps, those with their usual value left out."""
    data = {
        "gate": "" if e.ok else e.gate.value,
        "error": e.error,
        "failure": e.failure,
        "timing": _timing_data(e.timing),
        "eager": _timing_data(e.eager),
        "chosen": e.chosen,
        "region_ms": dict(e.region_ms),
        "generated_share": e.generated_share,
        "configurations": e.configurations - 1,
    }
    return {key: value for key, value in data.items() if value or key == "generated_share" and value is not None}


def _dense(data: dict[str, Any]) -> Evaluation:
    return Evaluation(
        gate=Gate(data.get("gate", Gate.PASSED.value)),
        error=data.get("error"),
        failure=data.get("failure"),
        timing=_timing(data.get("timing")),
        eager=_timing(data.get("eager")),
        chosen=data.get("chosen", 0),
        region_ms=data.get("region_ms", {}),
        generated_share=data.get("generated_share"),
        configurations=data.get("configurations", 0) + 1,
    )


def _timing_data(t: Timing | None) -> list[Any] | None:
    return None if t is None else [t.device_ms, t.spread, t.wall_ms, t.calls, int(t.estimated)]


def _timing(data: list[Any] | None) -> Timing | None:
    if data is None:
        return None
    device_ms, spread, wall_ms, calls, estimated = data
    return Timing(device_ms, spread, wall_ms, calls, bool(estimated))


def _rounded(t: Timing | None) -> Timing | None:
    if t is None:
        return None
    wall = None if t.wall_ms is None else _round(t.wall_ms)
    return replace(t, device_ms=_round(t.device_ms), spread=_round(t.spread), wall_ms=wall)


def _round(x: float) -> float:
    """`x` with `DIGITS` significant digits.

    >>> _round(0.0123456789)
    0.012346
    """
    return float(f"{x:.{DIGITS}g}")


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _lines(path: Path | str) -> Iterator[str]:
    try:
        with lzma.open(path, "rt") as text:
            yield from text
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise TreeError(f"{path} cannot be read as trees: {error}") from None


def _head(line: str, path: Path | str) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TreeError(f"{path} holds no trees")
    if head["version"] not in READ:
        raise TreeError(f"{path} has version {head['version']} of trees, this library reads up to version {VERSION}")
    return head


__all__ = [
    "Tree",
    "TreeError",
    "Written",
    "compact",
    "describe",
    "put_drawn",
    "put_tree",
    "read_trees",
    "trees_of",
    "write_trees",
]
