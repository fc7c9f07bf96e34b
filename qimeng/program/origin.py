"""Which texts templates have printed, as this process itself has seen.

Deals in hashes of texts. A field of an implementation, or of a file that it was read from, is a claim that anybody can
make; what stands here was written down by whoever printed it. Checks that cost much, and the rule about what a text may
use, are left out for these alone. Knows nothing about templates.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qimeng.program.program import Implementation

_printed: set[bytes] = set()


def note_printed(implementation: Implementation) -> Implementation:
    """`implementation`, which a template has just printed; for templates, and for nobody else."""
    _printed.add(_key(implementation))
    return implementation


def is_printed(implementation: Implementation) -> bool:
    """Whether a template has printed it in this process."""
    return _key(implementation) in _printed


def _key(implementation: Implementation) -> bytes:
    i = implementation
    parts = (i.language, i.source, i.entry, i.prepare, repr(i.prepare_inputs), repr(i.schedule))
    return hashlib.blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).digest()


__all__ = ["is_printed", "note_printed"]
