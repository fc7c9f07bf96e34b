"""Finds the region of a request, and prepares its present code for a model.

A model sees this text, and its edits apply to it. The function is called `region`, and the one that prepares buffers
`prepare`. All other names lose the prefix that makes them unique in a whole program.
"""

from __future__ import annotations

import re

from qimeng.actions import kind_named
from qimeng.coder.llm.fence import tame
from qimeng.graph.region import Region
from qimeng.interfaces import Request
from qimeng.program.program import Implementation

ENTRY = "region"
"""Name of the function that a model is asked for."""

PREPARE = "prepare"
"""Name of the function that makes buffers out of parameters, where there is one."""

_PREFIX = re.compile(r"^[a-z][0-9a-f]{8,16}_(?=[A-Za-z])")


def target_region(request: Request) -> Region:
    """The region that gets a new implementation: what the action leads to (two regions become one), or names.

    Raises:
        IllegalAction: the action names no region of this program, or no possible fusion.
    """
    return kind_named(request.action.kind).target(request.program, request.action)


def base_source(request: Request) -> str | None:
    """The text that search/replace edits apply to, just as the prompt shows it.

    On repair it is the patch that failed, else the present implementation; None for a first try at a region that is
    new (a fusion), where only a whole one will do.
    """
    if request.failed is not None and request.failed.alternatives:
        return shown_source(request.failed.alternatives[request.refused])
    region = target_region(request)
    if region not in request.program.regions:
        return None
    return shown_source(request.program.implementation(region))


def shown_source(implementation: Implementation) -> str:
    """The source with its entry called `region` and the other names as short as they can be."""
    return shown_names(tame(implementation.source).strip("\n") + "\n", implementation)


def shown_names(text: str, implementation: Implementation) -> str:
    """`text` (the source, or a message about it) with the names that `shown_source` gives."""
    used = set(re.findall(r"\w+", implementation.source))
    new = {implementation.entry: ENTRY}
    if implementation.prepare:
        new[implementation.prepare] = PREPARE
    imported = re.findall(r"\b(\w+) as (\w+)", implementation.source)
    new |= {alias: name for name, alias in imported if alias != name and _PREFIX.sub("", alias) == name}
    for name in sorted(used - set(new)):
        short = _PREFIX.sub("", name)
        short = short if short not in used else f"{short}_kernel"
        if short not in used and short not in new.values() and _PREFIX.match(name):
            new[name] = short
    text = re.sub(r"\w+", lambda found: new.get(found.group(), found.group()), text)
    return re.sub(r"\b(\w+) as \1\b", r"\1", text)


__all__ = ["ENTRY", "PREPARE", "base_source", "shown_names", "shown_source", "target_region"]
