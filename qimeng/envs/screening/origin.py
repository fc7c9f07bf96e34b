"""Decides whether only templates and PyTorch wrote a program, without trusting any record.

A program from a file or a store names the schedule of each kernel. That is only a claim. So the template prints the
region again, and any other text counts as untrusted. Deals in programs and templates. Knows nothing about the
consequences.
"""

from __future__ import annotations

from contextlib import suppress

from qimeng.graph.region import Region
from qimeng.interfaces import Patch
from qimeng.library import is_library
from qimeng.program.origin import is_plain, is_printed, is_reference
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
    if not is_plain(implementation):
        return False
    if is_printed(region, implementation) or implementation == torch_implementation(region):
        return True
    if is_library(region, implementation):
        return True
    if implementation.schedule is None:
        return False
    from qimeng.coder.template.coder import TemplateCoder

    with suppress(Exception):  # a schedule that was made up
        TemplateCoder().print(region, implementation.schedule)  # notes what it prints
    return is_printed(region, implementation)


__all__ = ["foreign", "is_sweep", "known", "printed"]
