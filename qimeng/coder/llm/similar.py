"""Finds accepted patches that resemble a request: similar verified code helps a model most.

Deals in a store's steps: by the operators, shapes and dtype of the region that was written, and by the action. Only
patches that passed every gate are used. Source: GEAK (retrieval raised the share of kernels that run from 20 to 41 %).
Knows nothing about prompts.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from qimeng.coder.llm.shown import shown_source, target_region
from qimeng.interfaces import Action, Request
from qimeng.interfaces.records import PatchRecord, implementation_from_data
from qimeng.program.program import Implementation
from qimeng.store import Store, StoredStep

LEAST = 0.5
"""Minimum similarity of a patch that is shown; 1 means equal operators, shapes, dtype and action."""

OPERATORS = 0.5
"""Weight of the operators in the similarity."""

MOST = 4000
"""Accepted steps that a library reads: a second's work for every thousand."""

Tensor = tuple[tuple[int, ...], str]
"""Shape and dtype of one output."""


@dataclass(frozen=True)
class Traits:
    """What similarity looks at.

    Attributes:
        ops: operators of the region, views left out.
        outputs: shape and dtype of each output.
        kind: of the action.
        param: of the action.
    """

    ops: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    kind: str
    param: str = ""

    def text(self) -> str:
        """One line for people and models."""
        shapes = ", ".join(f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}" for shape, dtype in self.outputs)
        return f"{'+'.join(self.ops)} [{shapes}], {f'{self.kind} {self.param}'.strip()}"


@dataclass(frozen=True)
class Similar:
    """One accepted patch.

    Attributes:
        traits: of the region and the action.
        implementation: what was accepted.
        before: what it replaced; None where that was several regions, or PyTorch.
        spec: digest of the specification it was made for.
    """

    traits: Traits
    implementation: Implementation
    before: Implementation | None
    spec: str

    def source(self) -> str:
        """The accepted code as a model sees it."""
        return shown_source(self.implementation)


def traits_of(request: Request) -> Traits:
    """The traits of what `request` asks for."""
    region, action = target_region(request), request.action
    metas = [region.graph.meta(v) for v in region.outputs]
    return Traits(tuple(region.label().split("+")), tuple((m.shape, m.dtype) for m in metas), action.kind, action.param)


def similarity(a: Traits, b: Traits) -> float:
    """From 0 to 1: half for the operators (shared ones over all), a fifth each for shapes and action, the rest dtype.

    >>> add = Traits(("add",), (((64, 8), "float32"),), "lowering")
    >>> similarity(add, add)
    1.0
    """
    dtype = float([d for _, d in a.outputs] == [d for _, d in b.outputs])
    action = (a.kind == b.kind) * (1.0 if a.param == b.param else 0.6)
    return round(OPERATORS * alike(a.ops, b.ops) + 0.2 * _shapes(a.outputs, b.outputs) + 0.2 * action + 0.1 * dtype, 6)


def alike(a: Sequence[str], b: Sequence[str]) -> float:
    """How many of the operators of two chains are shared, over all of both.

    >>> alike(("add", "mul"), ("mul", "exp"))
    0.3333333333333333
    """
    ours, theirs = Counter(a), Counter(b)
    return (ours & theirs).total() / max((ours | theirs).total(), 1)


def _shapes(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    """1 for equal shapes; less for other ranks and for every factor of two between the extents."""
    if not a or not b or len(a) != len(b):
        return 0.0
    total = 0.0
    for (mine, _), (theirs, _) in zip(a, b, strict=True):
        apart = sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in zip(mine, theirs, strict=False))
        total += (0.5 if len(mine) != len(theirs) else 1.0) / (1 + apart / 4)
    return total / len(a)


class Library:
    """The accepted patches of a store.

    Args:
        store: where they are.
        exclude: digests of specifications whose patches are left out: in an evaluation, those that are evaluated.

    A store that grows is read again by a new library.
    """

    def __init__(self, store: Store, exclude: Collection[str] = ()):
        self.store, self.exclude = store, frozenset(exclude)

    def nearest(self, request: Request, count: int = 2) -> tuple[Similar, ...]:
        """At most `count` patches, the most similar first, none of them twice and none below `LEAST`.

        Only patches for the same mode are used, because what `high` allows is wrong in other modes.
        """
        wanted = traits_of(request)
        present = {request.program.implementation(request.program.region(r)).digest for r in request.action.regions}
        ranked = sorted(
            ((similarity(wanted, s.traits), s.implementation.digest, s) for s in self._by_mode.get(request.mode, ())),
            key=lambda item: (-item[0], item[1]),
        )
        chosen: dict[str, Similar] = {}
        for score, digest, found in ranked:
            if score < LEAST or len(chosen) == count:
                break
            if digest not in present:
                chosen.setdefault(digest, found)
        return tuple(chosen.values())

    @cached_property
    def _by_mode(self) -> dict[str, tuple[Similar, ...]]:
        found: dict[str, dict[tuple[str, Traits], Similar]] = {}
        accepted = (
            (c, step)
            for c in self.store.conditions()
            if c.spec not in self.exclude
            for step in self.store.steps(c)
            if step.accepted and step.evaluation is not None
        )
        for conditions, step in islice(accepted, MOST):
            item = accepted_patch(self.store, step, conditions.spec)
            if item is not None:
                found.setdefault(conditions.mode, {})[item.implementation.digest, item.traits] = item
        return {mode: tuple(items.values()) for mode, items in found.items()}


def accepted_patch(store: Store, step: StoredStep, spec: str) -> Similar | None:
    """What `step` wrote; None where it was refused, passed not every gate, or wrote no kernel."""
    if not step.accepted or step.patch is None or step.evaluation is None or step.child is None:
        return None
    evaluation, patch = store.evaluation_of(step.evaluation), store.patch(step.patch)
    if evaluation is None or not evaluation.ok or patch is None or not patch.alternatives:
        return None
    if any("not checked" in note for note in evaluation.notes):  # without a GPU some kernels cannot be
        return None
    implementation = patch.alternatives[evaluation.chosen]
    if not implementation.generated:
        return None
    traits = _traits(store, step, implementation)
    return None if traits is None else Similar(traits, implementation, _before(store, step, patch), spec)


def _traits(store: Store, step: StoredStep, implementation: Implementation) -> Traits | None:
    """Operators from the heading of the region's section in the program, outputs from where the code allocates them."""
    program = store.program(step.child or "")
    found = re.search(
        rf"^# ---- (.+)\n(?:(?!^# ---- ).*\n)*?def {re.escape(implementation.entry)}\(",
        program[1] if program else "",
        re.M,
    )
    if found is None:
        return None
    outputs = tuple(
        (tuple(int(n) for n in re.findall(r"\d+", shape)), dtype)
        for shape, dtype in re.findall(
            r"\by\d+ = torch\.empty_strided\(\(([^)]*)\), \([^)]*\), dtype=torch\.(\w+)", implementation.source
        )
    )
    action: Action = step.action
    return Traits(tuple(found.group(1).split("+")), outputs, action.kind, action.param)


def _before(store: Store, step: StoredStep, patch: PatchRecord) -> Implementation | None:
    """The implementation that the target had in the parent, where it had one of its own."""
    parent, child = store.program(step.parent), store.program(step.child or "")
    if parent is None or child is None or patch.regions is not None:
        return None
    old, new = json.loads(parent[0])["implementations"], json.loads(child[0])["implementations"]
    changed = [s for s, i in new.items() if old.get(s) != i]
    return implementation_from_data(old[changed[0]]) if len(changed) == 1 and changed[0] in old else None


__all__ = ["LEAST", "OPERATORS", "Library", "Similar", "Traits", "accepted_patch", "alike", "similarity", "traits_of"]
