"""Tensors without memory.

Deals in running code for its shapes alone. Knows nothing about what is run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """New tensors have shapes and no memory inside.

    Wrong shapes raise as they do on real tensors. PyTorch's own log, a traceback for every attempt, is suppressed.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before
