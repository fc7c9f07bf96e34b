"""Whether templates and PyTorch alone wrote a program, as far as this process can tell for itself.

A program that was read from a file or from a store says which schedule it was printed from. That is a claim: the
template prints the region again, and what is not the same text is someone else's. Deals in programs and templates.
Knows nothing about what follows from the answer.
"""

from __future__ import annotations

from contextlib import suppress

from qimeng.graph.region import Region
from qimeng.interfaces import Patch
from qimeng.program.origin import is_printed, is_reference
from qimeng.program.program import Implementation, Program, torch_implementation


def printed(program: Program) -> bool:
    """Whether no text of a model's, or of anyone else's, is in `program`."""
    return not foreign(program)


def foreign(program: Program) -> tuple[Implementation, ...]:
    """The implementations of `program` that someone else wrote, each once."""
    if program.fallback:
        own = is_reference(program.fallback)
        return () if own else (Implementation("torch", program.fallback, "Model"),)
    pairs = ((region, program.implementation(region)) for region in program.regions)
    found: list[Implementation] = []
    for implementation in (i for region, i in pairs if not known(region, i)):
        if not any(implementation is other for other in found):
            found.append(implementation)
    return tuple(found)


def is_sweep(program: Program, patch: Patch) -> bool:
    """Whether templates and PyTorch wrote all alternatives of `patch`; any others must not share a process."""
    if patch.target is None:
        return not patch.alternatives
    target = patch.apply(program).region(patch.target)
    return all(known(target, alternative) for alternative in patch.alternatives)


def known(region: Region, implementation: Implementation) -> bool:
    """Whether PyTorch's text or a template's computes `region`; one that was read from somewhere is printed again."""
    if type(implementation) is not Implementation:
        return False
    if is_printed(region, implementation) or implementation == torch_implementation(region):
        return True
    if implementation.schedule is None:
        return False
    from qimeng.coder.template.coder import TemplateCoder

    with suppress(Exception):  # a schedule that was made up
        TemplateCoder().print(region, implementation.schedule)  # notes what it prints
    return is_printed(region, implementation)


__all__ = ["foreign", "is_sweep", "known", "printed"]
