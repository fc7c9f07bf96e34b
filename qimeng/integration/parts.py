"""Which submodules of a model get a program: the whole model where it is small, else what is repeated and takes time.

Deals in choosing. Knows nothing about how programs are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from qimeng.errors import SpecError
from qimeng.integration.calls import Key
from qimeng.integration.profile import ROOT, Visit

SMALL, MEDIUM = 64, 256
"""Calls of modules without submodules up to which a model is optimized as a whole; up to the second one where nothing
that is repeated takes half of its time. A ResNet-50 has 185, six layers of a Llama 63."""
WHOLE = (ROOT,)
"""The pattern that only the model itself fits."""
LEAST_SHARE = 0.02
"""Share of the model's time below which a part is left alone."""


@dataclass(frozen=True)
class Part:
    """Submodules that look alike and are called alike, so that one program may serve all of them.

    Attributes:
        names: of the submodules, in the order of their first calls.
        key: of the call.
        share: of the model's time that they take together, 0 to 1.
    """

    names: tuple[str, ...]
    key: Key
    share: float

    @property
    def name(self) -> str:
        """Of the submodule that stands for all."""
        return self.names[0]


def choose(seen: dict[str, Visit], patterns: Sequence[str] = ()) -> list[Part]:
    """The parts of a model, the one that takes most first.

    Args:
        seen: what was seen in a call of the model.
        patterns: names of the submodules that are wanted, ``"model.layers.*"``, or `WHOLE`; by default the whole model
            if it is small (`SMALL`, `MEDIUM`), else what is repeated and takes most, and the largest modules beside.

    Raises:
        SpecError: a pattern fits no submodule that is called.
    """
    total = max(seen[ROOT].seconds, 1e-9)
    fitting = [v for v in seen.values() if None not in v.keys and len(set(v.keys)) == 1]
    if patterns:
        for pattern in patterns:
            if not any(fnmatchcase(v.name, pattern) for v in fitting):
                raise SpecError(f"parts: {pattern!r} fits no submodule that a call of the model calls with tensors")
        chosen = _outermost([v for v in fitting if any(fnmatchcase(v.name, p) for p in patterns)])
    else:
        leaves = sum(v.calls for v in seen.values() if next(v.module.children(), None) is None)
        repeated = _repeated(fitting)
        most = MEDIUM if sum(v.seconds for v in repeated) < total / 2 else SMALL
        whole = [v for v in fitting if v.name == ROOT and leaves <= most]
        chosen = whole or _outermost(repeated or fitting)
        covered = {v.name for v in chosen}
        rest = [v for v in fitting if not (covered & {v.name, *v.inside}) and not _holds(v, covered, seen)]
        chosen += _outermost(rest)
    groups: dict[tuple[object, ...], list[Visit]] = {}
    for visit in chosen:
        groups.setdefault((_looks(visit.module), visit.keys[0]), []).append(visit)
    parts = []
    for members in groups.values():
        key = members[0].keys[0]
        assert key is not None
        parts.append(Part(tuple(v.name for v in members), key, sum(v.seconds for v in members) / total))
    kept = [part for part in parts if part.share >= LEAST_SHARE or patterns]
    return sorted(kept, key=lambda part: -part.share)


def _repeated(visits: Sequence[Visit]) -> list[Visit]:
    """Of the modules that look alike, those of the kind that takes most time; the outer one of equals."""
    kinds: dict[tuple[object, ...], list[Visit]] = {}
    for visit in visits:
        kinds.setdefault((_looks(visit.module), visit.keys[0]), []).append(visit)
    several = [members for members in kinds.values() if len(members) > 1]
    return max(several, key=lambda members: sum(v.seconds for v in members), default=[])


def _outermost(visits: Sequence[Visit]) -> list[Visit]:
    """Those that are called within none of the others."""
    names = {v.name for v in visits}
    return [v for v in visits if not names & set(v.inside)]


def _holds(visit: Visit, names: set[str], seen: dict[str, Visit]) -> bool:
    """Whether one of these is called within `visit`."""
    return any(visit.name in seen[name].inside for name in names)


def _looks(module: nn.Module) -> tuple[object, ...]:
    """Class, and the layout of all tensors: what equal submodules have in common."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), tuple((name, tuple(t.shape), t.stride(), t.dtype) for name, t in tensors)


__all__ = ["LEAST_SHARE", "MEDIUM", "SMALL", "WHOLE", "Part", "choose"]
