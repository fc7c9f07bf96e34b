"""Finds generated specs that compute the same as a benchmark's problem.

Deals in signatures of specs and of a folder's problem files. `reserved.json` holds the structures of the benchmarks
that planners are judged on. So such specs are left out even without the benchmarks at hand. Where they are at hand, a
test compares the file with them. Knows nothing about how specs are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qimeng.errors import QimengError, SpecError
from qimeng.planner.data.signature import signature, structure
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

RESERVED = Path(__file__).with_name("reserved.json")
"""Structures that no training spec may have: a JSON list of hashes."""


@dataclass(frozen=True)
class Signatures:
    """The two signatures of a spec.

    Attributes:
        structure: operators and wiring.
        whole: the same with shapes, dtypes and numbers.
    """

    structure: str
    whole: str


@dataclass(frozen=True)
class Overlaps:
    """What drawn specs and problems have in common.

    Attributes:
        same: (spec, problem) names with the same whole signature.
        alike: (spec, problem) names with the same structure.
        problems: problems that were captured.
        not_captured: problem to why it could not be captured; they take part in nothing.
    """

    same: tuple[tuple[str, str], ...]
    alike: tuple[tuple[str, str], ...]
    problems: int
    not_captured: Mapping[str, str]


def signatures_of(spec: KernelSpec) -> Signatures:
    """The signatures of `spec`, from its graph as captured (not held against the module).

    Raises:
        SpecError: it cannot be captured.
    """
    graph = capture_spec(spec, verify=False)
    return Signatures(structure(graph), signature(graph))


def problem_signatures(folder: Path | str) -> tuple[dict[str, Signatures], dict[str, str]]:
    """Signatures of every problem file below `folder`, by path, and why others could not be captured.

    Raises:
        QimengError: no Python file is there.
    """
    files = sorted(Path(folder).rglob("*.py"))
    if not files:
        raise QimengError(f"no problem files below {folder}")
    found: dict[str, Signatures] = {}
    failed: dict[str, str] = {}
    for path in files:
        name = str(path.relative_to(folder))
        try:
            found[name] = signatures_of(KernelSpec.from_file(path))
        except SpecError as error:
            failed[name] = str(error)
    return found, failed


def overlaps(specs: Mapping[str, Signatures], folder: Path | str) -> Overlaps:
    """What `specs`, by name, have in common with the problems below `folder`.

    Raises:
        QimengError: no Python file is there.
    """
    problems, failed = problem_signatures(folder)
    pairs = [(s, p) for s, a in specs.items() for p, b in problems.items() if a.structure == b.structure]
    same = [(s, p) for s, p in pairs if specs[s].whole == problems[p].whole]
    return Overlaps(tuple(same), tuple(pairs), len(problems), failed)


@cache
def reserved() -> frozenset[str]:
    """Structures that no training spec may have."""
    return frozenset(json.loads(RESERVED.read_text()))


def reserve(found: Iterable[Signatures]) -> None:
    """Write `reserved.json` anew from these signatures."""
    RESERVED.write_text(json.dumps(sorted({s.structure for s in found}), indent=0) + "\n")
    reserved.cache_clear()


__all__ = ["Overlaps", "Signatures", "overlaps", "problem_signatures", "reserve", "reserved", "signatures_of"]
