"""Whether templates and PyTorch alone wrote a program, as far as this process can tell for itself.

A program that was read from a file or from a store says which schedule it was printed from. That is a claim: the
template prints the region again, and what is not the same text is someone else's. Deals in programs and templates.
Knows nothing about what follows from the answer.
"""

from __future__ import annotations

from qimeng.graph.region import Region
from qimeng.program.origin import is_printed
from qimeng.program.program import Implementation, Program, torch_implementation


def printed(program: Program) -> bool:
    """Whether no text of a model's, or of anyone else's, is in `program`."""
    return all(known(region, program.implementation(region)) for region in program.regions)


def foreign(program: Program) -> tuple[Implementation, ...]:
    """The implementations of `program` that someone else wrote."""
    if program.fallback:
        return ()
    every = {i.digest: (r, i) for r in program.regions for i in [program.implementation(r)]}
    return tuple(i for r, i in every.values() if not known(r, i))


def known(region: Region, implementation: Implementation) -> bool:
    """Whether PyTorch's text or a template's computes `region`; one that was read from somewhere is printed again."""
    if is_printed(implementation) or implementation == torch_implementation(region):
        return True
    if implementation.schedule is None:
        return False
    from qimeng.coder.template.axes import Unsupported
    from qimeng.coder.template.coder import TemplateCoder

    try:
        TemplateCoder().print(region, implementation.schedule)  # notes what it prints
    except (
        Unsupported,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # a schedule that was made up
        return False
    return is_printed(implementation)


__all__ = ["foreign", "known", "printed"]
