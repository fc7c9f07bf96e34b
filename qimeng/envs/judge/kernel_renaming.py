"""Gives a program's kernels secret names, so that a profiler's list identifies their code.

Deals in the text of generated implementations. A candidate's kernel with a library's name, or a library's kernel with a
candidate's name, does not have the name given here. Knows nothing about profilers.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from qimeng.envs.workers.kernel_launches import kernel_names
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
