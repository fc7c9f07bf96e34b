"""A program whose kernels bear names that nobody knew before, so that a profiler's list tells them by their code.

Deals in the text of generated implementations. A kernel that is called like a library's, or a library's that is called
like a candidate's, has another name than the one that its text was given here. Knows nothing about profilers.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from qimeng.envs.launches import kernel_names
from qimeng.program.program import Program


def with_secret_names(program: Program) -> tuple[Program, dict[str, int | None]]:
    """`program` with new names for the kernels of its generated implementations, and those names.

    A name is changed wherever it stands as a word of its own, in texts as well; not as an attribute (``torch.add``).
    """
    own: dict[str, int | None] = {}
    for region in program.regions:
        implementation = program.implementation(region)
        if not implementation.generated:
            continue
        text = implementation.source
        for name in kernel_names(implementation):
            secret = f"k{secrets.token_hex(8)}"
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", secret, text)
            own[secret] = None
        program = program.with_implementation(region.id, replace(implementation, source=text))
    return program, own


__all__ = ["with_secret_names"]
